"""Calls of API-Bank's dialogues: every reference reads back, and what is wrong with an answer is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from awpo.types import ToolCall
from evaluation.api_bank.data import DIALOGUES, FILES, TOOLRL, read_level
from evaluation.api_bank.dialogues import TYPES, mistake, read_call, typed


def rows(shared_data: Path, level: int) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads((shared_data / FILES[DIALOGUES, level].name).read_text("utf-8"))
    return found


@pytest.mark.parametrize(("level", "count"), [(1, 399), (2, 135)])
def test_every_reference_reads_back_as_it_was_written(shared_data: Path, level: int, count: int) -> None:
    found = rows(shared_data, level)
    assert len(found) == count
    for row in found:
        call = read_call(row["expected_output"])
        assert call is not None
        written = ", ".join(f"{key}='{value}'" for key, value in call.arguments.items())
        assert f"API-Request: [{call.name}({written})]" == row["expected_output"]
        typed(call)  # none has a value that is not of its type


def test_the_types_are_those_that_the_prompts_declare(shared_data: Path) -> None:
    declared = {}
    for row in rows(shared_data, 1):
        for line in row["instruction"].partition("API descriptions:\n")[2].splitlines():
            tool = json.loads(line)
            for key, parameter in tool["input_parameters"].items():
                declared[tool["name"], key] = parameter["type"].partition("(")[0]
    assert {key: kind for key, kind in declared.items() if kind != "str"} == {
        key: kind for key, kind in TYPES.items() if key in declared
    }
    assert len(declared) > 100


def test_five_references_of_toolrl_are_broken_where_the_dialogue_is_not(shared_data: Path) -> None:
    """ToolRL's file was made with a reader that loses its way at counts of one digit; it is scored as it is."""
    whole = {item.id: item.reference for item in read_level(DIALOGUES, 1, shared_data)}
    raw = json.loads((shared_data / FILES[TOOLRL, 1].name).read_text("utf-8"))
    differ = [
        item.reference
        for item, row in zip(read_level(TOOLRL, 1, shared_data), raw, strict=True)
        if item.reference != whole[f"{row['other']['file']}#{row['other']['id']}"]
    ]
    assert [call.name for call in differ] == ["BookHotel"] * 5
    assert {call.arguments["adult_count"] for call in differ} == {"", "2', child_count=", "4', child_count="}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[F()]", {}),
        ("API-Request: [F(a='1')]->success", {"a": "1"}),
        ("[F(a=\"x\", b = 'y z')]", {"a": "x", "b": "y z"}),
        ("[F(a=12 , b=True )]", {"a": "12", "b": "True"}),
        ("[F(a=' 12 ', b=' ')]", {"a": " 12 ", "b": " "}),
        ("[F(a='it's', b='')]", {"a": "it's", "b": ""}),
        ("[F(a=['John', 'Jane'], b='[1, 2]')]", {"a": "['John', 'Jane']", "b": "[1, 2]"}),
        ("[F(a='[{'k': 'v', 'l': 'w'}]', b='(1 + 2) * 3')]", {"a": "[{'k': 'v', 'l': 'w'}]", "b": "(1 + 2) * 3"}),
        ("I call [F(a='1')] now", {"a": "1"}),
    ],
)
def test_forms_of_a_call(text: str, arguments: dict[str, str]) -> None:
    assert read_call(text) == ToolCall("F", arguments)


@pytest.mark.parametrize(
    "text", ["", "F(a='1')", "[F(a='1'", "[F('1')]", "[F(a='1' b='2' c)]", "[F(a=\n'1')]", "[F(a=)]"]
)
def test_what_is_no_call(text: str) -> None:
    assert read_call(text) is None


BOOK = ToolCall("BookHotel", {"hotel_name": "Hilton", "adult_count": "2"})
MEET = ToolCall("AddMeeting", {"attendees": "['John', 'Jane']"})
SWITCH = ToolCall("TimedSwitch", {"on": "False"})


@pytest.mark.parametrize(
    ("reference", "text", "kind"),
    [
        (BOOK, "[BookHotel(adult_count=2, hotel_name='Hilton')]", ""),
        (BOOK, "[BookHotel(adult_count='02', hotel_name='Hilton')]", ""),
        (BOOK, "[BookHotel(adult_count='two', hotel_name='Hilton')]", "wrong_type"),
        (BOOK, "[BookHotel(adult_count='-2', hotel_name='Hilton')]", "wrong_type"),
        (BOOK, "[BookHotel(adult_count='3', hotel_name='Hilton')]", "wrong_value"),
        (BOOK, "[BookHotel(adult_count='2', hotel_name='hilton')]", "wrong_value"),
        (BOOK, "[BookHotel(hotel_name='Hilton')]", "wrong_parameters"),
        (BOOK, "[BookHotel(hotel_name='Hilton', adult_count='2', nights='1')]", "wrong_parameters"),
        (BOOK, "[BookHotels(hotel_name='Hilton', adult_count='2')]", "wrong_name"),
        (BOOK, "BookHotel(hotel_name='Hilton', adult_count='2')", "no_call"),
        (
            BOOK,
            "First [Calculator(formula='1+1')] then [BookHotel(hotel_name='Hilton', adult_count='2')]",
            "wrong_name",
        ),
        (MEET, '[AddMeeting(attendees=["John", "Jane"])]', ""),
        (MEET, "[AddMeeting(attendees='['John','Jane']')]", ""),
        (MEET, "[AddMeeting(attendees='['Jane', 'John']')]", "wrong_value"),
        (MEET, "[AddMeeting(attendees='John, Jane')]", "wrong_type"),
        (SWITCH, "[TimedSwitch(on='false')]", ""),  # whatever is not "True" is false
        (SWITCH, "[TimedSwitch(on='True')]", "wrong_value"),
    ],
)
def test_what_is_wrong_with_an_answer(reference: ToolCall, text: str, kind: str) -> None:
    assert mistake(reference, text)[0] == kind


def test_the_first_call_on_a_line_decides_and_later_lines_are_not_read() -> None:
    assert mistake(BOOK, "[BookHotel(hotel_name='Hilton', adult_count='2')]\n[Calculator(formula='1')]") == ("", "")


@pytest.mark.parametrize(
    "text",
    [
        "[a(" * 100_000,
        "[F(a=" + " " * 100_000 + ";)]",
        "[F(a='" + "' " * 100_000 + ")]",
        "[F(" + "a=1, " * 50_000 + ")]",
    ],
    ids=["openings", "spaces", "quotes", "commas"],
)
def test_hostile_text_takes_no_time(text: str) -> None:
    read_call(text)
