"""What a reader of a format is made of, and the helpers that several share."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from awpo.chat import DEEPEST_VALUE
from awpo.data import schema, strict_json
from awpo.data.call_syntax import scan_literal
from awpo.types import Dialogue, Message, Split, Tool, ToolCall, content_hash

NO_CALL_REPLY = "None of the available tools can be used for this request."
"""The target where a source says that no call is due and gives no words of its own.

An instance's target is a call, a reply or both, so "no call" is a reply; the outcome reward asks for no call and a
reply that is not empty, whatever its words (`awpo.rewards`)."""


class RowError(ValueError):
    """A row that is not used. `reason` is one of a small set, for counting; `detail` says what exactly and where."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that is not used: its number (from 0) in `file`, the reason (one of a small set), and the detail."""

    row: int
    reason: str
    detail: str = ""
    file: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "row": self.row, "reason": self.reason, "detail": self.detail}


@dataclass(frozen=True, slots=True)
class Source:
    """A format that can be read.

    `sniff` says whether a row looks like this format; `read` turns a row into a dialogue or raises RowError.
    `version` grows when what `read` returns changes, so that results made with an older reader are redone.
    `last_step_only`: the rows are instances already, their earlier assistant steps are history; only the last step
    of each becomes an instance.
    """

    name: str
    summary: str
    sniff: Callable[[Any], bool]
    read: Callable[[Mapping[str, Any]], Dialogue]
    version: int
    last_step_only: bool = False


_SPLITS: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
    "test_phrasings": "test_phrasings",
    "test_tools": "test_tools",
}


def read_split(value: Any) -> Split | None:
    """The split a row names, None where it names none. Raises RowError for a name that is not known."""
    if value is None or value == "":
        return None
    if not isinstance(value, str) or value.lower() not in _SPLITS:
        raise RowError("unknown split", repr(value)[:80])
    return _SPLITS[value.lower()]


def split_thought(text: str) -> tuple[str | None, str]:
    """Takes a leading `<think> ... </think>` off a text: (thought or None, rest).

    The thought ends at the last closing tag, because a thought may itself name the tags.
    """
    stripped = text.lstrip()
    if not stripped.startswith("<think>") or "</think>" not in stripped:
        return None, text
    thought, _, rest = stripped.removeprefix("<think>").rpartition("</think>")
    return thought.strip() or None, rest.lstrip("\n")


