"""Calls written as code: what is read, what is a problem and where, against Python's own parser as a second opinion."""

from __future__ import annotations

import ast
import json
import sys
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from awpo.chat import DEEPEST_VALUE
from awpo.data.call_syntax import begins_call, scan_calls, scan_literal
from awpo.types import ToolCall


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[]", []),
        (" [ f ( ) ] \n", [("f", {})]),
        ("[Market Trends API(trend_type=\"INDEXES\", country='us')]", [("Market Trends API", {"trend_type": "INDEXES", "country": "us"})]),
        ("[v1/users.get-all(a=1)]", [("v1/users.get-all", {"a": 1})]),
        ("[f(a=1), g.h(b=[1, (2, 3), {'k': {\"l\": [None, true]}}],)]", [("f", {"a": 1}), ("g.h", {"b": [1, [2, 3], {"k": {"l": [None, True]}}]})]),
        ("[f(a='x), g(b=1)]', b=\"it's, [not] {an} end\")]", [("f", {"a": "x), g(b=1)]", "b": "it's, [not] {an} end"})]),
        (r"[f(a='it\'s', b=\"no\")]".replace(r"\"", '"'), [("f", {"a": "it's", "b": "no"})]),
        (r"""[f(a="tab\t nl\n back\\slash \d \u00e9 \x41 \ud83d\ude00 \/")]""", [("f", {"a": "tab\t nl\n back\\slash \\d é A 😀 /"})]),
        ("[f(a=-1, b=+2, c=.5, d=1.5e-3, e=7., f=0)]", [("f", {"a": -1, "b": 2, "c": 0.5, "d": 0.0015, "e": 7.0, "f": 0})]),
        ("[f(a=True, b=false, c=None, d=null)]", [("f", {"a": True, "b": False, "c": None, "d": None})]),
        ("[f(min price=1, 'max price'=2, x-y=3)]", [("f", {"min price": 1, "max price": 2, "x-y": 3})]),
        ("[f(a='two\nlines')]", [("f", {"a": "two\nlines"})]),
        ("[f(a='早上', b={})]", [("f", {"a": "早上", "b": {}})]),
    ],
)  # fmt: skip
def test_calls(text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    found, problem = scan_calls(text)
    assert problem is None
    assert found == tuple(ToolCall(name, arguments) for name, arguments in calls)
    # 1 and True, 1 and 1.0 are equal in Python
    assert repr([call.arguments for call in found]) == repr([arguments for _, arguments in calls])


def test_names_with_brackets_are_known_by_the_tools_on_offer() -> None:
    text = "[Search (v2)(q='a'), Search(q='b'), Find [all](), Search (v2) ()]"
    found, problem = scan_calls(text, ["Search", "Search (v2)", "Find [all]"])
    assert problem is None
    assert [call.name for call in found] == ["Search (v2)", "Search", "Find [all]", "Search (v2)"]
    assert scan_calls(text)[1] is not None  # nothing tells the first bracket from that of the arguments


@pytest.mark.parametrize(
    ("text", "position", "what", "read"),
    [
        ("", 0, "'[' is missing", 0),
        ("f(a=1)", 0, "'[' is missing", 0),
        ("[f(a=1)", 7, "']' is missing after the calls: the text ends", 1),
        ("[f(a=1), ", 9, "a name and '(' were expected", 1),
        ("[f(a=1)] and more", 9, "more text after the calls", 1),
        ("[f(a=1)][g()]", 8, "more text after the calls", 1),
        ("[f(a=1 b=2)]", 7, "')' is missing", 0),
        ("[f(a=Paris)]", 5, "'Paris' is no literal", 0),
        ("[f(a=g(b=1))]", 5, "a call inside a value: 'g'", 0),
        ("[f('a.txt')]", 3, "an argument without a name", 0),
        ("[f(3)]", 3, "an argument without a name", 0),
        ("[f(=3)]", 3, "an argument without a name", 0),
        ("[f(a=1, a=2)]", 8, "'a' is given twice", 0),
        ("[f(a={'k': 1, 'k': 2})]", 14, "'k' is given twice", 0),
        ("[f(a={1: 2})]", 6, "a key that is no text", 0),
        ("[f(a={'k' 2})]", 10, "':' is missing", 0),
        ("[f(a=[1 2])]", 8, "is missing in the list from character 5", 0),
        ("[f(a=[1, 2)]", 10, "is missing in the list from character 5", 0),
        ("[f(a='open)]", 5, "not closed", 0),
        ("[f(a='b' 'c')]", 9, "')' is missing", 0),
        ("[f(a=nan)]", 5, "'nan' is no literal", 0),
        ("[f(a=1e999)]", 5, "too large", 0),
        ("[f(a=" + "9" * 5000 + ")]", 5, "too large", 0),
        ("[f(a=2023-01-01)]", 9, "')' is missing", 0),
        ("[f(a=1.2.3)]", 5, "begins no value", 0),
        ("[f(a=007x)]", 5, "begins no value", 0),
        (r"[f(a='\ud800')]", 5, "lone surrogate", 0),
        (r"[f(a='\u12')]", 6, "names no character", 0),
        (r"[f(a='\U99999999')]", 6, "names no character", 0),
        ("[f(a=)]", 5, "')' begins no value", 0),
        ("[f(a=", 5, "the text ends before a value", 0),
        ("[(a=1)]", 1, "a call without a name", 0),
        ("[see [1] and (2)]", 5, "a name and '(' were expected", 0),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named_with_its_place(text: str, position: int, what: str, read: int) -> None:
    found, problem = scan_calls(text)
    assert problem is not None
    assert (problem.position, len(found)) == (position, read)
    assert what in problem.what
    assert str(problem).startswith(f"character {position}: ")


def test_depth_is_bounded() -> None:
    inside = DEEPEST_VALUE
    assert scan_literal("[" * inside + "]" * inside)[1] is None
    for text in ("[" * 100_000, "{'a':" * 100_000, "[f(a=" + "(" * 100_000):
        assert "nested deeper" in str((scan_calls(text) if text[1] == "f" else scan_literal(text))[1])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("f(a='[{'name': 'b', 'value': '120/80'}]')", "[{'name': 'b', 'value': '120/80'}]"),
        ("f(a='it's late', b='x')", "it's late"),
        ("f(a='x', b='y')", "x"),
        ("f(a='say \\'hi\\'')", "say \\'hi\\'"),  # kept as written: such sources don't escape
    ],
)
def test_quotes_in_quotes_where_a_source_does_not_escape_them(text: str, value: str) -> None:
    found, problem = scan_calls(f"[{text}]", unescaped_quotes=True)
    assert problem is None
    assert found[0].arguments["a"] == value


@pytest.mark.parametrize(
    ("text", "place"),
    [("[Get It(a=1)]", 0), ("Sure. [ get.it(a=", 6), ("[Get Its(a=1)]", -1), ("[1] Get It(", -1), ("", -1)],
)
def test_where_a_call_begins(text: str, place: int) -> None:
    assert begins_call(text, ["Get It", "get.it"]) == place
    assert begins_call(text, []) == -1


# Properties

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
NAME = st.text(st.characters(categories=("L", "N"), include_characters=" ._-/"), min_size=1, max_size=12).filter(
    lambda text: text == text.strip()
)


@given(st.lists(st.tuples(NAME, st.dictionaries(NAME, VALUE, max_size=3)), max_size=3), st.booleans())
@settings(max_examples=200, deadline=None)
def test_what_is_written_reads_back_the_same(calls: list[tuple[str, dict[str, Any]]], as_json: bool) -> None:
    write = json.dumps if as_json else repr
    text = "[" + ", ".join(f"{n}({', '.join(f'{k}={write(v)}' for k, v in a.items())})" for n, a in calls) + "]"
    found, problem = scan_calls(text)
    assert problem is None
    assert repr([(call.name, call.arguments) for call in found]) == repr(calls)


TOKENS = [*"[](){},=:'\"\\ \nfa1.-eN", "None", "\\u", "\\x4", "\ud800"]
SYNTAX = st.lists(st.sampled_from(TOKENS), max_size=30).map("".join)


@given(SYNTAX)
@example("'\\1'")
@example("'\\x41\\101\\0'")
@settings(max_examples=500, deadline=None)
def test_it_never_raises_and_takes_no_value_that_python_reads_otherwise(text: str) -> None:
    scan_calls(text, ["f", "a(1"])
    scan_calls(text, unescaped_quotes=True)
    value, problem = scan_literal(text)
    if problem is None:
        try:
            expected = ast.literal_eval(text.strip().replace("\n", "\\n"))
        except (ValueError, SyntaxError):
            return  # JSON's own words and escapes, leading zeros
        if "\\\\n" not in text and "\\\n" not in text:
            assert json.dumps(value) == json.dumps(expected)


@pytest.mark.parametrize(
    "hostile",
    ["[" + "f(" * 50_000, "[f(a=" + "'x' " * 50_000, "[" + " " * 200_000, "[f(" + "a," * 50_000, "[f(a='" + "\\" * 99_999,
     "[" + "f()," * 50_000, "[" + "f" * 200_000],
)  # fmt: skip
def test_hostile_text_is_read_in_few_steps(hostile: str) -> None:
    """Counted by the lines of code run, not by a clock: a multiple of the text's length is linear."""
    steps = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += event == "line"
        return count

    for loose in (False, True):
        before = sys.gettrace()
        sys.settrace(count)
        try:
            scan_calls(hostile, ["f(", "x[y]"], unescaped_quotes=loose)
        finally:
            sys.settrace(before)
    assert steps < 40 * len(hostile)
