"""The report: everything is in it, nothing runs in it, and what was not measured says so."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from awpo.artifacts import open_stage
from awpo.errors import UserError
from awpo.files import write_atomically
from evaluation.bfcl.benchmark import summary_rows
from evaluation.items import Item, score_rows, write_items
from evaluation.report import RunSummary, write_report
from evaluation.slices import pooled
from evaluation.tables import duration

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&"


class Page(HTMLParser):
    """Tags, and the text of the tables by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.in_cell = False
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.in_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.in_cell = False

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.in_cell:
            self.rows[-1][-1] += data

    def row(self, first: str) -> list[str]:
        return next(row for row in self.rows if row and row[0] == first)


def scores(accuracy: float, split: str = "test_tools") -> list[dict[str, Any]]:
    common = {"dialogues": 20, "empty_rate": 0.0, "response_tokens": 42.0, "cut_rate": 0.0, "protocol": "exact"}
    rows = []
    for mode in ("greedy", "sampled"):
        for group in ("all", "step=0", "step=1", "kind=call"):
            row = {"benchmark": "held_out", "split": split, "mode": mode, "group": group, "accuracy": accuracy}
            rows.append(row | {"low": accuracy - 0.1, "high": accuracy + 0.1, "items": 30, "available": 90} | common)
    return rows


def bfcl(category: str, **fields: Any) -> dict[str, Any]:
    row = {"benchmark": "bfcl_v3", "split": category, "mode": "greedy", "group": "all", "accuracy": 0.5, "low": 0.3}
    return (
        row | {"high": 0.7, "items": 30, "available": 240, "dialogues": 30, "seconds": 1.0, "empty_rate": 0.4} | fields
    )


def metrics(start: float, steps: int = 30) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "metrics": {
                "reward/total": start + step,
                "reward/outcome": start + step,
                "response_length": 50.0,
                "gradient_norm": math.nan,
            },
        }
        for step in range(steps)
    ]


def run(name: str, method: str, accuracy: float = 0.5, **fields: Any) -> RunSummary:
    return RunSummary(name, method, "embedded-1m", 0, "sft", scores=scores(accuracy), **fields)


def report(tmp_path: Path, *runs: RunSummary, **options: Any) -> tuple[str, Page]:
    text = write_report(tmp_path / "report.html", runs, **options).read_text("utf-8")
    return text, Page(text)


def test_every_run_is_in_it_with_its_numbers(tmp_path: Path) -> None:
    methods = ("sft", "grpo", "awpo", "dapo", "gdpo", "dara", "dr_grpo", "awpo_soft", "grpo_mixed", "awpo_correlation")
    runs = [run(f"{m}-run", m, 0.3 + i / 20, metrics=metrics(i), seconds=75.0) for i, m in enumerate(methods)]
    text, page = report(tmp_path, *runs, title="A title", notes=["A note."])
    for index, summary in enumerate(runs):
        row = page.row(summary.name)
        assert row[1:6] == [summary.method, "embedded-1m", "sft", "0", f"{index + 28:.3g}"]
        assert row[6].startswith(f"{100 * (0.3 + index / 20):.1f}%")
        assert f"{100 * (0.2 + index / 20):.1f} – {100 * (0.4 + index / 20):.1f}" in row[6]
        assert row[-2:] == ["42", "1 min 15 s"]
        assert f">{summary.name}</text>" in text
    assert "A title" in page.text
    assert "A note." in page.text


def test_nothing_in_it_is_fetched_or_run(tmp_path: Path) -> None:
    text, page = report(tmp_path, run("a", "awpo", metrics=metrics(0)))
    assert {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "embed"} == set()
    assert not any(name in attributes for _, attributes in page.tags for name in ("src", "href", "onerror", "onload"))
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_hostile_text_is_text(tmp_path: Path) -> None:
    hostile = RunSummary(
        name=HOSTILE,
        method=HOSTILE + "m",
        model=HOSTILE,
        seed=0,
        init=HOSTILE,
        metrics=metrics(0),
        scores=[*scores(0.5, split=HOSTILE), bfcl("simple", protocol=HOSTILE)],
        provenance={HOSTILE: {"key": HOSTILE}},
    )
    text, page = report(tmp_path, hostile, run("b", "sft"), title=HOSTILE, notes=[HOSTILE], reference=HOSTILE)
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert "<script" not in text
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert page.row(HOSTILE)


def test_what_was_not_run_says_so(tmp_path: Path) -> None:
    bare = RunSummary("bare", "base", "embedded-1m", 0, "")
    text, page = report(tmp_path, run("full", "sft", metrics=metrics(0)), bare)
    row = page.row("bare")
    assert row[5:] == ["–", "not run", "not run", "–", "not run", "–"]
    assert "0.0%" not in " ".join(row)
    assert "Gate open: logged by no run" in text
    assert re.search(r"BFCL v3.*?</h2>\s*<p class=\"soft\">Not run", text, re.DOTALL)


def test_bfcl_shows_items_and_empty_outputs_and_never_a_zero_for_what_is_missing(tmp_path: Path) -> None:
    """Reported by others: a silent model scores on irrelevance."""
    some = run("some", "sft")
    found = [bfcl("irrelevance", missing=3), bfcl("simple", checker_failures=2), bfcl("multiple")]
    some = replace(some, scores=[*some.scores, *found, *summary_rows(found)])
    _, page = report(tmp_path, some)
    assert page.row("irrelevance")[1] == "50.0%30.0 – 70.030 of 240 items, empty 40%, 3 without an answer"
    assert "2 without a verdict" in page.row("simple")[1]
    assert page.row("live_simple")[1] == "not run"
    assert page.row("Non-Live AST Acc")[1] == "partial: 2 of 6 categories"
    assert page.row("Overall Acc")[1] == "partial: 3 of 17 categories, 3 items without an answer"
    assert page.row("Live Acc")[1] == "not run"


