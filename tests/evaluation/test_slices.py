"""Slices, and one score over several parts; expected numbers are worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from evaluation.slices import pooled, take
from evaluation.statistics import weighted_mean, wilson


@dataclass(frozen=True)
class Thing:
    id: str


THINGS = [Thing(f"t{number}") for number in range(50)]


def row(split: str, correct: int, items: int, available: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        "benchmark": "made",
        "split": split,
        "mode": "greedy",
        "group": "all",
        "accuracy": correct / items,
        "items": items,
        "dialogues": items,
        "available": available or items,
        "seconds": 1.0,
        "empty_rate": 0.5,
        "response_tokens": items,
        "cut_rate": 0.0,
        "protocol": "p",
    } | more


def test_a_slice_is_part_of_a_larger_one_and_keeps_the_order() -> None:
    ten, twenty = take(THINGS, 10, seed=3), take(THINGS, 20, seed=3)
    assert len(ten) == 10
    assert set(ten) < set(twenty)
    assert ten == [thing for thing in THINGS if thing in ten]
    assert take(THINGS[::-1], 10, seed=3) == ten[::-1]
    assert take(THINGS, 10, seed=4) != ten
    assert take(THINGS, None, seed=3) == take(THINGS, 99, seed=3) == THINGS


def test_whole_parts_are_pooled_with_the_interval_of_one_proportion() -> None:
    total = pooled([row("a", 30, 40), row("b", 1, 10), row("c", 9, 9)], ["a", "b"], split="both")
    assert total is not None
    assert (total["accuracy"], total["items"], total["available"], total["seconds"]) == (31 / 50, 50, 50, 2.0)
    assert (total["low"], total["high"]) == wilson(31, 50)
    assert total["response_tokens"] == pytest.approx((40 * 40 + 10 * 10) / 50)
    assert (total["splits"], total["protocol"], total["group"]) == (["a", "b"], "p", "average")
    assert "partial" not in total


def test_slices_count_by_the_size_of_their_parts() -> None:
    total = pooled([row("a", 1, 2, 300), row("b", 4, 4, 100)], ["a", "b"], split="both")
    assert total is not None
    assert total["accuracy"] == pytest.approx(0.5 * 0.75 + 1.0 * 0.25)
    assert (total["low"], total["high"]) == weighted_mean([(0.5, 2), (1.0, 4)], [300, 100])[1:]
    assert (total["items"], total["available"]) == (6, 400)


def test_a_total_without_a_part_or_with_items_without_a_verdict_has_no_value() -> None:
    absent = pooled([row("b", 1, 2)], ["a", "b"], split="both")
    assert absent is not None
    assert (absent["accuracy"], absent["low"], absent["high"], absent["partial"]) == (None, None, None, True)
    assert (absent["not_run"], absent["missing"], absent["items"]) == (["a"], {}, 2)
    failed = pooled([row("a", 1, 2, 3, partial=True, missing=1)], ["a"], split="both")
    assert failed is not None
    assert (failed["accuracy"], failed["not_run"], failed["missing"]) == (None, [], {"a": 1})
    assert pooled([row("c", 1, 2)], ["a", "b"], split="both") is None
