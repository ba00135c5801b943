"""Conversations of from and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from awpo.data.sources import RowError, detect, read
from awpo.data.sources.sharegpt import SOURCE
from awpo.types import Dialogue, Message, ToolCall

TOOLS = json.dumps([{"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}])


def row(*turns: tuple[str, str], **fields: Any) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": value} for speaker, value in turns], "tools": TOOLS, **fields}


def reason(given: Any) -> str:
    with pytest.raises(RowError) as caught:
        SOURCE.read(given)
    return caught.value.reason


def test_a_whole_dialogue() -> None:
    dialogue = SOURCE.read(
        row(
            ("human", "1 + 2?"),
            ("function_call", '{"name": "add", "arguments": {"a": 1, "b": 2}}'),
            ("observation", "3"),
            ("gpt", "<think>\nDone.\n</think>\n\nIt is 3."),
            ("human", "And 2 + 2, 3 + 3?"),
            (
                "function_call",
                '<think>Both.</think>[{"name": "add", "arguments": "{\\"a\\": 2}"}, {"name": "add", "arguments": {}}]',
            ),
            ("observation", "4"),
            ("observation", "6"),
            ("gpt", "4 and 6."),
            system="Be brief.",
            id="x",
            split="train",
        )
    )
    assert (dialogue.id, dialogue.split, dialogue.source) == ("x", "train", "sharegpt")
    assert [tool.name for tool in dialogue.tools] == ["add"]
    assert dialogue.messages == (
        Message("system", "Be brief."),
        Message("user", "1 + 2?"),
        Message("assistant", None, (ToolCall("add", {"a": 1, "b": 2}),)),
        Message("tool", "3", name="add"),
        Message("assistant", "It is 3.", (), "Done."),
        Message("user", "And 2 + 2, 3 + 3?"),
        Message("assistant", None, (ToolCall("add", {"a": 2}), ToolCall("add", {})), "Both."),
        Message("tool", "4"),
        Message("tool", "6"),
        Message("assistant", "4 and 6."),
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (row(), "no list of conversation turns"),
        (row(("human", "Hi"), ("wizard", "x")), "unknown role"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": None}]}, "a turn without text"),
        (row(("human", "Hi"), ("function_call", "add(1)")), "a tool call is not JSON"),
        (row(("human", "Hi"), ("function_call", "[]")), "malformed tool call"),
        (
            row(("human", "Hi"), ("function_call", '{"name": "add", "arguments": "add"}')),
            "a tool call's arguments are not JSON",
        ),
        (row(("human", "Hi"), ("gpt", 'Yes. <functioncall> {"name": "add"}')), "a call written into a reply's text"),
        (row(("human", "Hi"), tools="{"), "the list of tools is not JSON"),
    ],
)
def test_what_is_not_read_has_a_reason(given: Any, expected: str) -> None:
    assert reason(given) == expected


def test_every_row_of_the_real_file_is_read(shared_data: Path) -> None:
    path = shared_data / "glaive" / "glaive_first200.json"
    assert detect(path) == "sharegpt"
    raw, items = json.loads(path.read_text("utf-8")), list(read(path))
    assert len(items) == len(raw) == 200
    roles = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
    for given, item in zip(raw, items, strict=True):
        assert isinstance(item, Dialogue), item
        assert [message.role for message in item.messages] == [roles[turn["from"]] for turn in given["conversations"]]
        assert [tool.name for tool in item.tools] == [tool["name"] for tool in json.loads(given["tools"])]
        for message, turn in zip(item.messages, given["conversations"], strict=True):
            if turn["from"] == "function_call":
                expected = json.loads(turn["value"])
                assert message.tool_calls == (ToolCall(expected["name"], expected["arguments"]),)
            else:
                assert message.content == turn["value"]