def test_other_benchmarks_have_their_tables_and_totals_that_are_partial(tmp_path: Path) -> None:
    level = bfcl("toolrl-compat/level-1", benchmark="api_bank", items=399, available=399, protocol="ToolRL's")
    lost = {**level, "split": "toolrl-compat/level-2", "items": 60, "available": 67, "partial": True, "missing": 7}
    total = pooled([level, lost], ["toolrl-compat/level-1", "toolrl-compat/level-2"], split="toolrl-compat/overall")
    assert total is not None
    text, page = report(tmp_path, replace(run("some", "sft"), scores=[level, lost, total]))
    assert page.row("toolrl-compat/level-1")[1] == "50.0%30.0 – 70.0399 items, empty 40%"
    assert page.row("toolrl-compat/level-2")[1].endswith("60 of 67 items, empty 40%, 7 without an answer")
    assert page.row("toolrl-compat/overall")[1] == "partial: 2 of 2 categories, 7 items without an answer"
    assert re.search(r"MMLU-Pro</h2>\s*<p class=\"soft\">Not run", text)


def test_depth_kind_and_rates_stand_beside_each_other(tmp_path: Path) -> None:
    rows = scores(0.5)
    rows[4] |= {"pass_at": {"1": 0.5, "8": 0.875}, "cut_rate": 0.25}  # sampled, all
    _, page = report(tmp_path, replace(run("a", "sft"), scores=rows), RunSummary("b", "base", "embedded-1m", 0, ""))
    heads = ["Run", "step=0", "step=1", "kind=call", "pass@8", "empty", "cut off"]
    place = page.rows.index(heads)
    assert [text[:5] for text in page.rows[place + 1]] == ["a", "50.0%", "50.0%", "50.0%", "87.5%", "0.0%", "25.0%"]
    assert page.rows[place + 2] == ["b"] + ["not run"] * 6


def test_seeds_of_one_method_are_averaged(tmp_path: Path) -> None:
    runs = [run("s", "sft"), run("a", "awpo", 0.6), replace(run("b", "awpo", 0.7), seed=1)]
    _, page = report(tmp_path, *runs)
    assert page.row("awpo") == ["awpo", "2", "65.0%60.0 – 70.0"]
    assert page.row("sft") == ["sft", "1", "50.0%"]


def test_seeds_of_one_method_are_a_line_in_a_band(tmp_path: Path) -> None:
    seeds = [replace(run(f"a{seed}", "awpo", metrics=metrics(3.0 * seed)), seed=seed) for seed in range(3)]
    text, _ = report(tmp_path, run("g", "grpo", metrics=metrics(0)), *seeds)
    total = text[text.index("Reward, total") : text.index("Reward, correctness")]
    assert total.count("from the lowest to the highest seed") == 1, "one seed has no band"
    assert total.count('class="area') == 1
    assert total.count('class="k') == 2


def make_evaluation(folder: Path, correct: int, items: int = 40, length: int = 8) -> Path:
    """A finished evaluation of which the first `correct` items are right."""
    rows = [
        Item("held_out", "test_tools", f"i{n:02}", f"d{n}", "made", 0, 1, "call", 0, n < correct, "", 9, False)
        for n in range(items)
    ]
    settings = {"samples": 1, "temperature": 1.0, "max_completion_length": length}
    with open_stage(folder, "evaluation", {}, settings) as stage:
        write_items(folder / "items.parquet", rows)
        write_atomically(folder / "scores.json", json.dumps(score_rows(rows, protocol="exact")))
        stage.finish({})
    return folder


def test_runs_are_compared_with_the_reference_item_by_item(tmp_path: Path) -> None:
    reference = replace(run("s", "sft"), evaluation=make_evaluation(tmp_path / "s", 10))
    better = replace(run("a", "awpo"), evaluation=make_evaluation(tmp_path / "a", 30))
    same = replace(run("g", "grpo"), evaluation=make_evaluation(tmp_path / "g", 10))
    other = replace(run("o", "dapo"), evaluation=make_evaluation(tmp_path / "o", 30, length=9))
    text, page = report(tmp_path, reference, better, same, other)
    assert page.row("a")[8].startswith("+50.0")
    assert page.row("g")[8].startswith("+0.0")
    assert page.row("s")[8] == "–"
    assert page.row("o")[8] == "–"
    assert "max_completion_length is 8 in one and 9 in the other" in text
    assert re.search(r'class="better"[^>]*>\+50\.0', text)
    assert not re.search(r'class="better"[^>]*>\+0\.0', text)


def test_runs_need_names_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two runs of the report are named 'a'"):
        write_report(tmp_path / "r.html", [run("a", "sft"), run("a", "awpo")])
    with pytest.raises(UserError, match="at least one run"):
        write_report(tmp_path / "r.html", [])
    assert write_report(tmp_path, [run("a", "sft")]) == tmp_path / "report.html"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.4, "0 s"), (59.6, "1 min 0 s"), (185, "3 min 5 s"), (7800, "2 h 10 min")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
