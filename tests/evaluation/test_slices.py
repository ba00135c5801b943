"""Slices, and one score over several parts; expected numbers are worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from awpo.events import Progress, silent
from evaluation.benchmarks import PartResult
from evaluation.generate import Generator
from evaluation.items import GREEDY, Item, score_rows
from evaluation.slices import pooled, sliced, take
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
        "effective_items": float(items),
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


def test_a_part_evaluates_its_slice_and_says_of_how_many_items(answering: Callable[..., Any]) -> None:
    def evaluate(generator: Generator, things: Sequence[Thing], progress: Progress) -> PartResult:
        assert things == take(THINGS, 10, seed=3)
        return [], [row("all", 1, len(things))]

    part = sliced("made/all", THINGS, 10, 3, evaluate)
    assert (part.name, part.size) == ("made/all", 10)
    _, [found] = part.run(answering(lambda question, sample: ""), silent)
    assert (found["items"], found["available"]) == (10, 50)


def test_whole_parts_are_pooled_with_the_interval_of_one_proportion() -> None:
    total = pooled([row("a", 30, 40), row("b", 1, 10), row("c", 9, 9)], ["a", "b"], split="both")
    assert total is not None
    assert (total["accuracy"], total["items"], total["available"], total["seconds"]) == (31 / 50, 50, 50, 2.0)
    assert (total["low"], total["high"]) == wilson(31, 50)
    assert total["response_tokens"] == pytest.approx((40 * 40 + 10 * 10) / 50)
    assert (total["splits"], total["protocol"], total["group"]) == (["a", "b"], "p", "average")
    assert "partial" not in total
    assert "no_room" not in total
    full = pooled([row("a", 1, 4, no_room=2), row("b", 1, 4, no_room=1)], ["a", "b"], split="both")
    assert full is not None
    assert full["no_room"] == 3


def test_slices_count_by_the_size_of_their_parts() -> None:
    total = pooled([row("a", 1, 2, 300), row("b", 4, 4, 100)], ["a", "b"], split="both")
    assert total is not None
    assert total["accuracy"] == pytest.approx(0.5 * 0.75 + 1.0 * 0.25)
    assert (total["low"], total["high"]) == weighted_mean([(0.5, 2), (1.0, 4)], [300, 100])[1:]
    assert (total["items"], total["available"]) == (6, 400)


def judged(split: str, verdicts: list[list[bool]]) -> list[Item]:
    """Items of dialogues; each inner list is one dialogue's verdicts."""
    return [
        Item(
            *("made", split, f"{number}-{step}", f"{split}-{number}", "made", step, len(dialogue), "call"),
            *(GREEDY, verdict, "text", 1, False),
        )
        for number, dialogue in enumerate(verdicts)
        for step, verdict in enumerate(dialogue)
    ]


def test_items_of_dialogues_are_pooled_by_dialogue() -> None:
    """A dialogue of which all items fall alike is worth one item: copies of an item tell nothing new."""
    once = {"a": [[number < 30] for number in range(40)], "b": [[number < 4] for number in range(10)]}
    copied = {split: [dialogue * 3 for dialogue in dialogues] for split, dialogues in once.items()}
    totals = []
    for parts in (once, copied):
        rows = [
            row | {"available": row["items"], "seconds": 0.0}
            for split, dialogues in parts.items()
            for row in score_rows(judged(split, dialogues), protocol="p")
        ]
        total = pooled(rows, ["a", "b"], split="both")
        assert total is not None
        totals.append(total)
    single, tripled = totals
    assert (single["low"], single["high"]) == wilson(34, 50)
    assert (tripled["accuracy"], tripled["items"], tripled["dialogues"]) == (34 / 50, 150, 50)
    width, narrow = single["high"] - single["low"], wilson(102, 150)[1] - wilson(102, 150)[0]
    assert tripled["high"] - tripled["low"] == pytest.approx(width, rel=0.1)
    assert tripled["high"] - tripled["low"] > 1.5 * narrow


def test_the_interval_over_levels_covers_the_truth() -> None:
    """Levels of dialogues as API-Bank's: shares that differ by level, items of a dialogue that fall alike.

    Taken as independent, the items would cover less than 92%.
    """
    sizes = {"one": [1, 2, 3] * 35, "two": [1, 2] * 15, "three": [2, 2, 3, 5] * 8}
    shares = {"one": 0.6, "two": 0.3, "three": 0.15}
    counts = {split: sum(found) for split, found in sizes.items()}
    truth = sum(shares[split] * counts[split] for split in sizes) / sum(counts.values())
    generator, covered, alone, rounds = np.random.default_rng(5), 0, 0, 400
    for _ in range(rounds):
        rows = []
        for split, found in sizes.items():
            verdicts = []
            for size in found:
                common = generator.random() < shares[split]
                copied, own = generator.random(size) < 0.7, generator.random(size) < shares[split]
                verdicts.append([bool(common if copy else one) for copy, one in zip(copied, own, strict=True)])
            rows += [
                row | {"available": counts[split], "seconds": 0.0}
                for row in score_rows(judged(split, verdicts), protocol="p")
            ]
        total = pooled(rows, list(sizes), split="all")
        assert total is not None
        covered += total["low"] <= truth <= total["high"]
        low, high = wilson(total["accuracy"] * total["items"], total["items"])
        alone += low <= truth <= high
    assert 0.93 <= covered / rounds <= 0.97
    assert alone / rounds < 0.92


def test_a_total_without_a_part_or_with_items_without_a_verdict_has_no_value() -> None:
    absent = pooled([row("b", 1, 2)], ["a", "b"], split="both")
    assert absent is not None
    assert (absent["accuracy"], absent["low"], absent["high"], absent["partial"]) == (None, None, None, True)
    assert (absent["not_run"], absent["missing"], absent["items"]) == (["a"], {}, 2)
    failed = pooled([row("a", 1, 2, 3, partial=True, missing=1)], ["a"], split="both")
    assert failed is not None
    assert (failed["accuracy"], failed["not_run"], failed["missing"]) == (None, [], {"a": 1})
    assert pooled([row("c", 1, 2)], ["a", "b"], split="both") is None
