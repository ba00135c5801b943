"""What holds for every format: detection, errors, and that a reader never fails in another way than RowError."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awpo.data.sources import FORMATS, Rejected, RowError, detect, read
from awpo.data.sources.base import NO_CALL_REPLY
from awpo.errors import UserError
from awpo.types import Dialogue, Message, ToolCall

OPENAI = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "tools": "[]"}
TOOLRL = {
    "instruction": 'Help.\n\n**Available Tools**\n1. Name: t\nDescription: d\nParameters: {"a": {"type": "str", "default": ""}}',
    "input": "**Dialogue Records History**\n<user> Hi </user>",
    "output": "<think> x </think>\n<response> Hello </response>",
}
HAMMER = {
    "instruction": "[BEGIN OF TASK INSTRUCTION]\nHelp.\n[END OF TASK INSTRUCTION]\n\n[BEGIN OF AVAILABLE TOOLS]\n[]\n"
    "[END OF AVAILABLE TOOLS]\n\n[BEGIN OF FORMAT INSTRUCTION]\n```\n[]\n```\n[END OF FORMAT INSTRUCTION]\n\n"
    "[BEGIN OF QUERY]\nHi\n[END OF QUERY]\n\n",
    "input": "",
    "output": "```\n[]\n```",
}
APIBANK = {
    "file": "a.jsonl",
    "instruction": 'API descriptions:\n{"name": "F", "description": "", "input_parameters": {"a": {"type": "str"}}}',
    "input": "User: Hi\nAI: Hello\nGenerate API Request:\n",
    "expected_output": "API-Request: [F(a='b')]",
}
APIBANK_DIALOGUE = {"requirement": "Hi", "response": "Hello", "apis": []}
BFCL = {"id": "irrelevance_0", "question": [[{"role": "user", "content": "Hi"}]], "function": [{"name": "t"}]}
SEALTOOLS = {"query": "Hi", "api_list": '[{"api_name": "t", "parameters": {}}]', "calling": []}
XLAM = {"query": "Hi", "tools": '[{"name": "t", "parameters": {"a": {"type": "int, optional"}}}]', "answers": "[]"}
TOOLACE = {
    "system": 'Here is a list of functions in JSON format that you can invoke:\n[{"name": "My Tool", "parameters": {}}].',
    "conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello"}],
}
ROWS = {
    "openai": OPENAI,
    "toolrl": TOOLRL,
    "hammer": HAMMER,
    "apibank": APIBANK,
    "apibank-dialogues": APIBANK_DIALOGUE,
    "bfcl": BFCL,
    "sealtools": SEALTOOLS,
    "xlam": XLAM,
    "toolace": TOOLACE,
    "sharegpt": SHAREGPT,
}
SAYS_NOTHING = ("hammer", "bfcl", "sealtools", "xlam")  # no call is due, and the source has no words for it


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_known_by_its_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("not JSON\n".replace("not JSON", '{"broken": ') + json.dumps(ROWS[name]) + "\n")
    assert detect(path) == name
    broken, dialogue = read(path)
    assert isinstance(broken, Rejected)
    assert (broken.row, broken.reason, broken.file) == (0, "not sound JSON", "data.jsonl")
    assert isinstance(dialogue, Dialogue)
    assert dialogue.source == {"apibank-dialogues": "apibank"}.get(name, name)
    last = dialogue.messages[-1]
    assert last.role == "assistant"
    if name == "apibank":
        assert (dialogue.messages[-2].content, last.tool_calls) == ("Hello", (ToolCall("F", {"a": "b"}),))
    else:
        assert dialogue.messages[-2] == Message("user", "Hi")
        assert last.content == (NO_CALL_REPLY if name in SAYS_NOTHING else "Hello")


@pytest.mark.parametrize("name", FORMATS)
def test_no_earlier_format_takes_the_row_of_a_later_one(name: str) -> None:
    assert next(source.name for source in FORMATS.values() if source.sniff(ROWS[name])) == name


@pytest.mark.parametrize("name", FORMATS)
def test_a_reader_is_pure_and_can_be_sent_to_another_process(name: str) -> None:
    row = copy.deepcopy(ROWS[name])
    reader = pickle.loads(pickle.dumps(FORMATS[name]))  # noqa: S301 - its own
    first = reader.read(row)
    assert row == ROWS[name]
    assert pickle.loads(pickle.dumps(first)) == FORMATS[name].read(row) == first  # noqa: S301


def test_every_format_has_an_example_here() -> None:
    assert set(ROWS) == set(FORMATS)


def test_an_unknown_format_says_what_was_seen_and_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"query": "a", "answers": []}\n')  # xLAM's, but for the tools
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

CALLS = [{"name": "t", "arguments": {"a": [1, {"b": "x"}]}}]
FULL = {
    "openai": OPENAI_FULL,
    "hammer": {**HAMMER, "output": f"```\n{json.dumps(CALLS)}\n```"},
    "apibank": {
        **APIBANK,
        "input": "{}\nUser: Hi\nAPI-Request: [ToolSearcher(a='b')]->[{'name': 'x', 'input_parameters': {}}]\n",
    },
    "apibank-dialogues": {
        **APIBANK_DIALOGUE,
        "apis": [
            {
                "api_name": "ToolSearcher",
                "input": {"keywords": "x"},
                "output": {"output": {"name": "x", "input_parameters": {"a": {"type": "list"}}}},
            },
            {"api_name": "x", "input": {"a": "[1]"}, "output": None},
        ],
    },
    "bfcl": {**BFCL, "ground_truth": [{"t": {"a": [{"b": [1, ""]}], "c": [[{"d": ["x"]}]], "e": ["", 1]}}]},
    "sealtools": {**SEALTOOLS, "calling": [{"api": "t", "parameters": {"a": {"b": "x"}}, "responses": ["API_call_0"]}]},
    "xlam": {**XLAM, "answers": json.dumps(CALLS)},
    "toolace": {
        **TOOLACE,
        "conversations": [
            {"from": "user", "value": "Hi"},
            {"from": "assistant", "value": "[My Tool(a='b', c=[1, {'d': None}]), My Tool()]"},
            {"from": "tool", "value": '[{"name": "My Tool"}, {"name": "My Tool"}]'},
        ],
    },
}


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_reader_reads_or_rejects_whatever_the_row(name: str, data: st.DataObject) -> None:
    rows = {**ROWS, **FULL}
    row = data.draw(with_something_else(rows[name], ANYTHING))
    source = FORMATS[name]
    source.sniff(row)
    if not isinstance(row, dict):
        return
    with contextlib.suppress(RowError):
        assert isinstance(source.read(row), Dialogue)
