"""What holds for every format: detection, errors, and that a reader never fails in another way than RowError."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awpo.data.sources import FORMATS, Rejected, RowError, detect, read
from awpo.errors import UserError
from awpo.types import Dialogue

OPENAI = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "tools": "[]"}
TOOLRL = {
    "instruction": 'Help.\n\n**Available Tools**\n1. Name: t\nDescription: d\nParameters: {"a": {"type": "str", "default": ""}}',
    "input": "**Dialogue Records History**\n<user> Hi </user>",
    "output": "<think> x </think>\n<response> Hello </response>",
}
ROWS = {"openai": OPENAI, "toolrl": TOOLRL, "sharegpt": SHAREGPT}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_known_by_its_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("not JSON\n".replace("not JSON", '{"broken": ') + json.dumps(ROWS[name]) + "\n")
    assert detect(path) == name
    broken, dialogue = read(path)
    assert isinstance(broken, Rejected)
    assert (broken.row, broken.reason, broken.file) == (0, "not sound JSON", "data.jsonl")
    assert isinstance(dialogue, Dialogue)
    assert [message.role for message in dialogue.messages][-2:] == ["user", "assistant"]
    assert dialogue.messages[-1].content == "Hello"


def test_every_format_has_an_example_here() -> None:
    assert set(ROWS) == set(FORMATS)


def test_an_unknown_format_says_what_was_seen_and_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"query": "a", "answers": []}\n')
    with pytest.raises(UserError, match=r"no known format \(its rows have the keys query, answers\); known are openai"):
        detect(path)
    path.write_text("{broken\n")
    with pytest.raises(UserError, match="its first row cannot be read"):
        detect(path)
    path.write_text("[1, 2]")
    with pytest.raises(UserError, match="its rows are not objects"):
        detect(path)


def test_a_misspelt_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown format 'opnai'; did you mean 'openai'"):
        next(read(tmp_path, "opnai"))


def test_rows_of_another_format_are_rejected_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [OPENAI, SHAREGPT, 7, TOOLRL, OPENAI]))
    kinds = [item.reason if isinstance(item, Rejected) else "read" for item in read(path)]
    assert kinds == ["read", "no list of messages", "not an object", "no list of messages", "read"]


def test_messages_come_from_parquet_too(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    row = {**OPENAI, "tools": json.dumps([{"name": "t", "parameters": {"a": {"type": "str"}}}])}
    pq.write_table(pa.Table.from_pylist([row]), path)
    (dialogue,) = read(path)
    assert isinstance(dialogue, Dialogue)
    assert dialogue.tools[0].name == "t"
    assert [message.content for message in dialogue.messages] == ["Hi", "Hello"]


def with_something_else(value: Any, replacement: Any) -> st.SearchStrategy[Any]:
    """The value with one part of it, at any depth, replaced or removed."""
    if isinstance(value, dict) and value:
        changed = [
            with_something_else(part, replacement).map(lambda new, key=key: {**value, key: new})
            for key, part in value.items()
        ]
        removed = [st.just({name: part for name, part in value.items() if name != key}) for key in value]
        added = [
            replacement.map(lambda new, key=key: {**value, key: new}) for key in ("name", "tool_calls", "tools", "id")
        ]
        return st.one_of(replacement, *changed, *removed, *added)
    if isinstance(value, list) and value:
        changed_items = [
            with_something_else(part, replacement).map(lambda new, at=at: [*value[:at], new, *value[at + 1 :]])
            for at, part in enumerate(value)
        ]
        return st.one_of(replacement, *changed_items)
    if isinstance(value, str) and len(value) > 3:
        return (
            replacement
            | st.integers(0, len(value)).map(lambda at: value[:at])
            | st.integers(0, len(value)).map(lambda at: value[at:])
        )
    return replacement


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.sampled_from(["", "tool", "{", "[]", '{"name": 1}', "</think>"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["role", "name", "function", "arguments", "parameters", "type", "from"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)
OPENAI_FULL = {
    "tools": [{"type": "function", "function": {"name": "t", "description": "d", "parameters": {"type": "object"}}}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "t", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
        {"role": "assistant", "content": "Hello"},
    ],
}


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_reader_reads_or_rejects_whatever_the_row(name: str, data: st.DataObject) -> None:
    rows = {**ROWS, "openai": OPENAI_FULL}
    row = data.draw(with_something_else(rows[name], ANYTHING))
    source = FORMATS[name]
    source.sniff(row)
    if not isinstance(row, dict):
        return
    with contextlib.suppress(RowError):
        assert isinstance(source.read(row), Dialogue)
