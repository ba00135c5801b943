"""Format `openai`: rows of `messages` and `tools` in the form of the OpenAI chat API.

Read besides: the lines that `Dialogue.to_json` writes (`id`, `source`, `split`), messages, tools and arguments as JSON
text (in parquet nothing else keeps each row's own keys), content as a list of text parts, thoughts as `reasoning_content`, `reasoning` or a leading `<think>` block, roles
`developer` (system) and `function` (tool). Row keys other than messages, tools, id, source and split are not
dialogue and are ignored; a message key that is not read and holds something is a reason to reject the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from awpo.data import strict_json
from awpo.data.sources.base import RowError, Source, dialogue_hash, read_call, read_split, read_tools, split_thought
from awpo.types import Dialogue, Message, Role, ToolCall

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_READ = {"role", "content", "tool_calls", "reasoning_content", "reasoning", "name", "tool_call_id"}
_WITHOUT_MEANING = {"id", "type", "annotations", "index"}
_KNOWN = _READ | _WITHOUT_MEANING


def sniff(row: Any) -> bool:
    """Whether the row has a list of messages with roles, or JSON text of one."""
    messages = row.get("messages") if isinstance(row, Mapping) else None
    if isinstance(messages, str):
        try:
            messages = strict_json.parse(messages)
        except ValueError:
            return False
    return _has_roles(messages)


def _has_roles(messages: Any) -> bool:
    return isinstance(messages, list) and bool(messages) and isinstance(messages[0], Mapping) and "role" in messages[0]


def _content(value: Any, role: Role, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text", "")) for part in value)
    if role == "tool" and isinstance(value, (dict, list)):
        return strict_json.dump(value)
    raise RowError("content is not text", where)


def _calls(value: Any, where: str, names: dict[str, str]) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RowError("malformed tool call", f"{where}: tool_calls is not a list")
    calls = []
    for index, call in enumerate(value):
        function = call.get("function", call) if isinstance(call, Mapping) else call
        if function is call and isinstance(call, Mapping):
            function = {key: part for key, part in call.items() if key not in _WITHOUT_MEANING}
        calls.append(read_call(function, f"{where}, call {index}"))
        if isinstance(call, Mapping) and isinstance(call.get("id"), str):
            names[call["id"]] = calls[-1].name
    return tuple(calls)


def _message(value: Any, where: str, names: dict[str, str]) -> Message:
    role = _ROLES.get(str(value.get("role"))) if isinstance(value, Mapping) else None
    if role is None:
        raise RowError("unknown role", f"{where}: {value.get('role') if isinstance(value, Mapping) else value!r}"[:120])
    if not value.keys() <= _KNOWN and (unread := [key for key, held in value.items() if held and key not in _KNOWN]):
        raise RowError("a message key that is not read", f"{where}: {', '.join(unread)}")
    content = _content(value.get("content"), role, where)
    calls = _calls(value.get("tool_calls"), where, names)
    name = value.get("name")
    if role == "tool" and not name:
        name = names.get(str(value.get("tool_call_id")))
    if name is not None and not isinstance(name, str):
        raise RowError("content is not text", f"{where}: the name")
    thought = value.get("reasoning_content") or value.get("reasoning")
    if thought is not None and not isinstance(thought, str):
        raise RowError("content is not text", f"{where}: the thought")
    if role != "assistant":
        if calls or thought:
            raise RowError("calls or a thought outside an assistant's message", where)
        return Message(role, content or "", name=name or None)
    if content and not thought:
        thought, content = split_thought(content)
    return Message(role, content or None, calls, thought or None, name or None)


def read(row: Mapping[str, Any]) -> Dialogue:
    """The dialogue of a row. Raises RowError."""
    values: Any = row.get("messages")
    if isinstance(values, str):
        try:
            values = strict_json.parse(values)
        except ValueError as error:
            raise RowError("the list of messages is not JSON", str(error)) from None
    if not _has_roles(values):
        raise RowError("no list of messages", "needs 'messages' with roles")
    tools = read_tools(row.get("tools"))
    names: dict[str, str] = {}
    messages = tuple(_message(value, f"message {index}", names) for index, value in enumerate(values))
    own_id, source = row.get("id"), row.get("source")
    return Dialogue(
        id=str(own_id) if isinstance(own_id, (str, int)) and own_id != "" else dialogue_hash(tools, messages),
        source=source if isinstance(source, str) and source else "openai",
        tools=tools,
        messages=messages,
        split=read_split(row.get("split")),
    )


SOURCE = Source("openai", "messages and tools in the form of the OpenAI chat API", sniff, read, version=2)
