"""The registry of benchmarks, and reference answers through the scoring path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from awpo.config import EvaluationConfig
from awpo.data.store import read_instances, write_instances
from awpo.errors import UserError
from awpo.types import Instance, Message, ToolCall
from evaluation.benchmarks import BENCHMARKS, GoldVerdict, get_benchmark
from evaluation.golds import gold_report

CONFIG = EvaluationConfig(splits=("test_phrasings", "test_tools"))


def test_settings_and_registry_name_the_same_benchmarks() -> None:
    names = get_args(get_args(EvaluationConfig.model_fields["benchmarks"].annotation)[0])
    assert set(names) == set(BENCHMARKS)
    with pytest.raises(UserError, match="no benchmark 'bfcl'; there are held_out, bfcl_v3"):
        get_benchmark("bfcl")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_has_the_name_that_it_is_registered_under(name: str) -> None:
    assert get_benchmark(name).name == name


def test_every_held_out_reference_answer_is_valid(instances_folder: Path) -> None:
    report = gold_report("held_out", get_benchmark("held_out").gold_verdicts(instances_folder, CONFIG))
    assert report == {
        "benchmark": "held_out",
        "items": 14,
        "valid": 14,
        "failed": [],
        "splits": {"test_phrasings": {"items": 8, "valid": 8}, "test_tools": {"items": 6, "valid": 6}},
    }


def test_without_data_the_embedded_corpus_is_checked() -> None:
    report = gold_report("held_out", get_benchmark("held_out").gold_verdicts(None, CONFIG))
    assert set(report["splits"]) == {"test_phrasings", "test_tools", "validation"}
    assert report["items"] == report["valid"] > 500
    assert report["failed"] == []


def test_a_reference_that_the_scoring_path_cannot_read_is_listed_with_the_reason(
    tmp_path: Path, instances_folder: Path
) -> None:
    """A call nested past what the parser reads."""
    deep: object = 1
    for _ in range(80):
        deep = [deep]
    good = list(read_instances(instances_folder))
    target = Message("assistant", tool_calls=(ToolCall("weather", {"city": deep}),))
    bad: Instance = replace(good[0], target=target, id="")
    write_instances(tmp_path / "made", [*good[1:], bad])
    report = gold_report("held_out", get_benchmark("held_out").gold_verdicts(tmp_path / "made", CONFIG))
    assert (report["items"], report["valid"]) == (14, 13)
    ((failed),) = report["failed"]
    assert failed["id"] == bad.id
    assert "nested more than 64 deep" in failed["reason"]


def test_a_report_counts_by_split() -> None:
    verdicts = [GoldVerdict("a", "1", True), GoldVerdict("b", "2", False, "why"), GoldVerdict("a", "3", True)]
    report = gold_report("x", verdicts)
    assert report["splits"] == {"a": {"items": 2, "valid": 2}, "b": {"items": 1, "valid": 0}}
    assert (report["items"], report["valid"], report["failed"]) == (3, 2, [{"id": "2", "reason": "why"}])
