"""Two evaluations side by side: item by item, and only where they are comparable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from awpo.artifacts import open_stage
from awpo.errors import UserError
from evaluation.compare import EvaluationRun, compare, read_run
from evaluation.items import ITEMS, SCORES, Item, write_items

SETTINGS = {"max_completion_length": 8, "samples": 2, "temperature": 1.0}


def make_run(name: str, correct: list[list[bool]]) -> EvaluationRun:
    """Items 0.. of their own dialogues; correct[i] is greedy's verdict and those of the samples."""
    items = tuple(
        Item("held_out", "test", f"i{i}", f"d{i}", "made", 0, 1, "call", sample - 1, verdict, "", 1, False)
        for i, verdicts in enumerate(correct)
        for sample, verdict in enumerate(verdicts)
    )
    return EvaluationRun(Path(name), items, dict(SETTINGS), {"held_out/test": "exact"})


WORSE = make_run("worse", [[False, False, True], [True, True, True], [False, False, False], [True, False, False]])
BETTER = make_run("better", [[True, True, True], [True, True, True], [False, False, True], [True, False, True]])


def test_differences_are_of_means_over_the_same_items() -> None:
    greedy, sampled = compare(WORSE, BETTER)
    assert (greedy.mode, greedy.first, greedy.second, greedy.difference) == ("greedy", 0.5, 0.75, 0.25)
    assert (sampled.first, sampled.second, sampled.difference) == (0.375, 0.75, 0.375)
    assert sampled.low <= sampled.difference <= sampled.high
    assert (sampled.items, sampled.dialogues) == (4, 4)
    assert compare(BETTER, WORSE)[1].difference == -0.375


def test_the_order_of_items_does_not_matter() -> None:
    assert compare(WORSE, replace(BETTER, items=BETTER.items[::-1])) == compare(WORSE, BETTER)


def test_an_item_without_a_verdict_is_left_out_and_counted() -> None:
    """A failed request of the first item's greedy answer and of the third one's second sample."""
    items = list(BETTER.items)
    items[0], items[8] = replace(items[0], correct=None), replace(items[8], correct=None)
    greedy, sampled = compare(WORSE, replace(BETTER, items=tuple(items)))
    assert (greedy.items, greedy.missing, greedy.first, greedy.second) == (3, 1, 2 / 3, 2 / 3)
    assert (sampled.items, sampled.missing, sampled.first, sampled.second) == (3, 1, 0.5, pytest.approx(5 / 6))
    nothing = replace(BETTER, items=tuple(replace(item, correct=None) for item in BETTER.items))
    with pytest.raises(UserError, match="no item of held_out/test has a verdict in both"):
        compare(WORSE, nothing)


def test_runs_on_other_items_are_refused() -> None:
    fewer = replace(BETTER, items=BETTER.items[3:])
    with pytest.raises(UserError, match="they answered 4 and 3 items, 3 of them the same"):
        compare(WORSE, fewer)
    with pytest.raises(UserError, match="they answered 4 and 0 items"):
        compare(WORSE, replace(BETTER, items=()))


@pytest.mark.parametrize("key", SETTINGS)
def test_runs_with_other_settings_are_refused(key: str) -> None:
    other = replace(BETTER, settings=SETTINGS | {key: 3})
    with pytest.raises(UserError, match=f"{key} is"):
        compare(WORSE, other)


def test_sampling_settings_do_not_matter_to_greedy_answers() -> None:
    other = replace(BETTER, settings=SETTINGS | {"samples": 3, "temperature": 0.5})
    assert [row.mode for row in compare(WORSE, other, modes=("greedy",))] == ["greedy"]


def test_runs_by_other_protocols_are_refused() -> None:
    with pytest.raises(UserError, match="protocol of held_out"):
        compare(WORSE, replace(BETTER, protocols={"held_out/test": "another"}))


def test_an_unfinished_evaluation_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a finished evaluation"):
        read_run(tmp_path)


def test_an_answer_that_stands_in_a_result_twice_is_a_user_error(tmp_path: Path) -> None:
    with open_stage(tmp_path / "run", "evaluation", {}, {}) as stage:
        write_items(stage.folder / ITEMS, [*WORSE.items, WORSE.items[4]])
        (stage.folder / SCORES).write_text("[]")
        stage.finish()
    with pytest.raises(UserError, match=r"items\.parquet has the sample 0 of the item i1 of held_out/test 2 times"):
        read_run(tmp_path / "run")


@pytest.mark.parametrize("text", ["{", "null", '{"a": 1}', '["a"]', "[{}]", "[" * 100_000])
def test_damaged_scores_are_a_user_error(text: str, tmp_path: Path) -> None:
    with open_stage(tmp_path, "evaluation", {}, {}) as stage:
        write_items(tmp_path / ITEMS, WORSE.items)
        (tmp_path / SCORES).write_text(text)
        stage.finish()
    with pytest.raises(UserError, match=r"scores\.json is damaged"):
        read_run(tmp_path)
