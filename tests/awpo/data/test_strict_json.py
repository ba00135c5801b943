"""Reading and writing JSON without loss."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from awpo.data import strict_json

TEXT = st.text(st.characters(exclude_categories=("Cs",)))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def exactly(value: Any) -> str:
    """Distinguishes what == does not: 1, 1.0 and True, 0.0 and -0.0, and the order of keys."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{exactly(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(exactly, value)) + "]"
    return f"{type(value).__name__} {value!r}"


@given(JSON, st.booleans())
def test_what_is_written_reads_back_the_same(value: Any, spaced: bool) -> None:
    assert exactly(strict_json.parse(strict_json.dump(value, spaced=spaced))) == exactly(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ('[{"b": {"a": 1, "a": 1}}]', "'a' is given twice"),
        ("[NaN]", "NaN is not JSON"),
        ("-Infinity", "-Infinity is not JSON"),
        ("[1e999]", "too large"),
        (r'"\ud800"', "lone surrogate"),
        (r'{"\uDC00": 1}', "lone surrogate"),
        ("[1] [2]", "more text follows"),
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[" * 5000 + "]" * 5000, "nested too deeply"),
        ("9" * 5000, "too many digits: 5000"),
    ],
)
def test_refuses_what_python_would_mend_or_drop(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        strict_json.parse(text)


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert strict_json.parse(r'"\ud83d\ude00"') == "\N{GRINNING FACE}"


@pytest.mark.parametrize("value", [float("nan"), {"a": float("inf")}, "\ud800", {"\udfff": 1}, {1, 2}, [b""]])
def test_refuses_to_write_what_is_not_json(value: Any) -> None:
    with pytest.raises(ValueError):
        strict_json.dump(value)


def test_a_fault_does_not_hide_where_the_value_ends() -> None:
    text = '{"a": NaN} {"a": 1}'
    decoder = strict_json.StrictDecoder()
    _, end, fault = decoder.raw_decode(text)
    assert fault is not None
    assert decoder.raw_decode(text, end + 1) == ({"a": 1}, len(text), None)


@pytest.mark.parametrize(
    ("value", "depth"), [(1, 0), ("[[", 0), ({}, 1), ([1, [2]], 2), ({"a": [{"b": 1}], "c": 1}, 3)]
)
def test_depth(value: Any, depth: int) -> None:
    assert strict_json.depth(value) == depth
