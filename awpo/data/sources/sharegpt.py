"""Format `sharegpt`: rows of `conversations` (`from`, `value`) with `tools` as JSON text, as glaive's are given.

Speakers: human or user, gpt or assistant or model, function_call, observation or tool or function_response, system.
A `function_call` holds one call or a list of them as JSON; an `observation` answers the calls before it. A
top-level `system` text becomes the first message. Calls written into a reply's text are not read: such a row is
rejected, lest they be learnt as a reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from awpo.data import strict_json
from awpo.data.sources.base import RowError, Source, dialogue_hash, read_call, read_split, read_tools, split_thought
from awpo.types import Dialogue, Message, ToolCall

_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "call",
    "tool_call": "call",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}
_CALLS_IN_TEXT = ("<tool_call>", "<functioncall>", "<function_call>")


def sniff(row: Any) -> bool:
    """Whether the row has a list of conversation turns with `from` and `value`."""
    turns = row.get("conversations") if isinstance(row, Mapping) else None
    return (
        isinstance(turns, list) and bool(turns) and isinstance(turns[0], Mapping) and {"from", "value"} <= set(turns[0])
    )


def _calls(text: str, where: str) -> tuple[str | None, tuple[ToolCall, ...]]:
    """(thought before the calls, calls) of a function_call turn."""
    thought, rest = split_thought(text)
    try:
        value = strict_json.parse(rest)
    except ValueError as error:
        raise RowError("a tool call is not JSON", f"{where}: {error}") from None
    calls = tuple(read_call(call, where) for call in (value if isinstance(value, list) else [value]))
    if not calls:
        raise RowError("malformed tool call", f"{where}: an empty list")
    return thought, calls


def _messages(turns: list[Any]) -> list[Message]:
    messages: list[Message] = []
    for index, turn in enumerate(turns):
        where = f"turn {index}"
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
            raise RowError("a turn without text", where)
        speaker, text = _SPEAKERS.get(str(turn.get("from"))), turn["value"]
        if speaker is None:
            raise RowError("unknown role", f"{where}: {turn.get('from')!r:.80}")
        if speaker == "system":
            messages.append(Message("system", text))
        elif speaker == "user":
            messages.append(Message("user", text))
        elif speaker == "call":
            thought, calls = _calls(text, where)
            messages.append(Message("assistant", None, calls, thought))
        elif speaker == "tool":
            last = messages[-1].tool_calls if messages else ()
            messages.append(Message("tool", text, name=last[0].name if len(last) == 1 else None))
        else:
            thought, reply = split_thought(text)
            if any(tag in reply for tag in _CALLS_IN_TEXT):
                raise RowError("a call written into a reply's text", where)
            messages.append(Message("assistant", reply or None, (), thought))
    return messages


def read(row: Mapping[str, Any]) -> Dialogue:
    """The dialogue of a row. Raises RowError."""
    if not sniff(row):
        raise RowError("no list of conversation turns", "needs 'conversations' with 'from' and 'value'")
    tools = read_tools(row.get("tools"))
    messages = _messages(row["conversations"])
    system = row.get("system")
    if isinstance(system, str) and system.strip():
        messages.insert(0, Message("system", system))
    own_id, source = row.get("id"), row.get("source")
    return Dialogue(
        id=str(own_id) if isinstance(own_id, (str, int)) and own_id != "" else dialogue_hash(tools, tuple(messages)),
        source=source if isinstance(source, str) and source else "sharegpt",
        tools=tools,
        messages=tuple(messages),
        split=read_split(row.get("split")),
    )


SOURCE = Source("sharegpt", "conversations of from and value, with tools as JSON text", sniff, read, version=1)
