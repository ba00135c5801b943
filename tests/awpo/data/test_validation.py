"""Calls against schemas: reasons by hand, verdicts against the package jsonschema."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awpo.data.validation import Fault, _fits_plainly, call_faults, first_fault, schema_allows
from awpo.types import Tool, ToolCall

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "share": {"type": "number", "exclusiveMaximum": 1},
        "stops": {"type": "array", "maxItems": 2, "items": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
        "either": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]},
        "both": {"type": ["integer", "null"]},
        "free": {},
    },
    "required": ["city"],
}  # fmt: skip
TOOL = Tool("t", "", SCHEMA)


@pytest.mark.parametrize(
    "arguments",
    [
        {"city": "Rome"},
        {
            "city": "Rome",
            "days": 7,
            "unit": "C",
            "share": 0.5,
            "stops": [{"x": 1, "y": 2}],
            "either": [1],
            "both": None,
        },
        {"city": "Ro", "days": 1, "stops": [{"x": 1}, {"x": 2}]},
        {"city": "Rome", "days": 2.0, "share": 0, "free": {"any": [None]}, "stops": []},
    ],
)
def test_calls_that_fit(arguments: dict[str, Any]) -> None:
    assert list(call_faults(ToolCall("t", arguments), TOOL)) == []


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        ({}, [("missing parameter", "city")]),
        ({"city": "Rome", "town": 1}, [("unknown parameter", "town")]),
        ({"city": 5}, [("wrong type", "city")]),
        ({"city": None}, [("null for a value", "city")]),
        ({"city": "R"}, [("out of bounds", "city")]),
        ({"city": "Rome", "days": "3"}, [("wrong type", "days")]),
        ({"city": "Rome", "days": True}, [("wrong type", "days")]),
        ({"city": "Rome", "days": 2.5}, [("wrong type", "days")]),
        ({"city": "Rome", "days": 8}, [("out of bounds", "days")]),
        ({"city": "Rome", "share": 1.0}, [("out of bounds", "share")]),
        ({"city": "Rome", "unit": "K"}, [("not an allowed value", "unit")]),
        ({"city": "Rome", "stops": [{"x": 1}, {"x": "1"}, {}]}, [("out of bounds", "stops"), ("wrong type", "stops[1].x"), ("missing parameter", "stops[2].x")]),
        ({"city": "Rome", "either": "1"}, [("wrong type", "either")]),
        ({"days": 0, "x": 1}, [("unknown parameter", "x"), ("out of bounds", "days"), ("missing parameter", "city")]),
    ],
)  # fmt: skip
def test_calls_that_do_not_fit(arguments: dict[str, Any], faults: list[tuple[str, str]]) -> None:
    call = ToolCall("t", arguments)
    assert [(fault.reason, fault.where) for fault in call_faults(call, TOOL)] == faults
    assert first_fault(call, TOOL) == next(call_faults(call, TOOL))


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, 1, True),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, 4, False),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, 2.5, False),
        ({"enum": [1]}, True, False),
        ({"enum": [True]}, 1, False),
        ({"enum": [1]}, 1.0, True),
        ({"const": [{"a": [1]}]}, [{"a": [1.0]}], True),
        ({"const": [{"a": [1]}]}, [{"a": [True]}], False),
        ({"const": None}, None, True),
        ({"exclusiveMinimum": 1}, 1, False),
    ],
)
def test_values(schema: Any, value: Any, fits: bool) -> None:
    assert schema_allows(value, schema) == fits


def test_a_fault_reads_as_a_sentence() -> None:
    assert str(Fault("wrong type", "a", "integer expected, not 'x'")) == "wrong type: a (integer expected, not 'x')"
    assert str(first_fault(ToolCall("t", {}), TOOL)) == "missing parameter: city"


def test_other_parameters_are_let_pass_where_the_schema_speaks_of_them() -> None:
    for extra, fits in (({}, False), ({"additionalProperties": True}, True), ({"additionalProperties": False}, False), ({"additionalProperties": {"type": "integer"}}, True), ({"patternProperties": {"^x": {}}}, True)):  # fmt: skip
        tool = Tool("t", "", {"type": "object", "properties": {}, **extra})
        assert (first_fault(ToolCall("t", {"x": 1}), tool) is None) == fits
    tool = Tool("t", "", {"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}})
    assert str(first_fault(ToolCall("t", {"x": "1"}), tool)).startswith("wrong type: x")


# Any schema of these words, against an independent implementation

VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from([0.5, 1.0, -1.5])
    | st.sampled_from(["", "a", "bc"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=2),
    max_leaves=5,
)
WORD = st.sampled_from(["string", "integer", "number", "boolean", "object", "array", "null"])


def schemas() -> st.SearchStrategy[Any]:
    plain = st.fixed_dictionaries(
        {},
        optional={
            "type": WORD | st.lists(WORD, min_size=1, max_size=2, unique=True),
            "enum": st.lists(VALUE, min_size=1, max_size=3),
            "const": VALUE,
            "minimum": st.integers(-1, 1),
            "maximum": st.integers(-1, 1),
            "exclusiveMinimum": st.integers(-1, 1),
            "exclusiveMaximum": st.integers(-1, 1),
            "minLength": st.integers(0, 2),
            "maxLength": st.integers(0, 2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(0, 2),
        },
    )
    return st.recursive(
        st.booleans() | plain,
        lambda inner: st.tuples(
            plain,
            st.fixed_dictionaries(
                {},
                optional={
                    "properties": st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
                    "required": st.lists(st.sampled_from(["a", "b"]), max_size=2, unique=True),
                    "additionalProperties": inner,
                    "items": inner,
                    "anyOf": st.lists(inner, min_size=1, max_size=2),
                    "oneOf": st.lists(inner, min_size=1, max_size=2),
                    "allOf": st.lists(inner, min_size=1, max_size=2),
                },
            ),
        ).map(lambda pair: {**{k: v for k, v in pair[0].items() if k in ("type", "minItems", "minimum")}, **pair[1]}),
        max_leaves=4,
    )


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), schemas(), max_size=3), st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUE, max_size=3), st.lists(st.sampled_from(["a", "b"]), max_size=2, unique=True))  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_the_verdict_is_that_of_jsonschema(properties: Any, arguments: Any, required: list[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"type": "object", "properties": properties, "required": required}
    expected = jsonschema.Draft202012Validator({**schema, "additionalProperties": False}).is_valid(arguments)
    assert (first_fault(ToolCall("t", arguments), Tool("t", "", schema)) is None) == expected


WORDS = ["string", "integer", "number", "boolean", "object", "array", "null", "any"]
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=False), st.sampled_from(["", "a", "b"])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
    max_leaves=8,
)
SCHEMAS = st.recursive(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.one_of(st.sampled_from(WORDS), st.lists(st.sampled_from(WORDS), max_size=2)),
            "description": st.just("x"),
            "enum": st.lists(VALUES, max_size=3),
            "minimum": st.integers(-2, 2),
            "required": st.lists(st.sampled_from("abc"), max_size=2),
            "default": st.none(),
        },
    ),
    lambda inner: st.fixed_dictionaries(
        {"type": st.sampled_from(WORDS)},
        optional={
            "items": inner,
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            "required": st.lists(st.sampled_from("abc"), max_size=2),
            "additionalProperties": st.one_of(st.booleans(), inner),
            "anyOf": st.lists(inner, max_size=2),
        },
    ),
    max_leaves=5,
)


@given(value=st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), schema=SCHEMAS)
def test_what_fits_at_first_sight_has_no_fault(value: dict[str, Any], schema: dict[str, Any]) -> None:
    tool, call = Tool("f", "", schema), ToolCall("f", value)
    slow = next(call_faults(call, tool), None)
    assert first_fault(call, tool) == slow
    if _fits_plainly(value, schema):
        assert slow is None


def test_most_calls_fit_at_first_sight() -> None:
    nested = {"type": "object", "properties": {"n": {"type": "integer", "description": "a number"}}, "required": ["n"]}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": nested}, "b": {"type": "string", "enum": ["x"]}},
    }
    assert _fits_plainly({"a": [{"n": 1}, {"n": 2}], "b": "x"}, schema)
    for value in ({"a": [{"n": 1.5}]}, {"a": [{}]}, {"b": "y"}, {"c": 1}, {"a": [{"n": True}]}):
        assert not _fits_plainly(value, schema)
