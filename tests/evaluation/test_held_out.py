"""Held-out accuracy: the choice of instances, and verdicts on right and wrong answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from awpo.config import EvaluationConfig
from awpo.errors import UserError
from awpo.types import Instance
from evaluation.held_out import choose, evaluate_split, read_splits

CONFIG = EvaluationConfig(samples=8)


def test_the_choice_is_the_same_in_any_order_and_grows_at_its_end(instances: list[Instance]) -> None:
    chosen = choose(instances, 5, seed=0)
    assert choose(instances[::-1], 5, seed=0) == chosen
    assert choose(instances, 7, seed=0)[:5] == chosen
    assert choose(instances, 5, seed=1) != chosen
    assert len(choose(instances + instances, 99, seed=0)) == len(instances)


def test_an_instance_added_moves_no_other(instances: list[Instance]) -> None:
    all_but_one = choose(instances[1:], 99, seed=0)
    assert [one for one in choose(instances, 99, seed=0) if one != instances[0]] == all_but_one


def test_reference_answers_are_all_correct(
    answering: Callable[..., Any], reference: Callable[..., str], instances: list[Instance]
) -> None:
    items, rows = evaluate_split(answering(reference), instances, CONFIG)
    assert len(items) == len(instances) * 9
    assert all(item.correct for item in items)
    assert {row["accuracy"] for row in rows} == {1.0}
    assert {row["group"] for row in rows} == {"all", "step=0", "step=1", "kind=call", "kind=reply", "source=made"}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda text: "",
        lambda text: text.replace("weather", "climate", 1),
        lambda text: text.replace("test_tools", "test_phrasings"),
        lambda text: text.replace("}}", "}"),
        lambda text: text + text[text.index("<tool_call>") :],
        lambda text: text[: text.index("<tool_call>")] + "It is sunny.",
    ],
)
def test_wrong_calls_are_not_correct(
    answering: Callable[..., Any],
    reference: Callable[..., str],
    instances: list[Instance],
    wrong: Callable[[str], str],
) -> None:
    calls = [instance for instance in instances if instance.kind == "call"]
    items, rows = evaluate_split(answering(lambda question, sample: wrong(reference(question))), calls, CONFIG)
    assert not any(item.correct for item in items)
    assert {row["accuracy"] for row in rows} == {0.0}


def test_an_answer_cut_off_at_the_limit_is_not_correct(
    answering: Callable[..., Any], reference: Callable[..., str], instances: list[Instance]
) -> None:
    generator = answering(reference, finish="length")
    items, rows = evaluate_split(generator, instances, CONFIG)
    assert not any(item.correct for item in items)
    assert {row["cut_rate"] for row in rows} == {1.0}


def test_greedy_and_samples_are_counted_apart(
    answering: Callable[..., Any], reference: Callable[..., str], instances: list[Instance]
) -> None:
    """Greedy is always right; of the eight samples the first two are."""
    generator = answering(lambda question, sample: reference(question) if sample < 2 else "")
    _, rows = evaluate_split(generator, instances, CONFIG)
    by_mode = {row["mode"]: row for row in rows if row["group"] == "all"}
    assert by_mode["greedy"]["accuracy"] == 1.0
    assert by_mode["sampled"]["accuracy"] == 0.25
    assert by_mode["sampled"]["empty_rate"] == 0.75
    assert by_mode["sampled"]["pass_at"] == {"1": pytest.approx(0.25), "8": 1.0}


def test_splits_are_read_apart_and_a_missing_one_is_named(instances_folder: Path) -> None:
    found = read_splits(instances_folder, ("test_phrasings", "validation"))
    assert {split: len(instances) for split, instances in found.items()} == {"test_phrasings": 8, "validation": 0}
    with pytest.raises(UserError, match=r"no instance of validation \(splits there: test_phrasings, test_tools\)"):
        read_splits(instances_folder, ("validation",))
