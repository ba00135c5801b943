"""ToolACE's rows. No raw row of the set is at hand: these are written by hand from the published format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from awpo.data.decompose import decompose
from awpo.data.sources import RowError
from awpo.data.sources.toolace import SOURCE
from awpo.types import Message, ToolCall

FUNCTIONS = [
    {
        "name": "Market Trends API",
        "description": "Get trends, e.g. [top] ones.",
        "parameters": {
            "type": "dict",
            "properties": {
                "trend_type": {"description": "Kind", "type": "string", "enum": ["INDEXES", "CRYPTO"]},
                "limit": {"description": "At most", "type": "int", "default": 10},
            },
            "required": ["trend_type"],
        },
        "required": None,
    },
    {"name": "geo.find (v2)", "description": "", "parameters": {"type": "dict", "properties": {}}},
]
SYSTEM = f"""You are an expert in composing functions. You are given a question and a set of possible functions.
If none of the function can be used, point it out. You should only return the function call in tools call sections.
Here is a list of functions in JSON format that you can invoke:
{json.dumps(FUNCTIONS)}.
Should you decide to return the function call(s).
Put it in the format of [func1(params_name=params_value, params_name2=params_value2...), func2(params)]

NO other text MUST be included.
""".replace("\n", " \n")  # the set's lines end in blanks


def row(*turns: tuple[str, str], system: str = SYSTEM, **fields: Any) -> dict[str, Any]:
    return {"system": system, "conversations": [{"from": who, "value": text} for who, text in turns], **fields}


def step(text: str) -> Message:
    return SOURCE.read(row(("user", "Hi"), ("assistant", text))).messages[-1]


def refused(text: str) -> tuple[str, str]:
    with pytest.raises(RowError) as caught:
        step(text)
    return caught.value.reason, caught.value.detail


def test_a_whole_dialogue() -> None:
    dialogue = SOURCE.read(
        row(
            ("user", "Trends?"),
            ("assistant", '[Market Trends API(trend_type="INDEXES", limit=3), geo.find (v2)()]'),
            ("tool", '[{"name": "Market Trends API", "results": {"a": 1}}, {"name": "geo.find (v2)", "results": []}]'),
            ("assistant", "Up."),
            ("user", "Thanks"),
            ("assistant", "Welcome."),
        )
    )
    calls = (ToolCall("Market Trends API", {"trend_type": "INDEXES", "limit": 3}), ToolCall("geo.find (v2)", {}))
    assert dialogue.messages == (
        Message(
            "system",
            "You are an expert in composing functions. You are given a question and a set of possible functions.\n"
            "If none of the function can be used, point it out.",
        ),
        Message("user", "Trends?"),
        Message("assistant", None, calls),
        Message("tool", '{"name": "Market Trends API", "results": {"a": 1}}', name="Market Trends API"),
        Message("tool", '{"name": "geo.find (v2)", "results": []}', name="geo.find (v2)"),
        Message("assistant", "Up."),
        Message("user", "Thanks"),
        Message("assistant", "Welcome."),
    )
    assert [tool.name for tool in dialogue.tools] == ["Market Trends API", "geo.find (v2)"]
    assert dialogue.tools[0].parameters == {
        "type": "object",
        "properties": {
            "trend_type": {"description": "Kind", "type": "string", "enum": ["INDEXES", "CRYPTO"]},
            "limit": {"description": "At most", "type": "integer", "default": 10},
        },
        "required": ["trend_type"],
    }
    assert [instance.kind for instance in decompose(dialogue)] == ["call", "reply", "reply"]


@pytest.mark.parametrize(
    "text",
    [
        "[1] The first source says so (see there).",
        "[A link](https://example.com/a=b) helps.",
        "[] is an empty list.",
        "Use [brackets](as=here) in the text",
        "None of the functions can be used.",
    ],
)
def test_square_brackets_in_a_reply_are_no_call(text: str) -> None:
    assert step(text) == Message("assistant", text)


def test_blanks_around_calls_and_names() -> None:
    assert step("  [ geo.find (v2) ( ) ]\n").tool_calls == (ToolCall("geo.find (v2)", {}),)
    functions = json.dumps([{"name": "Tool with a blank ", "parameters": {}}])
    system = f"Here is a list of functions in JSON format that you can invoke:\n{functions}"
    message = SOURCE.read(row(("user", "x"), ("assistant", "[Tool with a blank(a=1)]"), system=system)).messages[-1]
    assert message.tool_calls == (ToolCall("Tool with a blank ", {"a": 1}),)


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        ("[Market Trends API(trend_type=INDEXES)]", "a call that cannot be read", "turn 1, character 30: 'INDEXES' is no literal"),
        ("[Market Trends API(trend_type='a')", "a call that cannot be read", "']' is missing"),
        ("[Market Trends API(trend_type='a')] Done.", "a call that cannot be read", "character 36: more text"),
        ("[Market Trends API('a')]", "a call that cannot be read", "without a name"),
        ("[Unknown(a=b)]", "a call that cannot be read", "'b' is no literal"),
        ("[Unknown(a=1), and so on", "a call that cannot be read", "a name and '(' were expected"),
        ("[]", "a call that cannot be read", "an empty list"),
        ("Sure. [Market Trends API(trend_type='a')]", "a call written into a reply's text", "turn 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_never_a_reply(text: str, reason: str, detail: str) -> None:
    found = refused(text)
    assert found[0] == reason
    assert detail in found[1]


def test_a_call_of_an_unknown_tool_is_left_to_the_check_of_dialogues() -> None:
    with pytest.raises(RowError, match="not offered"):
        decompose(SOURCE.read(row(("user", "x"), ("assistant", "[Unknown Tool(a=1)]"))))


def test_the_list_is_found_wherever_it_stands() -> None:
    functions = json.dumps(FUNCTIONS)
    for system in (functions, f"Role: [helper].\n{functions}\nBe brief.", f"A list of tools: {functions}"):
        assert len(SOURCE.read(row(("user", "x"), ("assistant", "y"), system=system)).tools) == 2
        assert SOURCE.sniff(row(("user", "x"), system=system))
    kept = SOURCE.read(
        row(("user", "x"), ("assistant", "y"), system=f"Role: helper.\n{functions}\nBe brief.")
    ).messages[0]
    assert kept.content == "Role: helper.\n\nBe brief."


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (row(("user", "x"), system="Help."), "no tool list in the system text"),
        (row(("user", "x"), system="Here is a list of functions in JSON format: [{broken"), "no tool list in the system text"),
        (row(("wizard", "x")), "unknown role"),
        ({"system": SYSTEM, "conversations": [{"from": "user"}]}, "a turn without text"),
        ({"system": SYSTEM}, "no list of conversation turns"),
        (row(("user", "x"), system='list of functions [{"name": "f", "parameters": {"a": 1}}]'), "malformed tool"),
    ],
)  # fmt: skip
def test_rows_that_are_refused(given: Any, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        SOURCE.read(given)
    assert caught.value.reason == reason


def test_other_dialogues_are_not_taken_for_it() -> None:
    turns = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
    assert not SOURCE.sniff(
        {"conversations": turns, "tools": "[]", "system": "A list of tools is there."} | {"tools": "[1]"}
    )
    assert not SOURCE.sniff({"conversations": turns, "system": "Be brief."})
    assert not SOURCE.sniff({"conversations": turns})
