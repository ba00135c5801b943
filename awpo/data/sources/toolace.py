"""Format `toolace`: rows of `system` and `conversations` as ToolACE (arXiv 2409.00920, Team-ACE/ToolACE) gives them.

The system text explains how calls are written and holds the tools as a JSON list; the turns are those of user,
assistant and tool; an assistant's turn is a reply or, as a whole, calls `[Func Name(arg="val"), other(n=3)]`
(`awpo.data.call_syntax`).

What becomes of it:
- The list becomes the tools. Of the system text stays what isn't about the list or the notation of calls, because a
  prompt is rendered in the layout of the model's own chat template.
- A turn that begins like calls but can't be read as such rejects the row, with the place; so does a call inside a
  reply's text. Neither is ever learnt as a reply. Square brackets in a reply that begin no call of a tool on offer
  are let pass.
- A result that lists one object per call becomes one tool message per call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from awpo.data.call_syntax import Names, begins_call, scan_calls
from awpo.data.sources.base import (
    CallNames,
    RowError,
    Source,
    read_results,
    read_split,
    read_tools,
    row_id,
    split_thought,
)
from awpo.data.strict_json import StrictDecoder
from awpo.types import Dialogue, Message, Tool, ToolCall

SOURCE_NAME = "toolace"

_MARKER = re.compile(r"list of (?:functions|tools|APIs)\b", re.IGNORECASE)
_LIST = re.compile(r"\[\s*\{")
# Sentences about the list and the notation, wherever they stand. What is no such sentence stays.
_LAYOUT = re.compile(
    r"(?:Here is a list of (?:functions|tools|APIs)[^\n]*|Should you decide to return the function call[^\n]*"
    r"|Put it in the format of \[func1[^\n]*|NO other text MUST be included\.?"
    r"|You should only return the function calls? in (?:the )?tools? call sections?\.?)",
    re.IGNORECASE,
)
_LIKE_CALLS = re.compile(r"\s*\[[^\[\]()\n]{1,80}\([^()\n=]*+=[^\n]*\)\s*\]\s*\Z")
_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "tool": "tool", "observation": "tool"}  # fmt: skip
_LISTS_TRIED = 8


def _find_list(system: str) -> tuple[int, int, Any] | None:
    """Where the JSON list of tools stands in the system text, and the list; None where there is none.

    After the sentence that announces it, if there is one, else the first list of objects with names.
    """
    marker = _MARKER.search(system)
    decoder = StrictDecoder()
    for tried, opening in enumerate(_LIST.finditer(system, marker.end() if marker else 0)):
        if tried == _LISTS_TRIED:
            break
        try:
            value, end, fault = decoder.raw_decode(system, opening.start())
        except ValueError:
            continue
        if fault is None and all(isinstance(tool, Mapping) and "name" in tool for tool in value):
            return opening.start(), end, value
    return None


def sniff(row: Any) -> bool:
    """Whether the row has turns, no list of tools beside them, and a system text that announces one."""
    if not isinstance(row, Mapping) or row.get("tools") or not isinstance(row.get("system"), str):
        return False
    turns = row.get("conversations")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], Mapping):
        return False
    return {"from", "value"} <= set(turns[0]) and bool(_MARKER.search(row["system"]) or _find_list(row["system"]))


def _read_system(text: str) -> tuple[str, tuple[Tool, ...]]:
    """The system text without the list and the notation, and the tools."""
    found = _find_list(text)
    if found is None:
        if _MARKER.search(text) and re.search(r"\[\s*\]", text):
            return _without_layout(text), ()
        raise RowError("no tool list in the system text")
    start, end, value = found
    return _without_layout(f"{text[:start]}\n{text[end:].lstrip(' .')}"), read_tools(value)


def _without_layout(text: str) -> str:
    lines = (_LAYOUT.sub("", line).rstrip() if _LAYOUT.search(line) else line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _step(text: str, names: Mapping[str, str], offered: Names, where: str) -> Message:
    """An assistant's turn. `names` maps the tools' names, without blanks at their ends, to the names themselves."""
    thought, body = split_thought(text)
    if body.lstrip().startswith("["):
        calls, problem = scan_calls(body, offered)
        if problem is None and calls:
            called = tuple(ToolCall(names.get(call.name, call.name), call.arguments) for call in calls)
            return Message("assistant", None, called, thought)
        # "[1] ..." and "[link](...)" are text; a tool's name and a bracket, or calls up to some place, are not.
        if problem is not None and (calls or begins_call(body, offered) == len(body) - len(body.lstrip())):
            raise RowError("a call that cannot be read", f"{where}, {problem}")
        if problem is None or _LIKE_CALLS.match(body):
            raise RowError("a call that cannot be read", f"{where}, {problem or 'an empty list of calls'}")
    if begins_call(body, offered) >= 0:
        raise RowError("a call written into a reply's text", where)
    return Message("assistant", body or None, (), thought)


def read(row: Mapping[str, Any]) -> Dialogue:
    """The dialogue of a row. Raises RowError."""
    system, turns = row.get("system"), row.get("conversations")
    if not isinstance(system, str) or not isinstance(turns, list) or not turns:
        raise RowError("no list of conversation turns", "needs 'system' and 'conversations'")
    remark, tools = _read_system(system)
    names = {tool.name.strip(): tool.name for tool in tools}
    offered = Names(names)
    messages = [Message("system", remark)] if remark else []
    for index, turn in enumerate(turns):
        where = f"turn {index}"
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
            raise RowError("a turn without text", where)
        role, text = _ROLES.get(str(turn.get("from"))), turn["value"]
        if role is None:
            raise RowError("unknown role", f"{where}: {turn.get('from')!r:.80}")
        if role == "user":
            messages.append(Message("user", text))
        elif role == "assistant":
            messages.append(_step(text, names, offered, where))
        else:
            messages += read_results(text, CallNames.of(messages[-1].tool_calls if messages else ()))
    return Dialogue(
        id=row_id(row.get("id"), "", tools, tuple(messages)),
        source=SOURCE_NAME,
        tools=tools,
        messages=tuple(messages),
        split=read_split(row.get("split")),
    )


SOURCE = Source(SOURCE_NAME, "ToolACE's rows (system with a JSON list of tools, conversations)", sniff, read, version=1)
