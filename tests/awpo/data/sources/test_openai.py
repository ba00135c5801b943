"""Dialogues in the form of the OpenAI chat API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from awpo.data.sources import RowError
from awpo.data.sources.openai import SOURCE
from awpo.types import Dialogue, Message, Tool, ToolCall

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather.", "parameters": {"type": "dict", "properties": {}}},
}


def call(arguments: Any = '{"city": "Paris"}', **fields: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}, **fields}


def messages(*assistant: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [TOOL], "messages": [{"role": "user", "content": "Hi"}, *assistant]}


def reason(row: dict[str, Any]) -> str:
    with pytest.raises(RowError) as caught:
        SOURCE.read(row)
    return caught.value.reason


def test_a_whole_dialogue() -> None:
    row = messages(
        {"role": "assistant", "content": None, "tool_calls": [call()]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    )
    dialogue = SOURCE.read({**row, "id": 7, "source": "mine", "split": "dev", "licence": "ignored"})
    assert dialogue == Dialogue(
        id="7",
        source="mine",
        tools=(Tool("get_weather", "Weather.", {"type": "object", "properties": {}}),),
        messages=(
            Message("user", "Hi"),
            Message("assistant", None, (ToolCall("get_weather", {"city": "Paris"}),)),
            Message("tool", "sunny", name="get_weather"),
            Message("assistant", "It is sunny."),
        ),
        split="validation",
    )


def test_messages_as_json_text() -> None:
    row = messages({"role": "assistant", "content": None, "tool_calls": [call()]})
    text = {name: json.dumps(value) for name, value in row.items()}
    assert SOURCE.sniff(text)
    assert SOURCE.read(text) == SOURCE.read(row)
    assert not SOURCE.sniff({"messages": "[{"})
    assert reason({"messages": "[{"}) == "the list of messages is not JSON"
    assert reason({"messages": '["user"]'}) == "no list of messages"


def test_reads_back_what_the_project_writes() -> None:
    dialogue = Dialogue(
        id="a",
        source="embedded",
        tools=(
            Tool("t", "d", {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}, "required": ["b"]}),
        ),
        messages=(
            Message("system", "Be brief."),
            Message("user", "Hi"),
            Message("assistant", "One moment.", (ToolCall("t", {"b": 2, "a": [1.0, None]}),), thought="t fits."),
            Message("tool", "ok", name="t"),
            Message("assistant", "Done.", thought="The result is here."),
        ),
        split="test_tools",
    )
    assert SOURCE.read(dialogue.to_json()) == dialogue


@pytest.mark.parametrize(
    ("message", "read"),
    [
        (
            {"content": "<think>\nI <tool_call> it </think> yes\n</think>\n\nHello"},
            ("I <tool_call> it </think> yes", "Hello"),
        ),
        ({"content": "Hello", "reasoning": "because"}, ("because", "Hello")),
        ({"content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}, (None, "Hello")),
        ({"content": "I said <think> once"}, (None, "I said <think> once")),
        ({"content": "<think></think>Hello"}, (None, "Hello")),
    ],
)
def test_thoughts_and_parts(message: dict[str, Any], read: tuple[str | None, str]) -> None:
    last = SOURCE.read(messages({"role": "assistant", **message})).messages[-1]
    assert (last.thought, last.content) == read


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
def test_arguments_are_an_object_or_its_json(arguments: Any) -> None:
    for value in (call(arguments), {"name": "get_weather", "arguments": arguments}):
        dialogue = SOURCE.read(messages({"role": "assistant", "tool_calls": [value]}))
        assert dialogue.messages[-1].tool_calls == (ToolCall("get_weather", {"city": "Paris"}),)


@pytest.mark.parametrize("tools", [None, "", [], "[]"])
def test_no_tools(tools: Any) -> None:
    assert SOURCE.read({**messages(), "tools": tools}).tools == ()


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, "a message key that is not read"),
        ({"role": "wizard", "content": "x"}, "unknown role"),
        ({"role": ["user"], "content": "x"}, "unknown role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content is not text"),
        ({"role": "user", "content": 7}, "content is not text"),
        ({"role": "user", "content": "x", "tool_calls": [call()]}, "calls or a thought outside an assistant's message"),
        ({"role": "assistant", "tool_calls": [call("{broken")]}, "a tool call's arguments are not JSON"),
        ({"role": "assistant", "tool_calls": [call('{"a": NaN}')]}, "a tool call's arguments are not JSON"),
        ({"role": "assistant", "tool_calls": [call('{"a": 1, "a": 2}')]}, "a tool call's arguments are not JSON"),
        ({"role": "assistant", "tool_calls": [call("[1]")]}, "malformed tool call"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}, "malformed tool call"),
        ({"role": "assistant", "tool_calls": "call"}, "malformed tool call"),
        ({"role": "assistant", "tool_calls": [call('{"a": ' + "[" * 65 + "]" * 65 + "}")]}, "malformed tool call"),
    ],
)
def test_what_is_not_read_has_a_reason(message: dict[str, Any], expected: str) -> None:
    assert reason(messages(message)) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"messages": []}, "no list of messages"),
        ({"messages": None}, "no list of messages"),
        ({"split": "tset"}, "unknown split"),
        ({"tools": "{"}, "the list of tools is not JSON"),
        ({"tools": {"a": 1}}, "malformed tool"),
        ({"tools": [{"description": "no name"}]}, "malformed tool"),
        ({"tools": [{"name": "t", "parameters": {"a": {"type": "wizard"}}}]}, "malformed tool"),
    ],
)
def test_rows_that_are_not_read_have_a_reason(changes: dict[str, Any], expected: str) -> None:
    assert reason({**messages({"role": "assistant", "content": "x"}), **changes}) == expected


def test_without_an_id_the_content_is_the_id() -> None:
    first, second = (SOURCE.read(messages({"role": "assistant", "content": text})) for text in ("a", "b"))
    assert first.id == SOURCE.read(messages({"role": "assistant", "content": "a"})).id
    assert first.id != second.id
