"""API-Bank: rows of one step, whole dialogues, and both against each other on the real files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from awpo.data.decompose import decompose
from awpo.data.sources import RowError, detect, read
from awpo.data.sources.apibank import DIALOGUES, SOURCE
from awpo.types import Dialogue, Message, ToolCall

TOOLS = (
    '{"name": "Weather", "description": "Forecast", "input_parameters": {"lat": {"type": "float"}, "days": {"type": "int"},'
    ' "fine": {"type": "bool"}, "who": {"type": "list(str)"}, "note": {"type": "str"}}, "output_parameters": {}}\n'
    '{"name": "ToolSearcher", "input_parameters": {"keywords": {"type": "str"}}}'
)
FOUND = "[{'name': 'Found', 'description': 'F', 'input_parameters': {'x': {'type': 'dict'}}, 'desc_for_search': 'a'}]"


def row(dialogue: str, output: str = "API-Request: [Weather(lat='1')]", **fields: Any) -> dict[str, Any]:
    instruction = f"\nGenerate.\n\nAPI descriptions:\n{TOOLS}"
    return {"instruction": instruction, "input": dialogue, "expected_output": output, **fields}


def test_a_row() -> None:
    text = (
        "User: Hi:\nsecond line\nAI: Let me see.\nAI: Searching.\n"
        f"API-Request: [ToolSearcher(keywords='x')]->{FOUND}\nAPI-Request: [Found(x='{{'k': 1}}')]->ok -> fine\n"
        "AI: Done.\nUser: And?\nAI: One moment.\nGenerate API Request:\n"
    )
    dialogue = SOURCE.read(row(text, file="a.jsonl", id=3))
    assert [tool.name for tool in dialogue.tools] == ["Weather", "ToolSearcher", "Found"]
    assert dialogue.messages == (
        Message("user", "Hi:\nsecond line"),
        Message("assistant", "Let me see.\nSearching."),
        Message("assistant", None, (ToolCall("ToolSearcher", {"keywords": "x"}),)),
        Message("tool", FOUND, name="ToolSearcher"),
        Message("assistant", None, (ToolCall("Found", {"x": {"k": 1}}),)),
        Message("tool", "ok -> fine", name="Found"),
        Message("assistant", "Done."),
        Message("user", "And?"),
        Message("assistant", "One moment."),
        Message("assistant", None, (ToolCall("Weather", {"lat": 1}),)),
    )
    assert (dialogue.id, dialogue.split, dialogue.source) == ("apibank-a.jsonl", "test", "apibank")
    (last,) = decompose(dialogue, last_step_only=True)
    assert last.target == Message("assistant", "One moment.", (ToolCall("Weather", {"lat": 1}),))


def test_only_a_search_finds_tools_and_a_call_without_result_is_no_reply() -> None:
    text = f"User: Hi\nAPI-Request: [Weather(note='x')]->{FOUND}\nAPI-Request: [Weather(note='y')]\nAI: Hm.\n"
    dialogue = SOURCE.read(row(text))
    assert [tool.name for tool in dialogue.tools] == ["Weather", "ToolSearcher"]
    assert dialogue.messages[3:5] == (
        Message("assistant", None, (ToolCall("Weather", {"note": "y"}),)),
        Message("assistant", "Hm."),
    )


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("lat='25'", 25),
        ("lat='2.5'", 2.5),
        ("lat='north'", "north"),
        ("lat='True'", "True"),
        ("days='2.5'", "2.5"),
        ("days=7", 7),
        ("fine='True'", True),
        ("fine='1'", "1"),
        ("who='['A', 'B']'", ["A", "B"]),
        ("who='A, B'", "A, B"),
        ("note='25'", "25"),
        ("other='25'", "25"),
    ],
)
def test_values_are_of_their_parameters_type_where_they_can_be(written: str, value: Any) -> None:
    call = SOURCE.read(row("User: Hi\n", f"API-Request: [Weather({written})]")).messages[-1].tool_calls[0]
    assert repr(list(call.arguments.values())) == repr([value])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (row("User: Hi", "Weather(lat='1')"), "a call that cannot be read"),
        (row("User: Hi", "API-Request: [Weather(lat='1]"), "a call that cannot be read"),
        (row("User: Hi", "API-Request: []"), "a call that cannot be read"),
        (row("User: Hi\nAPI-Request: [Weather(]->x"), "a call that cannot be read"),
        (row("no JSON\nUser: Hi"), "the list of tools is not JSON"),
        (row("[1]\nUser: Hi"), "malformed tool"),
        ({**row("User: Hi"), "instruction": "x"}, "no instruction, dialogue and request"),
    ],
)
def test_rows_that_are_refused(given: Any, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        SOURCE.read(given)
    assert caught.value.reason == reason


def test_a_whole_dialogue() -> None:
    search = {"api_name": "ToolSearcher", "input": {"keywords": "F"}}
    found = {"output": {"name": "F", "description": "d", "input_parameters": {"n": {"type": "int"}}}, "exception": None}
    apis = [{**search, "output": {**search, **found}}, {"api_name": "F", "input": {"n": "3"}, "output": {"output": 1}}]
    dialogue = DIALOGUES.read({"requirement": " Do. ", "apis": apis, "response": "Done."})
    assert [tool.name for tool in dialogue.tools] == ["ToolSearcher", "F"]
    assert [message.role for message in dialogue.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert dialogue.messages[3].tool_calls == (ToolCall("F", {"n": 3}),)
    assert dialogue.messages[4] == Message("tool", '{"output": 1}', name="F")
    assert [instance.kind for instance in decompose(dialogue)] == ["call", "call", "reply"]


@pytest.mark.parametrize(
    ("apis", "reason"),
    [
        ([1], "malformed tool call"),
        ([{"api_name": "F"}], "malformed tool call"),
        ([{"api_name": "F", "input": {}, "output": float("nan")}], "a tool result that is not JSON"),
    ],
)
def test_dialogues_that_are_refused(apis: Any, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        DIALOGUES.read({"requirement": "Do.", "apis": apis, "response": "Done."})
    assert caught.value.reason == reason


def test_the_rows_of_level_3_are_the_steps_of_its_dialogues(shared_data: Path) -> None:
    """Two files that tell of the same: the rows' targets are the dialogues' calls, in order."""
    rows, dialogues = (shared_data / "api-bank" / name for name in ("level-3-batch-inf.json", "level-3.json"))
    assert (detect(rows), detect(dialogues)) == ("apibank", "apibank-dialogues")
    steps: dict[str, list[ToolCall]] = {}
    for item in read(rows):
        assert isinstance(item, Dialogue)
        steps.setdefault(item.id, []).append(item.messages[-1].tool_calls[0])
    whole = {}
    for item in read(dialogues):
        assert isinstance(item, Dialogue)
        whole[item.id] = [call for message in item.messages for call in message.tool_calls]
    assert set(steps) == set(whole)
    assert sum(map(len, steps.values())) == 245
    different = [(a, b) for key in whole for a, b in zip(steps[key], whole[key], strict=True) if a != b]
    assert different == []


def test_the_calls_of_level_1_by_a_pattern(shared_data: Path) -> None:
    """The output's call a second time, by the name and the parameters' names alone."""
    path = shared_data / "api-bank" / "level-1-api.json"
    rows = json.loads(path.read_text("utf-8"))
    for row_read, item in zip(rows, read(path), strict=True):
        assert isinstance(item, Dialogue)
        name, inside = re.fullmatch(
            r"API-Request: \[(\w+)\((.*)\)\]", row_read["expected_output"].strip(), re.DOTALL
        ).groups()  # type: ignore[union-attr]
        call = item.messages[-1].tool_calls[0]
        assert call.name == name
        assert list(call.arguments) == re.findall(r"(?:^|, )(\w+)=", inside)
        assert len([m for m in item.messages if m.role == "tool"]) == row_read["input"].count("]->")
