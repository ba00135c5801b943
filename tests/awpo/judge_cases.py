"""Instances whose thoughts are judged in tests."""

from __future__ import annotations

import json
from typing import Any

from awpo.judge_prompts import (
    CRITERIA,
)
from awpo.types import Instance, Message, Tool, ToolCall


def tool(name: str, description: str, **required: str) -> Tool:
    properties = {key: {"type": kind} for key, kind in required.items()}
    return Tool(name, description, {"type": "object", "properties": properties, "required": list(required)})


TOOLS = (
    tool("set_alarm", "Set an alarm", time="string"),
    tool("get_weather", "Weather in a city", city="string"),
    tool("get_weather_forecast", "Forecast for a city", city="string", days="integer"),
    tool("send_mail", "Send a mail", to="string", text="string"),
)
ALL_NAMES = ", ".join(one.name for one in TOOLS)


def instance(target: Message, rationale: str | None, *prompt: Message) -> Instance:
    return Instance("s", "d", 0, 1, "train", TOOLS, prompt or (Message("user", "Wake me at 7:30"),), target, rationale)


def calls(*made: ToolCall, content: str | None = None) -> Message:
    return Message("assistant", content, made)


ALARM, PARIS, ROME = (
    ToolCall("set_alarm", {"time": "7:30"}),
    ToolCall("get_weather", {"city": "Paris"}),
    ToolCall("get_weather", {"city": "Rome"}),
)
CASES = {
    "call": (calls(ALARM), "set_alarm fits: set an alarm. time is 7:30."),
    "ask": (calls(content="At what time?"), "The user gave no time for set_alarm, so I ask for it."),
    "none fits": (calls(content="I cannot do that."), "No tool fits the request, so I say so."),
    "answer": (calls(content="It is warm."), "The result is here, so I answer."),
    "calls": (calls(PARIS, ROME), "Two calls of get_weather. city is Paris; city is Rome."),
}


def grades(*scores: Any, **further: Any) -> str:
    return json.dumps({"reason": "so", **dict(zip(CRITERIA, scores, strict=True)), **further})
