"""The commands `awpo evaluate ...`: the one that is meant, what is refused, flips and reference answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from awpo.artifacts import open_stage
from evaluation.items import ITEMS, SCORES, Item, write_items
from flows.cli import app
from tests.flows.test_cli import awpo

ITEM = Item("held_out", "test", "a", "a", "made", 0, 1, "call", -1, True, "first said", 3, False)

BAD: dict[str, tuple[list[str], str]] = {
    "neither checkpoint nor endpoint": (["--out", "o"], "give one of CHECKPOINT"),
    "both": (
        ["embedded-1m", "--endpoint", "http://localhost/v1", "--model", "m", "--out", "o"],
        "give one of CHECKPOINT",
    ),
    "an endpoint without a model": (["--endpoint", "http://localhost/v1", "--out", "o"], "--endpoint needs --model"),
    "a model without an endpoint": (["embedded-1m", "--model", "m", "--out", "o"], "it goes with --endpoint"),
    "unknown preset of an endpoint": (["--endpoint-preset", "gpt-4", "--out", "o"], "did you mean 'gpt-4o'"),
    "unknown prompt format": (["embedded-1m", "--out", "o", "--prompt-format", "rla"], "prompt_format"),
    "unknown engine": (["embedded-1m", "--out", "o", "--engine", "vlm"], "engine"),
    "reference answers of no benchmark": (["check-golds", "--benchmark", "bfcl"], "no benchmark 'bfcl'"),
    "reference answers that are not there": (
        ["check-golds", "--benchmark", "held_out", "--data", "no"],
        "no does not exist",
    ),
    "data that a benchmark does not read": (
        ["check-golds", "--benchmark", "bfcl_v3", "--data", "."],
        "no folder of benchmark data is read for bfcl_v3",
    ),
    "a folder without the benchmark's files": (
        ["check-golds", "--benchmark", "api_bank", "--data", "."],
        ". holds none of the files that api_bank looks for there: toolrl/api-bank-level-1-api_processed.json, ",
    ),
    "no folder of the benchmark's files": (
        ["embedded-1m", "--benchmark", "mmlu_pro", "--data", "no", "--out", "o"],
        "there is no folder no; name one that holds mmlu_pro's files",
    ),
    "data for held_out": (
        ["embedded-1m", "--benchmark", "held_out", "--data", ".", "--out", "o"],
        "no folder of benchmark data is read for held_out",
    ),
    "an address that is none": (
        ["--endpoint", "localhost:8000/v1", "--model", "m", "--out", "o"],
        "base_url 'localhost:8000/v1' is not an http(s) URL",
    ),
    "a split that the corpus does not have": (
        ["embedded-1m", "--split", "test_tools", "--split", "test", "--out", "o"],
        "the embedded corpus has no split test; there are test_phrasings, test_tools, train, validation",
    ),
    "flips of nothing": (["diff", "a", "b"], "not a finished evaluation"),
    "a name that is neither command nor checkpoint": (["dif", "--out", "o"], "unknown model 'dif'"),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_bad_input_is_one_line_and_exit_code_2(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, expected = BAD[kind]
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["evaluate", *arguments])
    assert done.exit_code == 2, done.output
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert expected in line
    assert list(tmp_path.iterdir()) == []


def test_the_group_stands_under_one_name_with_its_commands(tmp_path: Path) -> None:
    done = awpo("evaluate", "--help", folder=tmp_path)
    assert done.returncode == 0
    for name in ("run", "diff", "check-golds"):
        assert name in done.stdout
    options = awpo("evaluate", "run", "--help", folder=tmp_path)
    assert "--endpoint-preset" in options.stdout


@pytest.fixture
def finished(tmp_path: Path) -> Callable[..., str]:
    """Writes the folder of a finished evaluation with these items."""

    def write(name: str, *items: Item) -> str:
        with open_stage(tmp_path / name, "evaluation", {"name": name}, {}) as stage:
            write_items(stage.folder / ITEMS, items)
            (stage.folder / SCORES).write_text("[]")
            stage.finish()
        return str(tmp_path / name)

    return write


def test_flips_are_printed_and_written(finished: Callable[..., str], tmp_path: Path) -> None:
    one = finished("one", ITEM, replace(ITEM, item_id="b"))
    two = finished(
        "two", replace(ITEM, correct=False, completion="then this", detail="no call"), replace(ITEM, item_id="b")
    )
    page = tmp_path / "diff.html"
    done = CliRunner().invoke(app, ["evaluate", "diff", one, two, "--json", "--html", str(page)])
    assert done.exit_code == 0, done.output
    (flipped,) = json.loads(done.stdout)["flipped"]
    assert (flipped["id"], flipped["change"], flipped["second"]["output"]) == ("a", "broken", "then this")
    assert "then this" in page.read_text("utf-8")
    shown = CliRunner().invoke(app, ["evaluate", "diff", one, two])
    for text in ("broken  held_out/test  a", "first, right:", "first said", "second, wrong (no call):", "then this"):
        assert text in shown.stdout


def test_a_doubled_item_is_refused_by_diff_and_compare(finished: Callable[..., str]) -> None:
    one, two = finished("one", ITEM), finished("two", ITEM, ITEM)
    for command in (["evaluate", "diff"], ["compare"]):
        done = CliRunner().invoke(app, [*command, one, two])
        assert done.exit_code == 2
        [line] = done.stderr.strip().splitlines()
        assert "two/items.parquet has the greedy answer of the item a of held_out/test 2 times" in line


def test_reference_answers_are_counted_as_one_json_object(tmp_path: Path) -> None:
    done = awpo("evaluate", "check-golds", "--benchmark", "held_out", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["benchmark"] == "held_out"
    assert report["items"] == report["valid"] > 500
    assert report["failed"] == []
    assert list(tmp_path.iterdir()) == []
