"""`awpo compare`: what is printed, in each form."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from awpo.artifacts import open_stage
from evaluation.items import ITEMS, SCORES, Item, score_rows, write_items
from evaluation.paper.figures import paper_figures


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Two finished evaluations of 40 items."""
    for name, digits in (("sft", "0011" * 10), ("awpo", "0111" * 10)):
        items = [
            Item("held_out", "test", f"i{i}", f"d{i}", "made", 0, 1, "call", -1, digit == "1", "x", 1, False)
            for i, digit in enumerate(digits)
        ]
        with open_stage(tmp_path / name, "evaluation", {}, {"max_completion_length": 8}) as stage:
            write_items(stage.folder / ITEMS, items)
            (stage.folder / SCORES).write_text(json.dumps(score_rows(items)))
            stage.finish()
    return [str(tmp_path / "sft"), str(tmp_path / "awpo")]


def printed(*arguments: str) -> str:
    from flows.cli import app

    result = CliRunner().invoke(app, ["compare", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_differences_as_json(folders: list[str]) -> None:
    [row] = json.loads(printed(*folders, "--json").splitlines()[-1])["differences"]
    assert (row["reference"], row["subject"], row["first"], row["second"], row["difference"]) == (
        "sft",
        "awpo",
        0.5,
        0.75,
        0.25,
    )
    assert row["low"] < 0.25 < row["high"]
    assert row["p"] == row["adjusted"] == pytest.approx(2 / 2**10)


def test_differences_as_text(folders: list[str]) -> None:
    assert "+25.0" in printed(*folders)
    assert "| awpo | held\\_out | test | greedy | 50.0 | 75.0 | +25.0 |" in printed(*folders, "--format", "markdown")
    assert r"awpo & held\_out & test & greedy & 50.0 & 75.0 & +25.0 &" in printed(*folders, "--format", "latex")
    [row] = csv.DictReader(io.StringIO(printed(*folders, "--format", "csv")))
    assert float(row["difference"]) == 0.25


def test_the_paper_s_tables(folders: list[str]) -> None:
    text = printed(*folders, "--tables", "paper", "--format", "markdown")
    assert [f"**Table {number}: " in text for number in range(1, 6)] == [True] * 5
    rows = list(csv.DictReader(io.StringIO(printed(*folders, "--tables", "paper", "--format", "csv"))))
    assert {row["row"] for row in rows if row["status"] == "not run"} >= {"sft", "awpo"}
    stated = {float(row["value"]) for row in rows if row["status"] in ("text", "implied")}
    assert stated == {figure.value for figure in paper_figures() if figure.is_accuracy}
    assert "AWPO" in printed(folders[0], "--tables", "paper")
