"""Instances to train on."""

from pathlib import Path

import pytest

from awpo.artifacts import open_stage
from awpo.data.store import write_instances
from awpo.types import Instance, Message, Tool, ToolCall

CITIES = ["Paris", "Rome", "Oslo", "Lima", "Cairo", "Quito", "Delhi", "Seoul"]
WEATHER = Tool("get_weather", "weather of a city", {"type": "object", "properties": {"city": {"type": "string"}}})
CLOCK = Tool("get_time", "time in a city", {"type": "object", "properties": {"city": {"type": "string"}}})


def make_instance(city: str, number: int, split: str = "train") -> Instance:
    call = number % 3 != 2
    return Instance(
        source="test",
        dialogue_id=f"{city}-{number}",
        step=0,
        steps=1,
        split=split,  # type: ignore[arg-type]
        tools=(WEATHER, CLOCK),
        prompt=(Message("user", f"weather in {city} now, number {number}"),),
        target=Message("assistant", tool_calls=(ToolCall("get_weather", {"city": city}),))
        if call
        else Message("assistant", "Hello."),
        rationale=f"get_weather fits: weather of a city. city is {city}." if call else "No tool fits, so I say so.",
    )


@pytest.fixture(scope="session")
def instances(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("instances") / "data"
    with open_stage(folder, "decompose", {}, {}) as stage:
        rows = [make_instance(city, number) for number in range(4) for city in CITIES]
        rows += [make_instance(city, 9, "validation") for city in CITIES]
        write_instances(folder, rows)
        stage.finish()
    return folder
