"""BFCL from completions to rows, with answers that are known to be right or wrong."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from typing import Any

import pytest

from awpo.chat import parse_completion
from awpo.config import EvaluationConfig
from evaluation.bfcl.benchmark import decoded_calls, evaluate_category, summary_rows
from evaluation.bfcl.data import INSTALL, LIVE_AST, NON_LIVE_AST, read_category
from evaluation.generate import Question

needs_package = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason=f"needs: {INSTALL}")


def block(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_calls_are_decoded_as_the_official_handler_does() -> None:
    two = block("geo.find", {"a": 1.5}) + "\n" + block("f", {})
    assert decoded_calls(parse_completion("<think>\nx\n</think>\n\n" + two)) == [{"geo.find": {"a": 1.5}}, {"f": {}}]
    assert decoded_calls(parse_completion(two + "\n<tool_call>\n{broken\n</tool_call>")) == []
    assert decoded_calls(parse_completion("Just words.")) == []


@needs_package
def test_parallel_calls_in_any_order_are_correct(answering: Callable[..., Any]) -> None:
    """The whole way: prompt with the tools, answer as text, parser, official checker, items and row."""
    item = read_category("parallel")[0]
    calls = [
        ("spotify.play", {"artist": "Maroon 5", "duration": 15}),
        ("spotify.play", {"artist": "Taylor Swift", "duration": 20}),
    ]
    asked: list[Question] = []

    def say(question: Question, sample: int) -> str:
        asked.append(question)
        return "\n".join(block(*call) for call in calls)

    (found,), (row,) = evaluate_category(answering(say), [item], EvaluationConfig(), available=200)
    assert [tool.name for tool in asked[0].tools] == ["spotify.play"]
    assert (found.correct, found.item_id, found.split, found.kind) == (True, "parallel_0", "parallel", "call")
    assert (row["accuracy"], row["items"], row["available"], row["checker_failures"]) == (1.0, 1, 200, 0)
    assert "bfcl-eval 2025.8.6.2" in row["protocol"]


@needs_package
def test_a_silent_model_scores_on_irrelevance_and_the_row_shows_why(answering: Callable[..., Any]) -> None:
    items = read_category("irrelevance")[:5]
    _, (silent,) = evaluate_category(answering(lambda i, s: ""), items, EvaluationConfig(), available=240)
    _, (talking,) = evaluate_category(answering(lambda i, s: "I cannot."), items, EvaluationConfig(), available=240)
    assert (silent["accuracy"], silent["empty_rate"]) == (1.0, 1.0)
    assert (talking["accuracy"], talking["empty_rate"]) == (1.0, 0.0)


@needs_package
def test_the_reason_of_a_wrong_answer_is_kept(answering: Callable[..., Any]) -> None:
    def answer(question: Question, sample: int) -> str:
        return block(question.tools[0].name, {"base": 10})

    (found,), _ = evaluate_category(answering(answer), read_category("simple")[:1], EvaluationConfig(), available=400)
    assert not found.correct
    assert "missing_required" in found.detail
    assert "height" in found.detail


def rows(accuracy: dict[str, float], sizes: dict[str, int]) -> list[dict[str, Any]]:
    rest = {"low": 0.0, "high": 1.0, "items": 30, "dialogues": 30, "empty_rate": 0.0, "response_tokens": 1.0}
    return [
        {"benchmark": "bfcl_v3", "split": name, "mode": "greedy", "group": "all", "accuracy": share, **rest}
        | {"cut_rate": 0.0, "available": sizes.get(name, 200), "seconds": 1.0}
        for name, share in accuracy.items()
    ]


def test_live_is_weighted_by_size_and_non_live_is_not() -> None:
    accuracy = dict.fromkeys((*NON_LIVE_AST, *LIVE_AST), 0.0) | {"simple": 1.0, "live_simple": 1.0}
    sizes = {
        "simple": 400,
        "live_simple": 258,
        "live_multiple": 1053,
        "live_parallel": 16,
        "live_parallel_multiple": 24,
    }
    averages = {row["split"]: row for row in summary_rows(rows(accuracy, sizes))}
    assert averages["non_live_ast (python)"]["accuracy"] == pytest.approx(0.25)
    assert averages["live_ast (python)"]["accuracy"] == pytest.approx(258 / 1351)
    assert averages["live_ast (python)"]["items"] == 120


def test_an_average_with_a_category_missing_is_not_given() -> None:
    accuracy = dict.fromkeys((*NON_LIVE_AST[1:], *LIVE_AST), 1.0)
    assert [row["split"] for row in summary_rows(rows(accuracy, {}))] == ["live_ast (python)"]
    assert summary_rows([]) == []
