"""API-Bank from questions to rows: reference answers, made answers, and a tiny checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from awpo.config import EvaluationConfig
from awpo.errors import UserError
from evaluation.api_bank.benchmark import ApiBank, evaluate_level, reference_text
from evaluation.api_bank.data import DIALOGUES, FILES, TOOLRL, read_level
from evaluation.benchmarks import get_benchmark
from evaluation.generate import Question
from evaluation.golds import gold_report
from evaluation.items import read_items
from evaluation.run import evaluate
from evaluation.statistics import wilson

SIZES = {(TOOLRL, 1): 399, (TOOLRL, 2): 67, (TOOLRL, 3): 131, (DIALOGUES, 1): 399, (DIALOGUES, 2): 135}


def test_every_reference_answer_is_a_hit_in_every_protocol(shared_data: Path) -> None:
    report = gold_report("api_bank", get_benchmark("api_bank").gold_verdicts(shared_data, EvaluationConfig()))
    assert report["failed"] == []
    assert report["splits"] == {
        f"{protocol}/level-{level}": {"items": size, "valid": size}
        for (prompts, level), size in SIZES.items()
        for protocol in (("toolrl-compat", "toolrl-strict") if prompts == TOOLRL else ("dialogues",))
    }
    assert report["valid"] == 2 * 597 + 534


def test_the_questions_are_the_files_own_words(shared_data: Path) -> None:
    for (prompts, level), file in FILES.items():
        rows = json.loads((shared_data / file.name).read_text("utf-8"))
        system, user = ("system", "user") if prompts == TOOLRL else ("instruction", "input")
        for item, row in zip(read_level(prompts, level, shared_data), rows, strict=True):
            assert [message.role for message in item.question.messages] == ["system", "user"]
            assert [message.content.strip() for message in item.question.messages if message.content] == [
                row[system].strip(),
                row[user].strip(),
            ]
            assert item.question.tools == ()
    assert read_level(TOOLRL, 2, shared_data)[66].id == "Level2_66"


def test_one_answer_gets_both_verdicts(shared_data: Path, answering: Callable[..., Any]) -> None:
    """Reported by others: API-Bank's protocols differ."""
    items = read_level(TOOLRL, 3, shared_data)[:4]
    extra = '\n{"name": "Other", "parameters": {}}\n</tool_call>'
    texts = {item.question.hash: reference_text(TOOLRL, item) for item in items}
    texts[items[1].question.hash] = texts[items[1].question.hash].replace("\n</tool_call>", extra)
    texts[items[2].question.hash] = "No."

    def say(question: Question, sample: int) -> str:
        return texts[question.hash]

    found, (compat, strict) = evaluate_level(answering(say), TOOLRL, 3, items, EvaluationConfig())
    assert [(item.split, item.correct, item.error_type) for item in found] == [
        ("toolrl-compat/level-3", True, ""),
        ("toolrl-compat/level-3", True, ""),
        ("toolrl-compat/level-3", False, "no_call"),
        ("toolrl-compat/level-3", True, ""),
        ("toolrl-strict/level-3", True, ""),
        ("toolrl-strict/level-3", False, "extra_call"),
        ("toolrl-strict/level-3", False, "no_call"),
        ("toolrl-strict/level-3", True, ""),
    ]
    assert (compat["accuracy"], strict["accuracy"]) == (0.75, 0.5)
    assert "published scoring" in compat["protocol"]
    assert found[0].dialogue_id == found[1].dialogue_id == "level-3-sample-0"


def test_a_call_in_a_thought_is_not_the_dialogues_answer(shared_data: Path, answering: Callable[..., Any]) -> None:
    items = read_level(DIALOGUES, 1, shared_data)[:1]
    text = f"<think>\n[Calculator(formula='1')]?\n</think>\n\n{reference_text(DIALOGUES, items[0])}"
    (item,), (row,) = evaluate_level(answering(lambda question, sample: text), DIALOGUES, 1, items, EvaluationConfig())
    assert (item.correct, item.split, row["split"]) == (True, "dialogues/level-1", "dialogues/level-1")


def scored(split: str, correct: int, items: int) -> dict[str, Any]:
    numbers = {"accuracy": correct / items, "items": items, "available": items, "dialogues": items}
    rates = {
        "effective_items": float(items),
        "empty_rate": 0.0,
        "response_tokens": 9.0,
        "cut_rate": 0.0,
        "seconds": 1.0,
    }
    head = {"benchmark": "api_bank", "split": split, "mode": "greedy", "group": "all", "protocol": "p"}
    return head | numbers | rates


def test_the_total_is_pooled_over_levels_and_partial_without_one() -> None:
    """The paper's AWPO row of Qwen3-8B: 331 of 466 on levels 1 and 2, 73 of 131 on level 3, 67.67% overall."""
    rows = [
        scored("toolrl-compat/level-1", 300, 399),
        scored("toolrl-compat/level-2", 31, 67),
        scored("toolrl-compat/level-3", 73, 131),
        scored("toolrl-strict/level-1", 100, 399),
        scored("dialogues/level-2", 27, 135),
    ]
    totals = {row["split"]: row for row in ApiBank().summary(rows)}
    assert list(totals) == ["toolrl-compat/overall", "toolrl-strict/overall", "dialogues/overall"]
    compat = totals["toolrl-compat/overall"]
    assert (compat["items"], round(100 * compat["accuracy"], 2), "partial" in compat) == (597, 67.67, False)
    assert (compat["low"], compat["high"]) == wilson(404, 597)
    strict = totals["toolrl-strict/overall"]
    assert (strict["accuracy"], strict["partial"]) == (None, True)
    assert strict["not_run"] == ["toolrl-strict/level-2", "toolrl-strict/level-3"]
    assert totals["dialogues/overall"]["not_run"] == ["dialogues/level-1"]


def test_a_file_of_other_items_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FILES[TOOLRL, 1].name
    path.parent.mkdir()
    path.write_text("[]", "utf-8")
    with pytest.raises(UserError, match="is not the benchmark's file"):
        read_level(TOOLRL, 1, tmp_path)


@pytest.mark.slow
def test_a_tiny_checkpoint_is_evaluated_on_every_level(shared_data: Path, checkpoint: Path, tmp_path: Path) -> None:
    config = EvaluationConfig(
        benchmarks=("api_bank",), api_bank_items_per_level=2, max_completion_length=12, benchmark_data=shared_data
    )
    manifest = evaluate(checkpoint, None, tmp_path / "out", config)
    items = read_items(tmp_path / "out" / "items.parquet")
    rows = json.loads((tmp_path / "out" / "scores.json").read_text("utf-8"))
    assert manifest.counts["parts"] == [f"api_bank/{prompts}/level-{level}" for prompts, level in FILES]
    assert len(items) == 2 * (3 * 2 + 2)
    assert [row["split"] for row in rows if row["group"] == "average"] == [
        "toolrl-compat/overall",
        "toolrl-strict/overall",
        "dialogues/overall",
    ]
    answered = [item for item in items if item.finish != "no_room"]
    assert answered
    assert all(item.completion and item.response_tokens <= 12 for item in answered)
    assert not any(item.correct for item in items)  # untrained weights do not call tools
