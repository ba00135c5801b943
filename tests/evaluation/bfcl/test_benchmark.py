"""BFCL from completions to rows, with answers that are known to be right or wrong."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from awpo.config import EvaluationConfig
from evaluation.bfcl.averages import MULTI_TURN
from evaluation.bfcl.benchmark import BfclV3, BfclV4, evaluate_category, summary_rows, verdicts
from evaluation.bfcl.data import read_category
from evaluation.bfcl.golds import completion_text, reference_calls, reference_turns
from evaluation.bfcl.package import INSTALL
from evaluation.bfcl.process import CheckerProcess
from evaluation.bfcl.tools import tools
from evaluation.bfcl.versions import V3, V4
from evaluation.generate import Finish, Generated, Question, Sampling

needs_package = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason=f"needs: {INSTALL}")


def block(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


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
    """Reported by others: a silent model scores on irrelevance."""
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


@needs_package
def test_java_is_asked_for_and_checked_as_java(answering: Callable[..., Any]) -> None:
    items = [item for item in read_category("java") if item.id in ("java_1", "java_6")]
    asked: list[Question] = []

    def say(question: Question, sample: int) -> str:
        asked.append(question)
        item = next(item for item in items if item.turns[0] == question.messages)
        return completion_text(reference_calls(item))

    found, (row,) = evaluate_category(answering(say), items, EvaluationConfig(), available=100)
    assert "Java 8 SDK syntax" in asked[0].tools[0].description
    assert [item.correct for item in found] == [True, True]
    assert row["accuracy"] == 1.0


@needs_package
def test_conversations_become_items_with_all_their_turns(answering: Callable[..., Any]) -> None:
    """The reference as a model that sees results: each question is answered by what was said so far."""
    items = [read_category("multi_turn_miss_func")[3], read_category("multi_turn_miss_func")[0]]
    script = {item.id: [completion_text(calls) if calls else "" for calls in reference_turns(item)] for item in items}

    def say(question: Question, sample: int) -> str:
        item = next(item for item in items if item.turns[0][0] in question.messages)
        turn = sum(message.role == "user" for message in question.messages) - 1
        return script[item.id][turn] if question.messages[-1].role == "user" else "<think>\nx\n</think>\n\nDone."

    found, (row,) = evaluate_category(answering(say), items, EvaluationConfig(), available=200)
    assert [(item.correct, item.detail) for item in found] == [(True, "")] * 2
    first = json.loads(found[0].completion)
    assert len(first) == len(items[0].turns)
    assert first[0][0] == script[items[0].id][0]
    answers = sum(map(len, first))
    assert found[0].response_tokens == 5 * answers
    assert found[0].prompt_hash == Question(items[0].turns[0], tools(items[0].functions, "Python")).hash
    assert len(json.loads(found[0].calls)) == sum(len(calls) for calls in reference_turns(items[0]))
    assert (row["accuracy"], row["items"], row["checker_failures"]) == (1.0, 2, 0)
    assert "20 steps a turn" in row["protocol"]
    assert "files and processes refused" in row["isolation"]


@needs_package
def test_answers_that_did_not_come_are_not_scored(answering: Callable[..., Any]) -> None:
    for category in ("irrelevance", "multi_turn_base"):
        items = read_category(category)[:3]
        found, rows = evaluate_category(answering(lambda q, s: "", "failed"), items, EvaluationConfig(), available=9)
        assert [item.correct for item in found] == [None] * 3
        assert rows == []
        assert summary_rows(rows) == []


@needs_package
def test_a_history_that_fills_the_context_is_a_wrong_answer(answering: Callable[..., Any]) -> None:
    items = read_category("multi_turn_base")[:1]
    (found,), _ = evaluate_category(answering(lambda q, s: "", "no_room"), items, EvaluationConfig(), available=200)
    assert (found.correct, found.finish, found.error_type) == (False, "no_room", "no_room")


@needs_package
@pytest.mark.parametrize(
    ("finish", "verdict", "error"), [("failed", None, "request_failed"), ("no_room", False, "no_room")]
)
def test_how_a_conversation_ended_is_told_though_an_answer_before_was_cut_off(
    finish: Finish, verdict: bool | None, error: str
) -> None:
    class Generator:
        identity: Mapping[str, Any] = {"model": "made"}
        asked = 0

        def answer(self, questions: Sequence[Question], sampling: Sampling, **_: Any) -> list[list[Generated]]:
            self.asked += 1
            return [
                [Generated("I see.", 2, "length") if self.asked == 1 else Generated("", 0, finish)] for _ in questions
            ]

        def room(self, question: Question) -> None:
            return None

    items = read_category("multi_turn_base")[:1]
    (found,), _ = evaluate_category(Generator(), items, EvaluationConfig(), available=200)
    assert (found.correct, found.error_type, found.finish) == (verdict, error, finish)


@needs_package
def test_stored_texts_are_scored_as_they_were_when_generated(answering: Callable[..., Any]) -> None:
    item = read_category("multi_turn_base")[0]
    turns = reference_turns(item)

    def say(question: Question, sample: int) -> str:
        turn = sum(message.role == "user" for message in question.messages) - 1
        return completion_text(turns[turn]) if question.messages[-1].role == "user" else "Done."

    (found,), _ = evaluate_category(answering(say), [item], EvaluationConfig(), available=200)
    texts = json.loads(found.completion)
    with CheckerProcess() as checker:
        right, wrong = verdicts(checker, [(item, texts), (item, [*texts[:-1], ["Done."]])])
    assert found.correct is right.valid is True
    assert not wrong.valid


def rows(accuracy: dict[str, float], **fields: Any) -> list[dict[str, Any]]:
    rest = {"low": 0.0, "high": 1.0, "items": 30, "dialogues": 30, "effective_items": 30.0}
    rest |= {"empty_rate": 0.0, "response_tokens": 1.0}
    return [
        {"benchmark": "bfcl_v3", "split": name, "mode": "greedy", "group": "all", "accuracy": share, **rest}
        | {"cut_rate": 0.0, "available": 200, "seconds": 1.0}
        | fields.get(name, {})
        for name, share in accuracy.items()
    ]


def test_averages_have_an_interval_and_what_they_are_made_of() -> None:
    accuracy = dict.fromkeys(V3.categories, 0.5)
    found = {row["split"]: row for row in summary_rows(rows(accuracy))}
    assert len(found) == 8
    overall = found["Overall Acc"]
    assert overall["accuracy"] == pytest.approx(0.5)
    assert 0.4 < overall["low"] < 0.5 < overall["high"] < 0.6
    assert (overall["items"], overall["available"], overall["group"]) == (17 * 30, 17 * 200, "average")
    assert sorted(overall["categories"]) == sorted(V3.categories)
    assert "partial" not in overall


def test_questions_about_one_memory_make_the_interval_wide() -> None:
    """Each counts by its effective number of items, not by its items."""
    accuracy = dict.fromkeys(V4.categories, 0.5)
    few = {name: {"effective_items": 5.0, "dialogues": 5} for name in V4.agentic}
    plain, wide = (
        {row["split"]: row for row in summary_rows(found, V4)} for found in (rows(accuracy), rows(accuracy, **few))
    )
    for name in ("Memory Acc", "Overall Acc"):
        assert wide[name]["accuracy"] == plain[name]["accuracy"]
        assert wide[name]["high"] - wide[name]["low"] > 1.3 * (plain[name]["high"] - plain[name]["low"])
    assert wide["Live Acc"] == plain["Live Acc"]


def test_live_is_weighted_by_size_even_where_a_slice_was_run() -> None:
    accuracy = dict.fromkeys(V3.categories, 0.0) | {"simple": 1.0, "live_simple": 1.0}
    sizes = {"live_simple": {"available": 258}, "live_multiple": {"available": 1053}}
    found = {row["split"]: row["accuracy"] for row in summary_rows(rows(accuracy, **sizes))}
    assert found["Non-Live Simple AST"] == pytest.approx(1 / 3)
    assert found["Non-Live AST Acc"] == pytest.approx(1 / 12)
    assert found["Live AST Summary"] == pytest.approx(258 / (258 + 1053 + 400))


def test_an_average_with_a_category_missing_is_partial_and_has_no_value() -> None:
    """gorilla#827: which averages are weighted."""
    accuracy = dict.fromkeys([name for name in V3.categories if not name.startswith("multi_turn_miss")], 1.0)
    found = {row["split"]: row for row in summary_rows(rows(accuracy, java={"partial": True, "missing": 3}))}
    lacking = ["multi_turn_miss_func", "multi_turn_miss_param"]
    for name, not_run, missing in (
        ("Overall Acc", lacking, {"java": 3}),
        ("Multi Turn Acc", lacking, {}),
        ("Non-Live Simple AST", [], {"java": 3}),
    ):
        row = found[name]
        assert (row["accuracy"], row["low"], row["high"], row["partial"]) == (None, None, None, True)
        assert (row["not_run"], row["missing"]) == (not_run, missing)
    assert found["Live Acc"]["accuracy"] == 1.0
    assert summary_rows([]) == []


