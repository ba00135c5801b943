"""MMLU-Pro from questions to rows: reference answers, made answers, and a tiny checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from awpo.config import EvaluationConfig
from evaluation.benchmarks import get_benchmark
from evaluation.generate import Question
from evaluation.golds import gold_report
from evaluation.items import REQUEST_FAILED, read_items
from evaluation.mmlu_pro.benchmark import MmluPro, compat_rows, evaluate_category
from evaluation.mmlu_pro.data import CATEGORIES, Exemplar, MmluItem
from evaluation.mmlu_pro.extraction import random_credit
from evaluation.run import evaluate
from evaluation.statistics import wilson

ITEMS = [MmluItem(str(n), f"Question {n}?", ("w", "x", "y", "z"), "ABCD"[n % 4], n % 4, "law") for n in range(8)]
EXEMPLARS = [Exemplar("Why?", ("a", "b"), "Let's think step by step. The answer is (A).")] * 5
CONFIG = EvaluationConfig(mmlu_pro_completion_length=64)


def test_every_reference_answer_is_extracted(shared_data: Path) -> None:
    report = gold_report("mmlu_pro", get_benchmark("mmlu_pro").gold_verdicts(shared_data, CONFIG))
    assert (report["items"], report["valid"], report["failed"]) == (12_032, 12_032, [])
    assert list(report["splits"]) == list(CATEGORIES)


def said(*texts: str) -> Callable[[Question, int], str]:
    """The n-th text for question n."""

    def say(question: Question, sample: int) -> str:
        number = int((question.messages[0].content or "").rpartition("Question: Question ")[2][0])
        return texts[number]

    return say


TEXTS = (
    "The answer is (A).",  # right
    "The answer is (C).",  # wrong
    "",
    "<think>\nThe answer is (A).\n</think>\n\nAnswer: D",  # right: the thought is not the answer
    "<think>\nThe answer is (A). And",  # nothing but a thought
    "**Answer:** B",  # right
    "It must be b.",
    "(D)",  # right
)


def test_items_and_the_row_of_a_category(answering: Callable[..., Any]) -> None:
    items, (row,) = evaluate_category(answering(said(*TEXTS)), ITEMS, EXEMPLARS, CONFIG)
    assert [item.error_type for item in items] == [
        "",
        "wrong_answer",
        "unparsed",
        "",
        "unparsed",
        "",
        "unparsed",
        "",
    ]
    assert [item.correct for item in items] == [not item.error_type for item in items]
    assert items[1].detail == "C by the rule 'answer is'; B is right"
    assert (row["accuracy"], row["items"], row["shortened"]) == (0.5, 8, 0)
    assert row["unparsed"] == [(4, 2), (4, 0), (4, 2)]
    assert row["unparsed_rate"] == 3 / 8
    assert "one user message" in row["protocol"]


def test_an_answer_that_never_came_is_not_unparsed(answering: Callable[..., Any]) -> None:
    items, rows = evaluate_category(answering(said(*TEXTS), "failed"), ITEMS, EXEMPLARS, CONFIG)
    assert {(item.correct, item.error_type) for item in items} == {(None, REQUEST_FAILED)}
    assert rows == []


def test_an_answer_cut_off_is_read_all_the_same(answering: Callable[..., Any]) -> None:
    (item, *_), _ = evaluate_category(answering(said(*TEXTS), "length"), ITEMS, EXEMPLARS, CONFIG)
    assert (item.correct, item.finish) == (True, "length")


def category(
    name: str, correct: int, items: int, unparsed: list[tuple[int, int]], available: int = 0
) -> dict[str, Any]:
    head = {"benchmark": "mmlu_pro", "split": name, "mode": "greedy", "group": "all", "protocol": "p, q"}
    numbers = {"accuracy": correct / items, "items": items, "available": available or items, "dialogues": items}
    rates = {
        "effective_items": float(items),
        "empty_rate": 0.0,
        "response_tokens": 9.0,
        "cut_rate": 0.0,
        "seconds": 1.0,
    }
    return head | numbers | rates | {"unparsed": unparsed, "unparsed_rate": len(unparsed) / items}


def test_the_compat_rows_add_the_official_random_credit() -> None:
    unparsed = {"physics": [(10, 3)] * 50, "law": [(4, 1)] * 40}
    rows = [category("physics", 30, 100, unparsed["physics"]), category("law", 20, 60, unparsed["law"])]
    law, physics = random_credit([unparsed["law"], unparsed["physics"]])  # categories in alphabetical order
    compat = {row["split"]: row for row in compat_rows(json.loads(json.dumps(rows)))}  # as they are stored
    assert list(compat) == ["compat/law", "compat/physics"]
    assert (compat["compat/law"]["accuracy"], compat["compat/physics"]["accuracy"]) == (
        (20 + law) / 60,
        (30 + physics) / 100,
    )
    assert law > 0
    assert physics > 0
    assert (compat["compat/law"]["low"], compat["compat/law"]["high"]) == wilson(20 + law, 60)
    assert "random" in compat["compat/law"]["protocol"]
    assert "unparsed" not in compat["compat/law"]


def test_the_totals_over_categories() -> None:
    rows = [category(name, 5 + n, 20, [(10, 0)] * (n % 2)) for n, name in enumerate(CATEGORIES)]
    summary = {row["split"]: row for row in MmluPro().summary(rows)}
    assert len(summary) == 14 + 2
    overall = summary["overall"]
    assert (overall["items"], overall["accuracy"]) == (280, sum(range(5, 19)) / 280)
    assert (overall["low"], overall["high"]) == wilson(sum(range(5, 19)), 280)
    assert overall["unparsed_rate"] == 7 / 280
    assert "partial" not in overall
    assert summary["compat/overall"]["accuracy"] >= overall["accuracy"]
    some = {row["split"]: row for row in MmluPro().summary(rows[:3])}
    assert (some["overall"]["accuracy"], some["overall"]["partial"]) == (None, True)
    assert some["overall"]["not_run"] == list(CATEGORIES[3:])
    assert MmluPro().summary([]) == []


@pytest.mark.slow
def test_a_tiny_checkpoint_is_evaluated_on_every_category(shared_data: Path, checkpoint: Path, tmp_path: Path) -> None:
    config = EvaluationConfig(
        benchmarks=("mmlu_pro",),
        mmlu_pro_items_per_category=2,
        mmlu_pro_completion_length=16,
        benchmark_data=shared_data,
    )
    manifest = evaluate(checkpoint, None, tmp_path / "out", config)
    items = read_items(tmp_path / "out" / "items.parquet")
    rows = {row["split"]: row for row in json.loads((tmp_path / "out" / "scores.json").read_text("utf-8"))}
    assert manifest.counts["parts"] == [f"mmlu_pro/{name}" for name in CATEGORIES]
    assert len(items) == 28
    assert set(rows) == {*CATEGORIES, "overall", *(f"compat/{name}" for name in (*CATEGORIES, "overall"))}
    # A byte is a token here and the context 4,096 of them: five exemplars fit hardly anywhere.
    assert sum(rows[name]["shortened"] for name in CATEGORIES) > 14
    assert all(item.prompt_tokens + 16 < 4096 for item in items if item.finish != "no_room")
    assert rows["overall"]["items"] == 28
