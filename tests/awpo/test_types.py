from typing import Any

import pytest

from awpo.types import Instance, Message, Tool, ToolCall, canonical_json, content_hash

WEATHER = Tool("get_weather", "weather of a city", {"type": "object", "properties": {"city": {"type": "string"}}})


def make(prompt: str = "Paris?", city: str = "Paris", content: str | None = None, **changes: object) -> Instance:
    values = {
        "source": "test",
        "dialogue_id": "d",
        "step": 0,
        "steps": 1,
        "split": "train",
        "tools": (WEATHER,),
        "prompt": (Message("user", prompt),),
        "target": Message("assistant", content, (ToolCall("get_weather", {"city": city}),)),
    }
    return Instance(**{**values, **changes})  # type: ignore[arg-type]


def test_canonical_json_does_not_depend_on_key_order() -> None:
    assert (
        canonical_json({"b": 1, "a": [1.5, "ü"]})
        == canonical_json({"a": [1.5, "ü"], "b": 1})
        == '{"a":[1.5,"ü"],"b":1}'
    )
    assert content_hash({"a": 1}) != content_hash({"a": "1"})


def test_the_same_question_has_the_same_id_wherever_it_comes_from() -> None:
    assert make().id == make(source="other", dialogue_id="e", step=3, steps=4, rationale="because").id
    assert len({make().id, make(prompt="Rome?").id, make(city="Rome").id, make(tools=()).id}) == 4


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (Message("assistant", None, (ToolCall("a", {}),)), "call"),
        (Message("assistant", "  ", (ToolCall("a", {}),)), "call"),
        (Message("assistant", "Done.", (ToolCall("a", {}),)), "call+reply"),
        (Message("assistant", "Done."), "reply"),
    ],
)
def test_kinds(target: Message, kind: str) -> None:
    assert make(target=target).kind == kind


def test_messages_and_tools_come_back_from_json() -> None:
    message = Message("assistant", "text", (ToolCall("f", {"z": 1, "a": [None, True]}),), "thought")
    assert Message.from_json(message.to_json()) == message
    assert Tool.from_json(WEATHER.to_json()) == WEATHER
    assert list(ToolCall.from_json(message.tool_calls[0].to_json()).arguments) == ["z", "a"]


def test_arguments_may_be_a_json_string() -> None:
    assert ToolCall.from_json({"name": "f", "arguments": '{"a": 1}'}) == ToolCall("f", {"a": 1})
    assert ToolCall.from_json({"name": "f", "arguments": ""}) == ToolCall("f", {})


@pytest.mark.parametrize("bad", [{"arguments": {}}, {"name": 1, "arguments": {}}, {"name": "f", "arguments": [1]}])
def test_calls_that_are_none_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match="a tool call needs"):
        ToolCall.from_json(bad)


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown role 'robot'"):
        Message.from_json({"role": "robot", "content": ""})


@pytest.mark.parametrize("value", [None, "f", [], {"function": None}, {"function": "f"}, {"function": []}, {"name": 1}])
def test_what_is_no_call_and_no_tool_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match="a tool call"):
        ToolCall.from_json(value)
    with pytest.raises(ValueError, match="a tool needs"):
        Tool.from_json(value)
    with pytest.raises(ValueError, match=r"a tool call|unknown role"):
        Message.from_json({"role": "assistant", "tool_calls": [value]} if value else value)


@pytest.mark.parametrize("wrong", [{"description": 3}, {"parameters": "abc"}, {"parameters": ["a"]}])
def test_a_tool_of_wrong_types_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'description' and an object 'parameters'"):
        Tool.from_json({"name": "f", **wrong})


def test_content_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="content of a message is a string"):
        Message.from_json({"role": "user", "content": [{"type": "text", "text": "Hi"}]})