def read_call(value: Any, where: str, arguments_key: str = "arguments") -> ToolCall:
    """A call from `{"name", arguments_key}`, as an object or as JSON text; arguments may be JSON text too.

    Raises RowError where it is not exactly that.
    """
    if isinstance(value, str):
        try:
            value = strict_json.parse(value)
        except ValueError as error:
            raise RowError("a tool call is not JSON", f"{where}: {error}") from None
    if not isinstance(value, Mapping):
        raise RowError("malformed tool call", f"{where}: not an object")
    name, arguments = value.get("name"), value.get(arguments_key)
    if isinstance(arguments, str):
        try:
            arguments = strict_json.parse(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise RowError("a tool call's arguments are not JSON", f"{where}: {error}") from None
    if arguments is None:
        arguments = {}
    others = [key for key, given in value.items() if key not in ("name", arguments_key) and given is not None]
    if strict_json.depth(arguments) > DEEPEST_VALUE:
        raise RowError("malformed tool call", f"{where}: arguments nested deeper than {DEEPEST_VALUE}")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or others:
        raise RowError("malformed tool call", f"{where}: needs 'name' and an object {arguments_key!r}, nothing else")
    return ToolCall(name, arguments)


def read_value(text: str) -> Any:
    """The value that a text holds, as JSON, else as a Python literal; ValueError, with JSON's reason, where neither."""
    try:
        return strict_json.parse(text)
    except ValueError as error:
        value, problem = scan_literal(text)
        if problem is not None or not strict_json.is_encodable(value):
            raise ValueError(str(error) if problem is None else f"{error}; as Python: {problem}") from None
        return value


_NAME_KEYS = ("name", "tool", "api", "api_name")
_ARGUMENT_KEYS = ("arguments", "parameters")


def read_call_of_any_keys(value: Any, where: str, ignored: Collection[str] = ()) -> ToolCall:
    """A call whose name stands under `name`, `tool` or `api` and its arguments under `arguments` or `parameters`.

    Keys in `ignored` are no part of the call. Raises RowError where it is not exactly that.
    """
    if not isinstance(value, Mapping):
        raise RowError("malformed tool call", f"{where}: not an object")
    names = [key for key in _NAME_KEYS if value.get(key) is not None]
    arguments = [key for key in _ARGUMENT_KEYS if value.get(key) is not None]
    if len(names) > 1 or len(arguments) > 1:
        raise RowError("malformed tool call", f"{where}: both {' and '.join((names + arguments)[-2:])}")
    rest = {key: part for key, part in value.items() if key not in (*_NAME_KEYS, *_ARGUMENT_KEYS, *ignored)}
    call = {"name": value.get(names[0]) if names else None, "arguments": value.get(arguments[0]) if arguments else None}
    return read_call({**rest, **call}, where)


def read_calls(value: Any, what: str, ignored: Collection[str] = ()) -> tuple[ToolCall, ...]:
    """The calls of a list of them, as a list or as text of one; null and empty text are no calls. Raises RowError."""
    if isinstance(value, str):
        try:
            value = read_value(value) if value.strip() else []
        except ValueError as error:
            raise RowError("a tool call is not JSON", f"{what}: {error}") from None
    if value is None:
        return ()
    calls = value if isinstance(value, list) else [value]
    return tuple(read_call_of_any_keys(call, f"{what}, call {index}", ignored) for index, call in enumerate(calls))


def action(calls: tuple[ToolCall, ...]) -> Message:
    """The step that a list of calls asks for: the calls, or, where there are none, the reply that no tool fits."""
    return Message("assistant", None if calls else NO_CALL_REPLY, calls)


class CallNames(NamedTuple):
    """What the calls of a step are named, and the name that they all have, if they have one."""

    names: list[str]
    common: str | None

    @classmethod
    def of(cls, calls: tuple[ToolCall, ...]) -> CallNames:
        names = [call.name for call in calls]
        return cls(names, names[0] if len(set(names)) == 1 else None)


def read_results(text: str, calls: CallNames) -> list[Message]:
    """One tool message per call where the text lists one object per call, each with its name; else one message."""
    names = calls.names
    try:
        value = strict_json.parse(text)
    except ValueError:
        value = None
    if names and isinstance(value, list) and [isinstance(part, dict) and part.get("name") for part in value] == names:
        return [
            Message("tool", strict_json.dump(part, spaced=True), name=name)
            for part, name in zip(value, names, strict=True)
        ]
    return [Message("tool", text, name=calls.common)]


def row_id(value: Any, prefix: str, tools: tuple[Tool, ...], messages: tuple[Message, ...]) -> str:
    """The id of a dialogue: the row's own, after `prefix`, where it has one, else the hash of its content."""
    if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
        return f"{prefix}{value}"
    return dialogue_hash(tools, messages)


_tools: dict[bytes, Tool] = {}
TOOLS_KEPT = 4096


def read_tool(value: Any, where: str) -> Tool:
    """`_read_tool`, for a tool that was read before the same object: many rows of a set offer the same tools."""
    try:
        key = marshal.dumps(value, 2)  # version 2: the bytes depend on the value alone, not on who else refers to it
    except ValueError:  # of a type that JSON does not have, or nested too deeply
        return _read_tool(value, where)
    tool = _tools.get(key)
    if tool is None:
        tool = _read_tool(value, where)
        if len(_tools) >= TOOLS_KEPT:
            _tools.clear()
        _tools[key] = tool
    return tool


def _read_tool(value: Any, where: str) -> Tool:
    """A tool from the OpenAI form or the bare function; its parameters are normalised (`awpo.data.schema`).

    Keys of a function beyond name, description and parameters (`strict`, a description of what is returned) are no
    part of a tool here. Raises RowError where it cannot be read.
    """
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if isinstance(function, Mapping) and "name" not in function and isinstance(function.get("api_name"), str):
        # Seal-Tools' words for the same things
        function = {**function, "name": function["api_name"], "description": function.get("api_description")}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError("malformed tool", f"{where}: needs a 'name'")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise RowError("malformed tool", f"{where} ({function['name']}): the description is not text")
    try:
        parameters = schema.normalise_parameters(function.get("parameters"))
    except ValueError as error:
        raise RowError("malformed tool", f"{where} ({function['name']}): {error}") from None
    given, required = function.get("parameters"), function.get("required")
    own = isinstance(given, Mapping) and isinstance(given.get("required"), list)
    if isinstance(required, list) and all(isinstance(part, str) for part in required) and not own:
        parameters = {**parameters, "required": required}  # said beside the parameters, it holds more than any guess
    return Tool(function["name"], description or "", parameters)


def read_tools(value: Any) -> tuple[Tool, ...]:
    """The tools of a row: a list of them, such a list as JSON text, or nothing. Raises RowError."""
    return _read_tools_text(value) if isinstance(value, str) else _read_tools(value)


@lru_cache(maxsize=1024)  # dialogues that offer the same tools have the same text
def _read_tools_text(text: str) -> tuple[Tool, ...]:
    try:
        value = read_value(text) if text.strip() else []
    except ValueError as error:
        raise RowError("the list of tools is not JSON", str(error)) from None
    return _read_tools(value)


def _read_tools(value: Any) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RowError("malformed tool", "the tools are not a list")
    return tuple(read_tool(tool, f"tool {index}") for index, tool in enumerate(value))


def dialogue_hash(tools: tuple[Tool, ...], messages: tuple[Message, ...]) -> str:
    """The id of a dialogue that has none of its own: the same content has the same id, wherever it stands."""
    return content_hash([[tool.to_json() for tool in tools], [message.to_json() for message in messages]])
