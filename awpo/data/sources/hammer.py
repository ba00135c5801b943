"""Format `hammer`: rows of `instruction`, `input`, `output` in the prompt of Hammer (arXiv 2410.04587).

The instruction has four parts between `[BEGIN OF ..]` and `[END OF ..]`: task, tools (JSON, or Python's repr of it),
format, query. The output is a list of calls between fences; an empty one means that no call is due and becomes the
reply `NO_CALL_REPLY`. The task becomes the system message; the format is dropped, because a prompt is rendered in the
layout of the model's own chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from awpo.data.sources.base import RowError, Source, action, dialogue_hash, read_calls, read_split, read_tools
from awpo.types import Dialogue, Message

SOURCE_NAME = "hammer"
_TASK, _TOOLS, _QUERY = "TASK INSTRUCTION", "AVAILABLE TOOLS", "QUERY"


def sniff(row: Any) -> bool:
    """Whether the row's instruction has Hammer's marks."""
    text = row.get("instruction") if isinstance(row, Mapping) else None
    return isinstance(text, str) and f"[BEGIN OF {_TOOLS}]" in text and f"[BEGIN OF {_QUERY}]" in text


def _part(text: str, name: str, *, last: bool = False) -> str:
    """The part of that name: up to the first closing mark, or, for the part that ends the text, the last one."""
    _, opened, rest = text.partition(f"[BEGIN OF {name}]")
    closing = f"[END OF {name}]"
    if not opened or closing not in rest:
        raise RowError("a part of the instruction is missing", name)
    return (rest.rpartition(closing) if last else rest.partition(closing))[0].strip()


def _without_fences(text: str) -> str:
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and len(text) >= 6:
        text = text[3:-3].removeprefix("json")
    return text.strip()


def read(row: Mapping[str, Any]) -> Dialogue:
    """The dialogue of a row. Raises RowError."""
    if not sniff(row) or not isinstance(row.get("output"), str):
        raise RowError("no instruction in Hammer's parts, and output")
    text = row["instruction"]
    task, tools, query = _part(text, _TASK), read_tools(_part(text, _TOOLS)), _part(text, _QUERY, last=True)
    output = _without_fences(row["output"])
    if not output.startswith("["):
        raise RowError("a tool call is not JSON", f"output: {output[:60]!r} is no list")
    messages = (
        *([Message("system", task)] if task else []),
        Message("user", query),
        action(read_calls(output, "output")),
    )
    return Dialogue(
        id=dialogue_hash(tools, messages),
        source=SOURCE_NAME,
        tools=tools,
        messages=messages,
        split=read_split(row.get("split")),
    )


SOURCE = Source(SOURCE_NAME, "Hammer's rows (instruction between marks, output between fences)", sniff, read, version=1)
