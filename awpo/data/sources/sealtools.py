"""Format `sealtools`: rows of Seal-Tools (arXiv 2405.08355, fairyshine/Seal-Tools).

Two shapes are read:
- Its set for fine-tuning: `conversations` of a human's text with `api_list = [..]` and `task_instruction = ".."`, and
  an answer that is a list of calls, all written as Python. The text about the notation of calls is dropped.
- `query` with `tools` (or `api_list`) and `calling` (or `answers`), each a list or JSON text.

A tool is `api_name`, `api_description`, `parameters`, `required`, or the words of others; a call has its name under
`api`, `tool` or `name` and its arguments under `parameters` or `arguments`. `responses` are labels for a call's
results; a call whose argument is such a label of another call needs a result that isn't there, so the row is
rejected, as is a row without tools (the set's own lines of query and calling keep them in a file apart).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from awpo.data.sources.base import (
    RowError,
    Source,
    action,
    read_calls,
    read_split,
    read_tools,
    read_value,
    row_id,
)
from awpo.types import Dialogue, Message

SOURCE_NAME = "sealtools"
_TOOLS_KEYS, _CALLS_KEYS = ("tools", "api_list"), ("calling", "answers")
_LABEL = re.compile(r"\s*API_call_\d+\s*\Z")
_TOOLS_MARK, _QUERY_MARK, _END_MARK = "api_list = ", "\ntask_instruction = ", "\nOutput:"


def _own_words(value: Any, keys: tuple[str, ...]) -> bool:
    """Whether the first object of a list, or of text that holds one, has one of these keys."""
    if isinstance(value, str):
        try:
            value = read_value(value)
        except ValueError:
            return False
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and any(key in first for key in keys)


def sniff(row: Any) -> bool:
    """Whether the row is in one of the two shapes, with a word that only Seal-Tools uses."""
    if not isinstance(row, Mapping):
        return False
    if isinstance(row.get("query"), str):
        tools, calls = (next((row[key] for key in keys if key in row), None) for keys in (_TOOLS_KEYS, _CALLS_KEYS))
        return "calling" in row or _own_words(calls, ("api", "tool")) or _own_words(tools, ("api_name",))
    return _prompt(row) is not None


def _prompt(row: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """(tools, query, answer), as text, of the shape for fine-tuning; None where the row is not in it."""
    turns = row.get("conversations")
    if not isinstance(turns, list) or len(turns) != 2:
        return None
    if not all(isinstance(turn, Mapping) and isinstance(turn.get("value"), str) for turn in turns):
        return None
    tools, found, query = turns[0]["value"].partition(_TOOLS_MARK)[2].rpartition(_QUERY_MARK)
    return (tools.strip(), query.rstrip().removesuffix(_END_MARK).strip(), turns[1]["value"]) if found else None


def _query(text: str) -> str:
    """The query without the quotes around it; quotes inside are not escaped."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _refuse_labels(value: Any, where: str) -> None:
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, str) and _LABEL.match(part):
            raise RowError("a call that needs another call's result", f"{where}: {part.strip()}")
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []


def read(row: Mapping[str, Any]) -> Dialogue:
    """The dialogue of a row. Raises RowError."""
    prompt = _prompt(row)
    if prompt is not None:
        tools, query, calls = read_tools(prompt[0]), _query(prompt[1]), read_calls(prompt[2], "answer", ("responses",))
    elif isinstance(row.get("query"), str):
        listed = next((row[key] for key in _TOOLS_KEYS if row.get(key)), None)
        answers = next((row[key] for key in _CALLS_KEYS if key in row), None)
        if listed is None or answers is None:
            raise RowError("no list of tools or no list of calls", "needs 'tools' and 'calling'")
        tools, query, calls = read_tools(listed), row["query"], read_calls(answers, "calling", ("responses",))
    else:
        raise RowError("no query with its list of tools and calls")
    for index, call in enumerate(calls):
        _refuse_labels(call.arguments, f"call {index}")
    messages = (Message("user", query), action(calls))
    return Dialogue(
        id=row_id(row.get("id"), f"{SOURCE_NAME}-", tools, messages),
        source=SOURCE_NAME,
        tools=tools,
        messages=messages,
        split=read_split(row.get("split")),
    )


SOURCE = Source(
    SOURCE_NAME, "Seal-Tools' rows (query, tools, calling; or api_list and task_instruction)", sniff, read, version=1
)
