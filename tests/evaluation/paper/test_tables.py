"""The paper's figures, all of them, and ours in tables beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.bfcl.versions import V3
from evaluation.compare import EvaluationRun
from evaluation.comparison_tables import Subject
from evaluation.paper.figures import ABLATIONS, paper_figures
from evaluation.paper.tables import LAYOUT, paper_tables
from evaluation.text_tables import Table, render


def row(benchmark: str, split: str, accuracy: float | None, **fields: Any) -> dict[str, Any]:
    bounds = {
        "low": None if accuracy is None else accuracy - 0.05,
        "high": None if accuracy is None else accuracy + 0.05,
    }
    base = {"benchmark": benchmark, "split": split, "mode": "greedy", "group": "all", "items": 200, "available": 200}
    return {**base, "accuracy": accuracy, **bounds, **fields}


def subject(folder: Path, label: str, *seeds: list[dict[str, Any]]) -> Subject:
    runs = {}
    for number, rows in enumerate(seeds):
        place = folder / f"{label}-{number}"
        place.mkdir()
        (place / "scores.json").write_text(json.dumps(rows))
        runs[str(number)] = EvaluationRun(place, (), {}, {})
    return Subject(label, runs)


def table(tables: list[Table], number: int) -> Table:
    return next(found for found in tables if found.title.startswith(f"Table {number}:"))


def cells(found: Table, label: str) -> dict[str, str]:
    [values] = [values for values in found.rows if values[0] == label]
    return dict(zip(found.columns, values, strict=True))


def test_the_data_file_is_the_project_s_copy_of_what_was_read_in_the_paper() -> None:
    figures = paper_figures()
    assert len(figures) == 30
    assert all(figure.section for figure in figures)
    assert {figure.status for figure in figures} == {"text", "implied"}
    for figure in figures:  # a fraction amounts to its percentage, to the last digit that the paper gives
        if figure.fraction:
            right, total = map(int, figure.fraction.split("/"))
            assert figure.value == pytest.approx(100 * right / total, abs=0.0051 if figure.value % 1 else 0.051)


def test_figures_agree_with_the_differences_that_the_paper_states() -> None:
    known = {(figure.subset, figure.model, figure.method): figure.value for figure in paper_figures()}
    awpo = known["multi_turn", "Qwen3-4B-2507", "AWPO"]
    assert awpo - known["multi_turn", "Qwen3-4B-2507", "baseline RL"] == pytest.approx(10.50)
    assert awpo - known["multi_turn", "Grok-4", "external"] == pytest.approx(16.00)
    assert known["L3", "Qwen3-8B", "AWPO"] - 40.46 == pytest.approx(15.27)


def test_every_figure_stands_in_a_table_with_its_section_and_its_mark() -> None:
    tables = paper_tables([])
    for figure in paper_figures():
        where = [
            (found, record)
            for found in tables
            for record in found.records
            if record["value"] == figure.value and record["status"] == figure.status
        ]
        if figure.is_accuracy:
            assert any(figure.section in record["source"] for _, record in where), figure
        else:
            assert any(figure.sentence() in note for found in tables for note in found.notes), figure
    text = render(tables, "markdown")
    assert "41.62\\*" in text
    assert "52.12 " in text


def test_the_columns_are_those_that_benchmarks_score() -> None:
    splits = {
        split for _, columns in LAYOUT for column in columns if column.benchmark == "bfcl_v3" for split in column.splits
    }
    assert splits <= {*V3.categories, *(average.name for average in V3.averages)}


def test_ours_beside_the_paper_s(tmp_path: Path) -> None:
    ours = [
        row("bfcl_v3", "Multi Turn Acc", 0.5, group="average"),
        row("bfcl_v3", "multi_turn_base", 0.6, items=30),
        row("bfcl_v3", "Overall Acc", None, group="average", partial=True, not_run=["java"]),
        row("api_bank", "toolrl-compat/level-1", 0.75, items=399, available=399),
        row("api_bank", "toolrl-compat/level-2", 0.5, items=67, available=67),
        row("mmlu_pro", "overall", 0.25, group="average", partial=True, missing=3),
    ]
    tables = paper_tables([subject(tmp_path, "awpo", ours)])
    first = cells(table(tables, 1), "awpo")
    assert (first["Overall"], first["Live"], first["Multi-turn"]) == ("partial", "not run", "50.0 [45.0, 55.0]")
    assert first["Source"] == "ours"
    second = cells(table(tables, 2), "awpo")
    assert (second["Overall"], second["Base"]) == ("50.0 [45.0, 55.0]", "60.0† [55.0, 65.0]")
    third = cells(table(tables, 3), "awpo")
    assert (third["Level 1"], third["Levels 1 and 2"]) == ("75.0 [70.0, 80.0]", "71.4")
    assert (third["Level 3"], cells(table(tables, 4), "awpo")["Overall"]) == ("not run", "partial")
    fifth = cells(table(tables, 5), "AWPO (awpo)")
    assert (fifth["ours"], fifth["Qwen3-8B"], fifth["Qwen3-4B-2507"]) == ("50.0 [45.0, 55.0]", "40.50", "52.12")
    assert cells(table(tables, 5), "AWPO fixed clip (awpo_fixed_clip)")["ours"] == "not run"
    [record] = [found for found in table(tables, 1).records if (found["row"], found["column"]) == ("awpo", "Overall")]
    assert (record["value"], record["status"], record["detail"]) == (None, "partial", "not run: java")


def test_seeds_are_a_mean_with_students_interval_and_a_lacking_one_makes_it_partial(tmp_path: Path) -> None:
    seeds = [[row("bfcl_v3", "Multi Turn Acc", share, group="average")] for share in (0.4, 0.5, 0.6)]
    tables = paper_tables([subject(tmp_path, "awpo", *seeds), subject(tmp_path, "grpo", seeds[0], [])])
    # t(2) = 4.3027, standard error 0.1 / sqrt(3)
    assert cells(table(tables, 2), "awpo")["Overall"] == "50.0 [25.2, 74.8]"
    assert cells(table(tables, 2), "grpo")["Overall"] == "partial"
    assert cells(table(tables, 2), "grpo")["Base"] == "not run"


def test_the_ablations_are_methods_of_ours() -> None:
    from awpo.methods import METHODS

    assert set(ABLATIONS.values()) <= set(METHODS)
