"""The decision of a night: what it finds, what it lets pass, and how often it is wrong, in seeded simulations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from awpo.errors import UserError
from evaluation.compare import EvaluationRun
from evaluation.items import Item
from evaluation.nightly import MARGIN, Night, Part, compare_runs, decide

NIGHTS = 300
SPLITS = (400, 400)
"""Items of the two splits of the default night."""


def simulate(generator: np.random.Generator, drops: tuple[float, ...], sizes: tuple[int, ...] = SPLITS) -> list[Part]:
    """Verdicts of a champion that has 60% right, and of a candidate that answers a fifth of the items otherwise.

    `drops` is the true loss of accuracy in each part. Dialogues have one to four items. They differ in difficulty (an
    intraclass correlation of 0.3), and in how prone they are to flips: half of them three times as much as the others.
    """
    parts = []
    for number, (items, drop) in enumerate(zip(sizes, drops, strict=True)):
        labels = np.repeat(np.arange(items), np.resize([1, 2, 3, 4], items))[:items]
        champion = generator.random(items) < generator.beta(1.4, 0.933, labels.max() + 1)[labels]
        prone = generator.choice((0.5, 1.5), labels.max() + 1)[labels]
        # Of the items that the champion has right (0.6 of them) this share is lost, of the others that is won.
        chance = prone * np.where(champion, (0.1 + drop / 2) / 0.6, (0.1 - drop / 2) / 0.4)
        candidate = champion ^ (generator.random(items) < chance)
        dialogues = tuple(f"{number}/{label}" for label in labels)
        parts.append(Part(f"part-{number}", tuple(champion * 1.0), tuple(candidate * 1.0), dialogues))
    return parts


def alarms(drops: tuple[float, ...], sizes: tuple[int, ...] = SPLITS, nights: int = NIGHTS) -> float:
    """The share of nights with an alarm."""
    generator = np.random.default_rng(len(sizes))
    return sum(bool(decide(simulate(generator, drops, sizes)).regressed) for _ in range(nights)) / nights


@pytest.mark.slow
def test_no_change_alarms_in_at_most_one_night_in_twenty() -> None:
    assert alarms((0.0, 0.0)) <= 0.05


@pytest.mark.slow
def test_even_a_drop_of_the_margin_itself_alarms_in_at_most_one_night_in_twenty() -> None:
    assert alarms((MARGIN, MARGIN)) <= 0.05
    assert alarms((MARGIN, *[0.0] * 9), (100,) * 10, 100) <= 0.05


@pytest.mark.slow
def test_a_drop_of_twice_the_margin_is_found_in_four_nights_of_five() -> None:
    assert alarms((2 * MARGIN, 2 * MARGIN)) >= 0.8


@pytest.mark.slow
def test_a_collapse_of_one_part_among_many_is_found() -> None:
    """Pooled over ten parts it is a drop of 2 points, less than the margin."""
    assert alarms((0.2, *[0.0] * 9), (100,) * 10, 100) >= 0.3
    worse = [decide(simulate(np.random.default_rng(seed), (0.2, *[0.0] * 9), (100,) * 10)) for seed in range(20)]
    assert not any(night.whole.regressed for night in worse)


def parts(champion: str, candidate: str, name: str = "a") -> Part:
    """A part from verdicts written as digits, each item a dialogue of its own."""
    first, second = (tuple(float(digit) for digit in text) for text in (champion, candidate))
    return Part(name, first, second, tuple(f"{name}{number}" for number in range(len(first))))


def test_equal_answers_are_no_regression() -> None:
    night = decide([parts("10" * 200, "10" * 200)])
    assert not night.regressed
    assert (night.whole.difference, night.whole.p) == (0.0, 1.0)


def test_a_collapse_is_a_regression_and_its_mirror_image_is_none() -> None:
    worse = decide([parts("1" * 60 + "0" * 40, "0" * 60 + "0" * 40)])
    assert [verdict.part for verdict in worse.regressed] == ["all"]
    assert (worse.whole.champion, worse.whole.candidate, worse.whole.difference) == (0.6, 0.0, -0.6)
    assert worse.whole.high < -0.4
    assert worse.parts == ()  # one part is all there is
    assert not decide([parts("0" * 100, "1" * 60 + "0" * 40)]).regressed


def test_the_margin_decides() -> None:
    """A drop of 20 points with an interval of some 12 to 28."""
    lost = parts("1" * 100, "0" * 20 + "1" * 80)
    assert decide([lost], margin=0.05).regressed
    assert not decide([lost], margin=0.15).regressed
    with pytest.raises(ValueError, match="positive margin"):
        decide([lost], margin=0.0)
    with pytest.raises(ValueError, match="0 parts"):
        decide([parts("", "")])


def test_parts_share_the_error() -> None:
    night = decide([parts("1" * 50, "1" * 50, name) for name in "abcde"])
    assert [verdict.confidence for verdict in night.parts] == pytest.approx([0.99] * 5)
    assert night.whole.confidence == 0.95
    assert night.whole.items == 250


def test_what_a_night_could_find_shrinks_with_items() -> None:
    few, many = (decide([parts("1100" * count, "1010" * count)]) for count in (20, 200))
    # A half of the items flip: the standard error is sqrt(0.5 / n), and it takes 2.8 of them beyond the margin.
    assert many.detectable == pytest.approx(MARGIN + 2.8016 * np.sqrt(0.5 / 800), abs=0.005)
    assert few.detectable > 2 * many.detectable - MARGIN


def run(name: str, verdicts: dict[str, list[bool | None]]) -> EvaluationRun:
    """Greedy answers (and a sampled one each, which takes no part) by split."""
    items = tuple(
        Item("held_out", split, f"i{i}", f"d{i}", "made", 0, 1, "call", sample, verdict, f"{name} {i}", 1, False)
        for split, found in verdicts.items()
        for i, verdict in enumerate(found)
        for sample in (-1, 0)
    )
    return EvaluationRun(Path(name), items, {"samples": 1}, {})


def test_runs_are_compared_by_their_greedy_answers() -> None:
    champion = run("champion", {"test": [True] * 40, "tools": [True, False, None]})
    candidate = run("candidate", {"test": [False] * 40, "tools": [False, True, True]})
    night: Night = compare_runs(champion, candidate)
    assert (night.whole.items, night.missing) == (42, 1)
    assert [(verdict.part, verdict.items) for verdict in night.parts] == [("held_out/test", 40), ("held_out/tools", 2)]
    assert {verdict.part for verdict in night.regressed} == {"all", "held_out/test"}


def test_runs_without_a_verdict_in_common_are_refused() -> None:
    silent = run("silent", {"test": [None, None]})
    with pytest.raises(UserError, match="no greedy answer has a verdict"):
        compare_runs(silent, run("champion", {"test": [True, True]}))
    other = run("other", {"test": [True, True, True]})
    with pytest.raises(UserError, match="2 and 3 items"):
        compare_runs(replace(silent), other)
