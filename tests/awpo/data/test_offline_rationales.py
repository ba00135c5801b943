"""Rationales by template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from awpo.data.decompose import decompose
from awpo.data.offline_rationales import WORD_LIMIT, offline_rationale
from awpo.data.sources import FORMATS, RowError, detect, read
from awpo.types import Dialogue, Instance, Message, Tool, ToolCall


def tool(name: str, description: str, *required: str, **descriptions: str) -> Tool:
    names = {*required, *descriptions}
    properties = {key: {"type": "string", "description": descriptions.get(key, "")} for key in sorted(names)}
    return Tool(name, description, {"type": "object", "properties": properties, "required": list(required)})


TOOLS = (
    tool("get_weather", "Get the weather of a city.", "city", "day", city="Name of the city", day="Day of the week"),
    tool("set_alarm", "Set an alarm.", "time", "label", time="Time as HH:MM", label="What it is for"),
    tool("get_news", "NASA news.", "topic"),
    Tool(
        "add_to_cart",
        "Put a product in the cart.",
        {
            "type": "object",
            "properties": {"item": {"type": "string"}, "quantity": {"type": "integer"}},
            "required": ["item", "quantity"],
        },
    ),
    tool("send_text", "Text a message to a number.", "recipient", "body"),
)


def rationale(content: str | None = None, *calls: ToolCall, request: str = "Hello", after: str | None = None) -> str:
    prompt = [Message("user", request)]
    if after is not None:
        prompt += [Message("assistant", None, (ToolCall("set_alarm", {}),)), Message("tool", after)]
    return offline_rationale(
        Instance("s", "d", 0, 1, "train", TOOLS, tuple(prompt), Message("assistant", content, calls))
    )


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([call("set_alarm", time="7:30")], "set_alarm fits: set an alarm. time is 7:30."),
        ([call("set_alarm")], "set_alarm fits: set an alarm."),
        (
            [call("get_news", topic="Moon", count=3, fresh=True)],
            "get_news fits: NASA news. topic is Moon; count is 3; fresh is true.",
        ),
        ([call("get_news", topics=["a", "b"])], 'get_news fits: NASA news. topics is ["a", "b"].'),
        ([call("get_news", a=1, b=2, c=3, d=4, e=5)], "get_news fits: NASA news. a is 1; b is 2; c is 3; d is 4."),
        (
            [call("set_alarm", label="Call the plumber about the leaking kitchen tap")],
            "set_alarm fits: set an alarm. label is Call the plumber about the leaking...",
        ),
        (
            [call("get_weather", city="Paris"), call("get_weather", city="Rome")],
            "Two calls of get_weather. city is Paris; city is Rome.",
        ),
        (
            [call("get_weather", city="Paris"), call("set_alarm", time="7:30")],
            "Calls of get_weather and set_alarm. city is Paris; time is 7:30.",
        ),
        (
            [call("get_weather", city="Paris"), call("set_alarm", time="7:30"), call("get_news", topic="Moon")],
            "Calls of get_weather, set_alarm and get_news. city is Paris; time is 7:30; topic is Moon.",
        ),
        ([call("get_news")] * 7, "7 calls of get_news."),
    ],
)
def test_calls(calls: list[ToolCall], expected: str) -> None:
    assert rationale(None, *calls) == expected
    assert rationale("On it.", *calls, after="x") == expected  # what else is said does not matter


def test_a_reply_to_a_result() -> None:
    assert rationale("It is set. Anything else?", after="ok") == "The result is here, so I answer."


@pytest.mark.parametrize(
    ("request_text", "question", "expected"),
    [
        ("Set an alarm please", "For what time?", "The user gave no time for set_alarm, so I ask for it."),
        ("Set an alarm at 7", "What label shall it have?", "The user gave no label for set_alarm, so I ask for it."),
        (
            "An alarm called tea",
            "When should it ring, as HH:MM?",
            "The user gave no time for set_alarm, so I ask for it.",
        ),
        ("How is the weather?", "Which city do you mean?", "The user gave no city for get_weather, so I ask for it."),
        ("The weather in Rome", "Please tell me the day.", "The user gave no day for get_weather, so I ask for it."),
        ("Weather for the city of Rome", "When?", "The user gave no day for get_weather, so I ask for it."),
        ("Add it to my cart", "How many?", "The user gave no quantity for add_to_cart, so I ask for it."),
        ("Put 3 in my cart", "Of which product?", "The user gave no item for add_to_cart, so I ask for it."),
        ("Text someone", "What should it say?", "The user gave no body for send_text, so I ask for it."),
        ("Text to 5835", "For whom is it?", "The user gave no recipient for send_text, so I ask for it."),
        ("Hello", "How are you?", "The request leaves something open, so I ask."),
    ],
)
def test_a_question_for_what_is_missing(request_text: str, question: str, expected: str) -> None:
    assert rationale(question, request=request_text) == expected


@pytest.mark.parametrize("reply", ["I cannot do that.", "You are welcome!", ""])
def test_no_tool_fits(reply: str) -> None:
    assert rationale(reply) == "No tool fits the request, so I say so."


@pytest.mark.parametrize(
    "parameters",
    [{}, {"required": ["a"]}, {"properties": {"a": True}, "required": ["a"]}, {"properties": None, "required": ["a"]}],
)
def test_schemas_that_say_little(parameters: dict[str, Any]) -> None:
    odd = Instance(
        "s",
        "d",
        0,
        1,
        "train",
        (Tool("odd", "Odd.", parameters),),
        (Message("user", "odd"),),
        Message("assistant", "Odd?"),
    )
    assert offline_rationale(odd).endswith("so I ask for it.") == ("required" in parameters)


@pytest.mark.parametrize(
    "name", ["toolrl/rlla_sft_first260.json", "toolrl/rlla_4k_test.parquet", "glaive/glaive_first200.json"]
)
def test_real_instances(shared_data: Path, name: str) -> None:
    source = FORMATS[detect(shared_data / name)]
    seen = 0
    for dialogue in read(shared_data / name):
        assert isinstance(dialogue, Dialogue)
        try:
            instances = decompose(dialogue, last_step_only=source.last_step_only)
        except RowError:
            continue
        for instance in instances:
            text = offline_rationale(instance)
            # The first argument is always given, even where the tool's purpose used the words up.
            assert len(text.split()) <= WORD_LIMIT + 8, text
            assert "\n" not in text
            assert all(call.name in text for call in instance.target.tool_calls), text
            seen += 1
    assert seen > 70