@needs_package
@pytest.mark.parametrize(("turns", "count"), [("all", 17), ("one", 13), ("several", 4)])
def test_categories_of_one_turn_and_of_several_are_run_alone_on_request(turns: str, count: int) -> None:
    config = EvaluationConfig.read({"bfcl_turns": turns, "bfcl_items_per_category": 2}, "the test")
    parts, _ = BfclV3().parts(None, config)
    assert len(parts) == count
    assert {part.size for part in parts} == {2}
    several = [part.name for part in parts if "multi_turn" in part.name]
    assert len(several) == (0 if turns == "one" else 4)


@pytest.mark.usefixtures("v4")
def test_version_4_says_what_it_cannot_run_and_its_total_is_partial() -> None:
    config = EvaluationConfig.read({"bfcl_items_per_category": 2}, "the test")
    benchmark = BfclV4()
    parts, cannot = benchmark.parts(None, config)
    assert [part.name for part in parts][:3] == [f"bfcl_v4/simple_{name}" for name in ("python", "java", "javascript")]
    assert set(cannot) == {"bfcl_v4/web_search_base", "bfcl_v4/web_search_no_snippet", "bfcl_v4/memory_vector"}
    assert "SerpAPI" in cannot["bfcl_v4/web_search_base"]
    assert "all-MiniLM-L6-v2" in cannot["bfcl_v4/memory_vector"]
    assert len(parts) == 19
    run = [part.name.partition("/")[2] for part in parts]
    its = [row | {"benchmark": "bfcl_v4"} for row in rows(dict.fromkeys(run, 0.5))]
    found = {row["split"]: row for row in benchmark.summary(its)}
    assert {row["benchmark"] for row in found.values()} == {"bfcl_v4"}
    partial = {name: row["not_run"] for name, row in found.items() if row.get("partial")}
    assert partial == {
        "Overall Acc": ["web_search_base", "web_search_no_snippet", "memory_vector"],
        "Agentic Overall Acc": ["web_search_base", "web_search_no_snippet", "memory_vector"],
        "Memory Acc": ["memory_vector"],
    }
    assert all(found[name]["accuracy"] is None for name in partial)
    assert found["Multi Turn Acc"]["accuracy"] == found["Live Acc"]["accuracy"] == pytest.approx(0.5)


