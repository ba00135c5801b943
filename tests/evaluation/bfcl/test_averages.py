"""The leaderboard's averages: against the official script, to the last digit, and worked out by hand."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.bfcl.averages import AVERAGES, NON_LIVE_CALLS, OVERALL
from evaluation.bfcl.data import CATEGORIES, INSTALL, MULTI_TURN, read_category

needs_package = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason=f"needs: {INSTALL}")

BY_NAME = {average.name: average for average in AVERAGES}


@needs_package
@pytest.mark.parametrize("seed", range(20))
def test_they_are_the_official_scripts_to_the_last_digit(
    official: Callable[[str], Any], official_script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    helper = official("eval_checker.eval_runner_helper")
    draw = random.Random(seed)
    sizes = {category: draw.choice([1, 7, 200, draw.randrange(1, 2000)]) for category in CATEGORIES}
    accuracy = {category: draw.randrange(size + 1) / size for category, size in sizes.items()}
    table = {name: {"accuracy": accuracy[name], "total_count": sizes[name]} for name in CATEGORIES}
    tables: dict[str, dict[str, Any]] = {}

    def keep(data: list[list[Any]], file_path: Path, header: list[str], **_: Any) -> None:
        tables[file_path.stem] = dict(zip(header, data[0], strict=True))

    monkeypatch.setattr(helper, "write_score_csv_file", keep)
    helper.generate_leaderboard_csv({"Qwen_Qwen3-0.6B-FC": table}, tmp_path)
    assert set(official_script.COLUMNS) == set(BY_NAME)
    for name, (file, column) in official_script.COLUMNS.items():
        assert BY_NAME[name].value(accuracy, sizes) == tables[file][column]


def test_by_hand() -> None:
    sizes = dict.fromkeys(CATEGORIES, 10) | {"live_simple": 258, "live_multiple": 1053}
    accuracy = dict.fromkeys(CATEGORIES, 0.0)
    accuracy |= {"simple": 0.9, "java": 0.3, "multiple": 0.8, "live_simple": 1.0, "multi_turn_base": 0.5}
    # simple: (0.9 + 0.3 + 0) / 3 = 0.4; calls: (0.4 + 0.8 + 0 + 0) / 4 = 0.3; with irrelevance (1.2) / 5 = 0.24
    # live: 258 / (258 + 1053 + 40); several turns: 0.5 / 4
    live = 258 / 1351
    found = {name: average.value(accuracy, sizes) for name, average in BY_NAME.items()}
    assert found["Non-Live Simple AST"] == pytest.approx(0.4)
    assert found[NON_LIVE_CALLS] == pytest.approx(0.3)
    assert found["Non-Live Overall Acc"] == pytest.approx(0.24)
    assert found["Live Acc"] == pytest.approx(live)
    assert found["Live AST Summary"] == pytest.approx(258 / (258 + 1053 + 20))
    assert found["Multi Turn Acc"] == pytest.approx(0.125)
    assert found[OVERALL] == pytest.approx((0.24 + live + 0.125) / 3)


def test_weights_give_the_value() -> None:
    draw = random.Random(1)
    sizes = {category: draw.randrange(1, 900) for category in CATEGORIES}
    accuracy = {category: draw.random() for category in CATEGORIES}
    for average in AVERAGES:
        weights = average.weights(sizes)
        assert set(weights) == set(average.categories)
        assert sum(weights.values()) == pytest.approx(1)
        mean = sum(weight * accuracy[category] for category, weight in weights.items())
        assert average.value(accuracy, sizes) == pytest.approx(mean)


def test_the_overall_average_needs_every_category() -> None:
    assert sorted(BY_NAME[OVERALL].categories) == sorted(CATEGORIES)
    assert BY_NAME["Multi Turn Acc"].categories == MULTI_TURN


@needs_package
def test_sizes_of_the_whole_benchmark_weigh_live() -> None:
    sizes = {category: len(read_category(category)) for category in CATEGORIES}
    weights = BY_NAME["Live Acc"].weights(sizes)
    assert weights["live_multiple"] == 1053 / 2251
