"""Masking: other names throughout, nothing of the old ones left, and always the same."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from awpo.data.decompose import check_dialogue, decompose_source, invalid_calls
from awpo.data.masking import (
    KINDS,
    kinds_of,
    mask_dialogue,
    random_names,
    rename,
    with_other_defaults,
    without_right_tool,
)
from awpo.data.settings import DecomposeConfig, MaskingConfig
from awpo.data.sources import read
from awpo.data.sources.base import NO_CALL_REPLY
from awpo.data.store import read_instances
from awpo.types import Dialogue, Message, Tool, ToolCall

WEATHER = Tool(
    "get_weather",
    "Weather of a city. See also add and get_time; not get_weather_2 nor forget_weather.",
    {
        "type": "object",
        "properties": {
            "city_name": {"type": "string", "description": "Name; city_name is free text"},
            "days": {"type": "integer", "default": 3, "maximum": 100, "description": "At most 3 (or 33) days"},
            "unit": {"type": "string", "default": "metric"},
            "mode": {"type": "string", "enum": ["a", "b"], "default": "a"},
            "place": {"type": "object", "properties": {"city_name": {"type": "string"}}},
        },
        "required": ["city_name"],
    },
)
ADD = Tool("add", "Adds two numbers.", {"type": "object", "properties": {"a": {"type": "number", "default": 0.5}}})
DIALOGUE = Dialogue(
    "d",
    "s",
    (WEATHER, ADD),
    (
        Message("system", "Use get_weather, then add."),
        Message("user", "Rome? Please add it up."),
        Message("assistant", "I add get_weather.", (ToolCall("get_weather", {"city_name": "Rome", "unit": "metric"}), ToolCall("add", {"a": 1})), "get_weather needs city_name; add it."),
        Message("tool", '{"name": "get_weather", "city_name": "Rome", "days": [{"unit": "x"}], "a": "add"}', name="get_weather"),
        Message("tool", "add", name="add"),
        Message("assistant", "Done."),
    ),
    "train",
)  # fmt: skip
FUNCTIONS = {"get_weather": "Fn.1", "add": "Fn_2"}
PARAMETERS = {"city_name": "P1", "days": "P2", "unit": "P3", "mode": "P4", "place": "P5", "a": "P6"}


def test_names_change_throughout() -> None:
    """Worked out by hand."""
    masked = rename(DIALOGUE, FUNCTIONS, PARAMETERS)
    weather, add = masked.tools
    assert weather.name == "Fn.1"
    # "add" is a word and stays in texts; names that only hold the other are others.
    assert weather.description == "Weather of a city. See also add and get_time; not get_weather_2 nor forget_weather."
    assert list(weather.parameters["properties"]) == ["P1", "P2", "P3", "P4", "P5"]
    assert weather.parameters["properties"]["P1"]["description"] == "Name; P1 is free text"
    assert weather.parameters["required"] == ["P1"]
    assert (add.name, list(add.parameters["properties"])) == ("Fn_2", ["P6"])
    assert masked.messages == (
        Message("system", "Use Fn.1, then add."),
        Message("user", "Rome? Please add it up."),
        Message("assistant", "I add Fn.1.", (ToolCall("Fn.1", {"P1": "Rome", "P3": "metric"}), ToolCall("Fn_2", {"P6": 1})), "Fn.1 needs P1; add it."),
        Message("tool", '{"name": "Fn.1", "P1": "Rome", "P2": [{"P3": "x"}], "a": "Fn_2"}', name="Fn.1"),
        Message("tool", "Fn_2", name="Fn_2"),
        Message("assistant", "Done."),
    )  # fmt: skip


def test_a_label_in_a_result_stays_a_label() -> None:
    tool = Tool("f_1", "", {"type": "object", "properties": {"name": {}}})
    result = '{"name": "f_1", "results": {"name": "Ann"}}'
    messages = (
        Message("user", "Hi"),
        Message("assistant", None, (ToolCall("f_1", {}),)),
        Message("tool", result, name="f_1"),
    )
    masked = rename(Dialogue("d", "s", (tool,), messages), {"f_1": "g"}, {"name": "x"})
    assert masked.messages[2].content == '{"name": "g", "results": {"x": "Ann"}}'


def test_two_tools_of_one_name_keep_one_name() -> None:
    twins = tuple(Tool("f", "", {"type": "object", "properties": {name: {}}}) for name in ("x", "y"))
    call = Message("assistant", None, (ToolCall("f", {"x": 1, "y": 2}),))
    masked = rename(Dialogue("d", "s", twins, (Message("user", "Hi"), call)), {"f": "g"}, {"x": "u", "y": "v"})
    assert [(tool.name, list(tool.parameters["properties"])) for tool in masked.tools] == [("g", ["u"]), ("g", ["v"])]
    assert masked.messages[1].tool_calls == (ToolCall("g", {"u": 1, "v": 2}),)


def test_names_back_again_is_the_dialogue() -> None:
    names = random_names(list(FUNCTIONS), DIALOGUE, random.Random(0), (5, 15))
    parameters = random_names(list(PARAMETERS), DIALOGUE, random.Random(1), (4, 10))
    masked = rename(DIALOGUE, names, parameters)
    # Random names are telling nearly always; those that aren't would stay in texts on the way back.
    back = rename(masked, {new: old for old, new in names.items()}, {new: old for old, new in parameters.items()})
    assert back.tools == DIALOGUE.tools
    assert [message.tool_calls for message in back.messages] == [message.tool_calls for message in DIALOGUE.messages]


def test_random_names_are_of_hammers_form_and_all_different() -> None:
    names = [str(number) for number in range(2000)]
    dialogue = replace(DIALOGUE, tools=tuple(Tool(name, "", {"type": "object"}) for name in names))
    new = random_names(names, dialogue, random.Random(5), (4, 10))
    assert list(new) == names
    assert len(set(new.values()) | set(names)) == 4000
    short = random_names([str(number) for number in range(40)], DIALOGUE, random.Random(0), (1, 1))
    assert len(set(short.values())) == 40  # of 64 characters: drawn until no two are the same
    assert "a" not in short.values()  # that is a parameter of the dialogue
    assert {len(name) for name in new.values()} == set(range(4, 11))
    assert {character for name in new.values() for character in name} == set(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_."
    )


def test_defaults_change_with_the_arguments_that_equal_them() -> None:
    changed = with_other_defaults(DIALOGUE, random.Random(0))
    before, after = WEATHER.parameters["properties"], changed.tools[0].parameters["properties"]
    assert after["days"]["default"] in (4, 5, 6, 7)
    assert after["days"]["description"] == f"At most {after['days']['default']} (or 33) days"
    assert after["unit"]["default"] != "metric"
    assert len(after["unit"]["default"]) == 5
    assert 0.5 < changed.tools[1].parameters["properties"]["a"]["default"] < 1.5
    assert after["mode"] == before["mode"]  # an enum says what is allowed
    assert after["city_name"] == before["city_name"]
    calls = changed.messages[2].tool_calls
    assert calls == (
        ToolCall("get_weather", {"city_name": "Rome", "unit": after["unit"]["default"]}),
        ToolCall("add", {"a": 1}),
    )


@pytest.mark.parametrize(
    ("schema", "said", "argument"),
    [
        ({"type": "integer", "default": 3}, "For 3 days", None),
        ({"type": "string", "default": "Metric"}, "in metric units", None),
        ({"type": "integer", "default": 3, "maximum": 3}, "", None),
        ({"type": "boolean", "default": True}, "", None),
        ({"type": "array", "default": [1]}, "", None),
        ({"type": "string", "default": ""}, "", None),
        ({"default": None}, "", None),
        ({"type": "string"}, "", None),
        (True, "", None),
        ({"default": 3}, "", "3"),
        ({"default": 1}, "", True),
    ],
)
def test_defaults_that_stay(schema: Any, said: str, argument: Any) -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"x": schema}})
    calls = (ToolCall("f", {} if argument is None else {"x": argument}),)
    dialogue = Dialogue("d", "s", (tool,), (Message("user", f"Do it. {said}"), Message("assistant", None, calls)))
    changed = with_other_defaults(dialogue, random.Random(0))
    if argument is True:  # True is no 1, so it is not the default
        assert changed.messages == dialogue.messages
    else:
        assert changed == dialogue


def test_without_the_right_tool_no_call_is_due() -> None:
    other = Tool("other", "", {"type": "object"})
    dialogue = replace(DIALOGUE, tools=(WEATHER, ADD, other))
    changed = without_right_tool(dialogue)
    assert changed.tools == (other,)
    assert changed.messages == (*dialogue.messages[:2], Message("assistant", NO_CALL_REPLY))
    assert without_right_tool(DIALOGUE) == DIALOGUE  # no tool would be left
    assert without_right_tool(dialogue, last_step_only=True) == dialogue  # its last step is a reply
    again = Message("assistant", None, (ToolCall("add", {}),))
    longer = replace(dialogue, messages=(*dialogue.messages, Message("user", "And?"), again))
    assert without_right_tool(longer, last_step_only=True) == longer  # it was called before
    first = replace(
        dialogue, messages=(*dialogue.messages[:2], Message("assistant", "Yes?"), Message("user", "Go."), again)
    )
    assert without_right_tool(first, last_step_only=True) == replace(
        first, tools=(WEATHER, other), messages=(*first.messages[:4], Message("assistant", NO_CALL_REPLY))
    )


def test_what_falls_to_a_dialogue_is_fixed_by_seed_and_id() -> None:
    config = MaskingConfig(irrelevance=0)
    masked = mask_dialogue(DIALOGUE, config)
    assert mask_dialogue(DIALOGUE, config) == masked
    found = {repr(mask_dialogue(replace(DIALOGUE, id=str(n)), config).tools) for n in range(10)}
    assert len(found) > 5
    assert mask_dialogue(DIALOGUE, MaskingConfig(irrelevance=0, seed=1)).tools != masked.tools
    assert mask_dialogue(DIALOGUE, MaskingConfig(share=0, irrelevance=0)) is DIALOGUE


def test_shares() -> None:
    config = MaskingConfig(share=0.5, functions=1, parameters=0.5, defaults=0, irrelevance=0.2)
    dialogues = [
        replace(DIALOGUE, id=str(n), tools=(*DIALOGUE.tools, Tool("o", "", {"type": "object"}))) for n in range(2000)
    ]
    labels = Counter(mask_dialogue(dialogue, config).source for dialogue in dialogues)
    kinds = Counter(kind for label, count in labels.items() for kind in kinds_of(label) for _ in range(count))
    # Five standard deviations of a binomial count: sqrt(2000 p (1 - p)) is at most 22.4.
    assert abs(kinds["functions"] - 1000) < 112
    assert abs(kinds["irrelevance"] - 400) < 90
    assert kinds["defaults"] == 0
    # All tools with parameters are taken away where a dialogue is irrelevant: 2000 * 0.5 * 0.5 * 0.8.
    assert abs(kinds["parameters"] - 400) < 90
    assert labels["s"] + sum(count for label, count in labels.items() if label != "s") == 2000
    assert set(labels) <= {"s", "s+functions", "s+functions+parameters", "s+irrelevance", "s+irrelevance+functions"}


def test_labels() -> None:
    assert kinds_of("xlam+irrelevance+functions+parameters+defaults") == KINDS
    assert kinds_of("xlam") == kinds_of("a+b") == ()


# Real dialogues

ALL = MaskingConfig(share=1, irrelevance=0)


def _real(shared_data: Path) -> list[Dialogue]:
    files = ("toolrl/rlla_sft_first260.json", "glaive/glaive_first200.json", "api-bank/level-3.json")
    found = []
    for name in files:
        for item in read(shared_data / name):
            if isinstance(item, Dialogue):
                try:
                    found.append(check_dialogue(item))
                except ValueError:
                    continue
    return found


def test_nothing_of_the_old_names_is_left_in_tools_and_calls(shared_data: Path) -> None:
    dialogues = _real(shared_data)
    assert len(dialogues) == 259 + 200 + 50
    for dialogue in dialogues:
        masked = check_dialogue(mask_dialogue(dialogue, ALL))
        old = {tool.name for tool in dialogue.tools}
        old_parameters = {name for tool in dialogue.tools for name in tool.parameters["properties"]}
        assert not old & {tool.name for tool in masked.tools}
        assert not old & {call.name for message in masked.messages for call in message.tool_calls}
        assert not old & {message.name for message in masked.messages}
        new_parameters = {name for tool in masked.tools for name in tool.parameters["properties"]}
        assert not old_parameters & new_parameters
        for before, after in zip(dialogue.tools, masked.tools, strict=True):
            new = dict(zip(before.parameters["properties"], after.parameters["properties"], strict=True))
            assert after.parameters.get("required") == (
                [new.get(name, name) for name in before.parameters["required"]]
                if "required" in before.parameters
                else None
            )
        text = json.dumps([tool.to_json() for tool in masked.tools])
        for name in old:
            if "_" in name:
                assert f'"{name}"' not in text
                assert f" {name} " not in text
        # A call fits its schema after as before, for the same reasons.
        assert [fault.reason for *_, fault in invalid_calls(masked)] == [
            fault.reason for *_, fault in invalid_calls(dialogue)
        ]
        assert len(masked.messages) == len(dialogue.messages)


def test_the_same_seed_gives_the_same_bytes(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "toolrl" / "rlla_sft_first260.json"

    def made(name: str, seed: int) -> Any:
        config = DecomposeConfig(masking=MaskingConfig(seed=seed))
        return decompose_source(source, tmp_path / name, config=config)

    first, again, other = made("a", 0), made("b", 0), made("c", 1)
    assert first.outputs == again.outputs
    assert first.outputs["instances-00000.parquet"] != other.outputs["instances-00000.parquet"]
    assert first.config["masking"] == MaskingConfig().model_dump(mode="json")
    plain = decompose_source(source, tmp_path / "d")
    assert plain.counts["dialogues_masked"] == {}
    assert plain.fingerprint != first.fingerprint
    # Only the training split is masked; ids and splits of dialogues are as before.
    before, after = read_instances(tmp_path / "d"), read_instances(tmp_path / "a")
    assert [(i.dialogue_id, i.step, i.split) for i in before] == [(i.dialogue_id, i.step, i.split) for i in after]
    assert all(a == b for a, b in zip(before, after, strict=True) if b.split != "train")
    counted = Counter(kind for instance in after for kind in kinds_of(instance.source))
    assert first.counts["dialogues_masked"] == dict(sorted(counted.items()))
    masked = sum(instance.source != "toolrl" for instance in after)
    training = sum(instance.split == "train" for instance in after)
    assert training / 2 < masked < training * 0.85
    irrelevant = [instance for instance in after if "irrelevance" in kinds_of(instance.source)]
    assert irrelevant
    assert all(instance.target == Message("assistant", NO_CALL_REPLY) for instance in irrelevant)
    assert all(instance.rationale is None for instance in irrelevant)
