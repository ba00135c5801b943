"""What a reader of a format is made of, and the helpers that several share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from awpo.chat import DEEPEST_VALUE
from awpo.data import schema, strict_json
from awpo.types import Dialogue, Message, Split, Tool, ToolCall, content_hash


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


def read_tool(value: Any, where: str) -> Tool:
    """A tool from the OpenAI form or the bare function; its parameters are normalised (`awpo.data.schema`).

    Keys of a function beyond name, description and parameters (`strict`, a description of what is returned) are no
    part of a tool here. Raises RowError where it cannot be read.
    """
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError("malformed tool", f"{where}: needs a 'name'")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise RowError("malformed tool", f"{where} ({function['name']}): the description is not text")
    try:
        parameters = schema.normalise_parameters(function.get("parameters"))
    except ValueError as error:
        raise RowError("malformed tool", f"{where} ({function['name']}): {error}") from None
    required = function.get("required")
    if isinstance(required, list) and all(isinstance(part, str) for part in required) and "required" not in parameters:
        parameters = {**parameters, "required": required}
    return Tool(function["name"], description or "", parameters)


def read_tools(value: Any) -> tuple[Tool, ...]:
    """The tools of a row: a list of them, such a list as JSON text, or nothing. Raises RowError."""
    if isinstance(value, str):
        try:
            value = strict_json.parse(value) if value.strip() else []
        except ValueError as error:
            raise RowError("the list of tools is not JSON", str(error)) from None
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RowError("malformed tool", "the tools are not a list")
    return tuple(read_tool(tool, f"tool {index}") for index, tool in enumerate(value))


def dialogue_hash(tools: tuple[Tool, ...], messages: tuple[Message, ...]) -> str:
    """The id of a dialogue that has none of its own: the same content has the same id, wherever it stands."""
    return content_hash([[tool.to_json() for tool in tools], [message.to_json() for message in messages]])