@pytest.mark.usefixtures("v4")
def test_version_4_of_several_turns_has_memory_and_web_search() -> None:
    config = EvaluationConfig.read({"bfcl_turns": "several", "bfcl_items_per_category": 1}, "the test")
    parts, cannot = BfclV4().parts(None, config)
    several = [*MULTI_TURN, "memory_kv", "memory_rec_sum"]
    assert [part.name for part in parts] == [f"bfcl_v4/{name}" for name in several]
    assert len(cannot) == 3


@pytest.mark.usefixtures("v4")
def test_version_4_scores_by_its_own_release(answering: Callable[..., Any]) -> None:
    """The whole way, with a call that cannot be read beside the right ones: version 3 would take none of them."""
    (item,) = read_category("simple_java", V4)[:1]
    answer = f"{completion_text(reference_calls(item))}\n<tool_call>\nbroken\n</tool_call>"
    (found,), (row,) = evaluate_category(answering(lambda q, s: answer), [item], EvaluationConfig(), available=100)
    assert (found.correct, found.benchmark, found.source, found.item_id) == (
        True,
        "bfcl_v4",
        "bfcl-v4",
        "simple_java_0",
    )
    assert "bfcl-eval 2026.3.23" in row["protocol"]
    (twin,) = read_category("java")[:1]
    assert twin.turns == item.turns
    (found,), _ = evaluate_category(answering(lambda q, s: answer), [twin], EvaluationConfig(), available=100)
    assert not found.correct


@pytest.mark.usefixtures("v4")
def test_stored_web_searches_are_scored_by_their_last_words(checker_v4: CheckerProcess) -> None:
    (item,) = read_category("web_search_base", V4)[:1]
    assert item.answer == ["Zhang Yiming"]
    search = block("search_engine_query", {"keywords": "tea"})
    outputs: dict[str, list[list[str]]] = {
        "": [[search, "<think>\nx\n</think>\n\n{'answer': 'zhang, yiming', 'context': 'x'}"]],
        "agentic:answer_not_found": [["It is Zhang Yiming.", "I do not know."]],
        "agentic:no_last_message": [[search, search]],
    }
    found = verdicts(checker_v4, [(item, output) for output in outputs.values()])
    assert [verdict.error_type for verdict in found] == list(outputs)
    thought = verdicts(checker_v4, [(item, [["<think>\nZhang Yiming\n</think>\n\nNobody."]])])
    assert not thought[0].valid
