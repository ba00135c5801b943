"""The leaderboard's averages: against the official script, to the last digit, and worked out by hand."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.bfcl.averages import MEMORY, MULTI_TURN, NON_LIVE_CALLS, OVERALL, WEB_SEARCH
from evaluation.bfcl.data import read_category
from evaluation.bfcl.package import INSTALL
from evaluation.bfcl.versions import V3, V4, Version

needs_package = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason=f"needs: {INSTALL}")

BY_NAME = {average.name: average for average in V3.averages}
BY_NAME_V4 = {average.name: average for average in V4.averages}
OFFICIAL_V4 = """
from pathlib import Path
helper = official("eval_checker.eval_runner_helper")
tables, answer = {}, []
official_bfcl.keep_tables(helper, tables)
for table in asked:
    helper.generate_leaderboard_csv({official_bfcl.MODEL.replace("/", "_"): table}, Path())
    answer.append(dict(tables))
"""


def drawn(version: Version, seed: int) -> tuple[dict[str, float], dict[str, int]]:
    """Accuracies and sizes of all categories."""
    draw = random.Random(seed)
    sizes = {category: draw.choice([1, 7, 200, draw.randrange(1, 2000)]) for category in version.categories}
    return {category: draw.randrange(size + 1) / size for category, size in sizes.items()}, sizes


@needs_package
@pytest.mark.parametrize("seed", range(20))
def test_they_are_the_official_scripts_to_the_last_digit(
    official: Callable[[str], Any], official_script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    """gorilla#827: which averages are weighted."""
    helper = official("eval_checker.eval_runner_helper")
    accuracy, sizes = drawn(V3, seed)
    table = {name: {"accuracy": accuracy[name], "total_count": sizes[name]} for name in V3.categories}
    tables: dict[str, dict[str, Any]] = {}

    def keep(data: list[list[Any]], file_path: Path, header: list[str], **_: Any) -> None:
        tables[file_path.stem] = dict(zip(header, data[0], strict=True))

    monkeypatch.setattr(helper, "write_score_csv_file", keep)
    helper.generate_leaderboard_csv({"Qwen_Qwen3-0.6B-FC": table}, tmp_path)
    assert set(official_script.COLUMNS_V3) == set(BY_NAME)
    for name, (file, column) in official_script.COLUMNS_V3.items():
        assert BY_NAME[name].value(accuracy, sizes) == tables[file][column]


def test_those_of_version_4_are_the_official_scripts_to_the_last_digit(
    ask_v4: Callable[[str, Any], Any], official_script: Any
) -> None:
    cases = [drawn(V4, seed) for seed in range(20)]
    tables = [
        {name: {"accuracy": accuracy[name], "total_count": sizes[name]} for name in V4.categories}
        for accuracy, sizes in cases
    ]
    assert set(official_script.COLUMNS_V4) == set(BY_NAME_V4)
    for (accuracy, sizes), found in zip(cases, ask_v4(OFFICIAL_V4, tables), strict=True):
        for name, (file, column) in official_script.COLUMNS_V4.items():
            assert BY_NAME_V4[name].value(accuracy, sizes) == found[file][column]
        # The columns that are left out are others under another name.
        assert found["data_non_live"]["Non-Live Overall Acc"] == found["data_overall"][NON_LIVE_CALLS]
        assert found["data_live"]["Live Overall Acc"] == found["data_overall"]["Live Acc"]


def test_version_4_by_hand() -> None:
    sizes = dict.fromkeys(V4.categories, 10) | {"live_simple": 258, "live_multiple": 1053}
    accuracy = dict.fromkeys(V4.categories, 0.0)
    accuracy |= {"simple_python": 0.9, "simple_java": 0.3, "multiple": 0.8, "live_simple": 1.0, "irrelevance": 0.6}
    accuracy |= {"live_irrelevance": 0.2, "multi_turn_base": 0.5, "memory_kv": 0.6, "web_search_base": 0.4}
    found = {name: average.value(accuracy, sizes) for name, average in BY_NAME_V4.items()}
    live = 258 / (258 + 1053 + 20)  # without relevance and irrelevance
    by_hand = {
        NON_LIVE_CALLS: (0.4 + 0.8) / 4,
        "Live Acc": live,
        "Irrelevance Detection": 0.4,
        "Multi Turn Acc": 0.125,
        "Web Search Acc": 0.2,
        "Memory Acc": 0.2,
        "Agentic Overall Acc": 0.2,
        OVERALL: 0.1 * 0.3 + 0.1 * live + 0.1 * 0.4 + 0.3 * 0.125 + 0.4 * 0.2,
    }
    assert {name: found[name] for name in by_hand} == pytest.approx(by_hand)


def test_by_hand() -> None:
    sizes = dict.fromkeys(V3.categories, 10) | {"live_simple": 258, "live_multiple": 1053}
    accuracy = dict.fromkeys(V3.categories, 0.0)
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


@pytest.mark.parametrize("version", [V3, V4], ids=lambda version: version.name)
def test_weights_give_the_value(version: Version) -> None:
    accuracy, sizes = drawn(version, 1)
    for average in version.averages:
        weights = average.weights(sizes)
        assert set(weights) == set(average.categories)
        assert sum(weights.values()) == pytest.approx(1)
        mean = sum(weight * accuracy[category] for category, weight in weights.items())
        assert average.value(accuracy, sizes) == pytest.approx(mean)


def test_the_overall_average_needs_every_category() -> None:
    """gorilla#827: which averages are weighted."""
    assert sorted(BY_NAME[OVERALL].categories) == sorted(V3.categories)
    assert BY_NAME["Multi Turn Acc"].categories == MULTI_TURN
    assert sorted([*BY_NAME_V4[OVERALL].categories, "live_relevance"]) == sorted(V4.categories)
    assert BY_NAME_V4["Agentic Overall Acc"].categories == (*WEB_SEARCH, *MEMORY) == V4.agentic


@needs_package
def test_sizes_of_the_whole_benchmark_weigh_live() -> None:
    sizes = {category: len(read_category(category)) for category in V3.categories}
    weights = BY_NAME["Live Acc"].weights(sizes)
    assert weights["live_multiple"] == 1053 / 2251
