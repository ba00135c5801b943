"""The statistics of a study on cells made up so that every number can be worked out by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.study import arms_of, compare_arms, gain, running_mean, speed, steps_to_reach, summarise
from evaluation.study_cells import CellResult
from evaluation.study_report import draw_study, study_json, study_markdown

CELL = CellResult(
    method="awpo",
    judge="correlated +0.8 x3",
    correlation=0.8,
    scale=3.0,
    seed=1,
    settings="abc",
    code="61961e4",
    accuracy=0.25,
    accuracy_tools=0.125,
    greedy=0.5,
    response_length=31.5,
    steps=8,
    steps_per_rollout=4,
    reward=-0.5,
    gate_open_share=0.75,
    reward_curve=(-1.0, -0.5),
)
SFT = CellResult("sft", "none", math.nan, math.nan, 0, "abc", "61961e4", 0.2, 0.1, 0.3, 33.0)
JUDGE = CELL.judge


def cells_of(method: str, judge: str, accuracies: list[float], **changes: object) -> list[CellResult]:
    base = CELL if method != "sft" else SFT
    return [
        replace(base, method=method, judge=judge, seed=seed, accuracy=value, **changes)  # type: ignore[arg-type]
        for seed, value in enumerate(accuracies)
    ]


CELLS = [
    *cells_of("sft", "none", [0.10, 0.20, 0.30]),
    *cells_of("grpo", "none", [0.20, 0.30, 0.40], reward=-0.5),
    *cells_of("grpo_mixed", JUDGE, [0.21, 0.31, 0.41], reward_curve=(-1.0, -1.0, -1.0, -0.4, 0.0, 0.0)),
    *cells_of("awpo", JUDGE, [0.22, 0.34, 0.42], reward_curve=(-1.0, -0.9, -0.9)),
    *cells_of("awpo_fixed_clip", JUDGE, [0.22, 0.34]),
    *cells_of("awpo", "rubric x3", [0.1, 0.1, 0.1]),
]
ARMS = {arm.name: arm for arm in arms_of(CELLS)}


def test_arms_are_methods_under_judges() -> None:
    assert list(ARMS) == [
        "sft",
        "grpo",
        f"grpo_mixed · {JUDGE}",
        f"awpo · {JUDGE}",
        f"awpo_fixed_clip · {JUDGE}",
        "awpo · rubric x3",
    ]


def test_a_mean_over_seeds_has_students_interval() -> None:
    found = summarise(ARMS["grpo"], "accuracy")
    assert found is not None
    assert found.mean == pytest.approx(0.3)
    # sd 0.1 of three: 4.302653 x 0.1 / sqrt(3)
    assert found.high - found.mean == pytest.approx(0.248413, abs=1e-5)
    assert summarise(ARMS["sft"], "gradient_norm_variation") is None


def test_a_running_mean_looks_back() -> None:
    assert running_mean([3.0, 1.0, 2.0, 6.0]) == [3.0, 2.0, 2.0, 3.0]


def test_steps_to_reach_a_reward() -> None:
    cell = replace(CELL, reward_curve=(0.0, -1.0, -1.0, -0.4, 0.0, 0.0), steps_per_rollout=4)
    # Running means from the third batch on: -0.667, -0.8, -0.467, -0.133; the lucky first batch counts for nothing.
    assert steps_to_reach(cell, -0.5) == 20
    assert steps_to_reach(cell, 0.5) == math.inf
    assert steps_to_reach(replace(cell, reward_curve=()), -9.0) == math.inf


def test_the_gain_over_a_baseline_is_batch_by_batch() -> None:
    baseline = replace(CELL, reward_curve=(-1.0, 1.0, 0.0, 0.5))
    cell = replace(CELL, reward_curve=(-0.5, 1.5, 0.5, 2.0))
    assert gain(cell, baseline) == pytest.approx([0.5, 0.5, 0.5, 2.5 / 3])
    assert gain(baseline, baseline) == [0.0, 0.0, 0.0, 0.0]
    assert cell.whole_reward == pytest.approx(0.875)
    assert math.isnan(replace(CELL, reward_curve=()).whole_reward)


def test_speed_is_against_the_same_seed() -> None:
    assert speed(ARMS[f"grpo_mixed · {JUDGE}"], ARMS["grpo"]) == (20.0, 3, 3)
    assert speed(ARMS[f"awpo · {JUDGE}"], ARMS["grpo"]) == (math.inf, 0, 3)
    assert speed(ARMS["sft"], ARMS["grpo"]) is None


def test_questions_pair_seeds_and_judges() -> None:
    found = {(row.question, row.first, row.second): row for row in compare_arms(list(ARMS.values()), ["accuracy"])}
    assert set(found) == {
        ("against sft", "sft", "grpo"),
        *(("against grpo", "grpo", name) for name in ARMS if name not in ("sft", "grpo")),
        ("against grpo_mixed, same judge", f"grpo_mixed · {JUDGE}", f"awpo · {JUDGE}"),
        ("against grpo_mixed, same judge", f"grpo_mixed · {JUDGE}", f"awpo_fixed_clip · {JUDGE}"),
        ("against awpo, same judge", f"awpo · {JUDGE}", f"awpo_fixed_clip · {JUDGE}"),
        ("against grpo, over judges", "grpo", "awpo · 2 judges"),
    }
    awpo = found["against grpo", "grpo", f"awpo · {JUDGE}"].test
    assert awpo.difference == pytest.approx(0.08 / 3)
    assert awpo.pairs == 3
    # Differences 0.02, 0.04, 0.02: mean 0.026667, standard error 0.0066667, t = 4, two-sided p with 2 degrees 0.05719.
    assert awpo.p == pytest.approx(0.05719, abs=1e-5)
    # Of the four questions against grpo this is the third smallest p; two are 0 (differences all alike).
    assert found["against grpo", "grpo", f"awpo_fixed_clip · {JUDGE}"].test.pairs == 2
    assert found["against sft", "sft", "grpo"].test.p == pytest.approx(0.0, abs=1e-12)


def test_questions_over_judges_take_a_seeds_mean() -> None:
    other = "correlated -0.5 x3"
    more = [
        *ARMS.values(),
        *arms_of(cells_of("grpo_mixed", other, [0.11, 0.21, 0.37])),
        *arms_of(cells_of("awpo", other, [0.14, 0.22, 0.42])),
        *arms_of(cells_of("awpo_soft", other, [0.9])),  # one judge alone, one seed alone: no part of this
    ]
    rows = {(row.question, row.second): row for row in compare_arms(more, ["accuracy"])}
    assert {key for key in rows if key[0].endswith("over judges")} == {
        ("against grpo, over judges", "grpo_mixed · 2 judges"),
        ("against grpo, over judges", "awpo · 3 judges"),
        ("against grpo_mixed, over judges", "awpo · 2 judges"),
    }
    row = rows["against grpo_mixed, over judges", "awpo · 2 judges"]
    assert (row.first, row.second) == ("grpo_mixed · 2 judges", "awpo · 2 judges")
    # By seed: (0.01 + 0.03)/2, (0.03 + 0.01)/2, (0.01 + 0.05)/2
    assert row.test.difference == pytest.approx((0.02 + 0.02 + 0.03) / 3)
    assert row.test.pairs == 3


def test_one_seed_answers_nothing() -> None:
    assert compare_arms(arms_of([cell for cell in CELLS if cell.seed == 0])) == []


def test_json_has_no_infinities_and_markdown_every_arm(tmp_path: Path) -> None:
    value = study_json(CELLS)
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    arms = {(arm["method"], arm["judge"]): arm for arm in value["arms"]}
    assert arms["awpo", JUDGE]["steps_to_grpo"] == {"median": None, "reached": 0, "of": 3}
    assert arms["sft", "none"]["reward"] is None
    text = study_markdown(CELLS)
    for name in ARMS:
        assert f"| {name} |" in text
    assert "| 20 (3/3) |" in text
    assert "| never (0/3) |" in text
    assert "| against grpo | grpo | awpo · correlated +0.8 x3 | +2.7 [-0.2, +5.5] | 0.057 |" in text
    assert "nan" not in text


def test_figures_are_drawn_and_small(tmp_path: Path) -> None:
    files = draw_study(CELLS, tmp_path)
    assert [file.name for file in files] == ["differences.png", "curves.png"]
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")
        assert file.stat().st_size < 300_000
    assert draw_study([cell for cell in CELLS if cell.method == "sft"], tmp_path / "none") == []
