"""The endpoint judge against a real server."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path
from typing import Any

import pytest

import awpo.endpoint
import awpo.judge_endpoint
from awpo.config import EndpointConfig, JudgeConfig
from awpo.endpoint_answers import EndpointError
from awpo.errors import UserError
from awpo.judge import grade, make_judge
from awpo.judge_endpoint import EndpointJudge
from awpo.judge_prompts import (
    CRITERIA,
    RESPONSE_FORMAT,
    read_grades,
)
from awpo.judge_rubric import RubricJudge
from awpo.judgement import Judgement
from awpo.types import Completion
from tests.awpo.judge_cases import ALARM, CASES, calls, grades, instance


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awpo.endpoint, "FIRST_PAUSE", 0.001)


def endpoint_judge(url: str, endpoint: dict[str, Any] | None = None, **settings: Any) -> EndpointJudge:
    config = {"base_url": url, "model": "grader", "timeout_seconds": 5, "attempts": 2, **(endpoint or {})}
    judge = make_judge(JudgeConfig(kind="endpoint", endpoint=EndpointConfig(**config), **settings))
    assert isinstance(judge, EndpointJudge)
    return judge


def items(*thoughts: str | None) -> list[Judgement]:
    target, rationale = CASES["call"]
    return [Judgement(instance(target, rationale), Completion(thought, (ALARM,), "")) for thought in thoughts]


def score(judge: EndpointJudge, *thoughts: str | None) -> list[float]:
    return asyncio.run(judge.score(items(*thoughts)))


def thought_of(body: dict[str, Any]) -> str:
    return body["messages"][1]["content"].split("<<<thought ")[1].split("\n", 1)[1].split("\nthought ")[0]


def test_scores_come_back_in_order(serve: Any) -> None:
    def reply(number: int, body: dict[str, Any]) -> Any:
        value = int(thought_of(body))
        return serve.answer(grades(value, value, value))

    server = serve(reply)
    judge = endpoint_judge(server.url)
    assert score(judge, "3", "10", "0", "7") == pytest.approx([0.3, 1, 0, 0.7])
    assert (judge.judged, judge.failures, judge.last_error) == (4, 0, None)
    assert all(body["model"] == "grader" and body["response_format"] == RESPONSE_FORMAT for body in server.requests)


def test_no_thought_is_worthless_without_asking(serve: Any) -> None:
    server = serve(lambda number, body: serve.answer(grades(9, 9, 9)))
    assert score(endpoint_judge(server.url), None, "", " \n") == [0, 0, 0]
    assert server.requests == []


def test_the_same_question_is_asked_once(serve: Any) -> None:
    server = serve(lambda number, body: serve.answer(grades(number, number, number)))
    judge = endpoint_judge(server.url)
    assert score(judge, "a", "a", "a") == [0, 0, 0]
    assert score(judge, "a") == [0]
    assert len(server.requests) == 1
    assert score(judge, "a", "b") == pytest.approx([0, 0.1])
    assert len(server.requests) == 2


def test_the_first_request_leaves_before_the_last_prompt_is_rendered(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To render all prompts of a large batch first would keep the server waiting."""
    rendered: list[int] = []
    seen: list[int] = []
    render = awpo.judge_endpoint.judge_messages

    def counted(*arguments: Any, **options: Any) -> Any:
        rendered.append(1)
        return render(*arguments, **options)

    def reply(number: int, body: dict[str, Any]) -> Any:
        seen.append(len(rendered))
        return serve.answer(grades(9, 9, 9))

    monkeypatch.setattr(awpo.judge_endpoint, "judge_messages", counted)
    judge = endpoint_judge(serve(reply).url, {"concurrency": 2})
    assert score(judge, *map(str, range(100))) == pytest.approx([0.9] * 100)
    assert seen[0] <= 8
    assert len(rendered) == 100


def test_the_cache_is_bounded(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awpo.judge_endpoint, "MOST_CACHED", 2)
    server = serve(lambda number, body: serve.answer(grades(9, 9, 9)))
    judge = endpoint_judge(server.url)
    for thought in ("a", "b", "c"):  # one after the other, so that it is certain which is the oldest
        assert score(judge, thought) == pytest.approx([0.9])
    score(judge, "b", "c")
    assert len(server.requests) == 3
    score(judge, "a")
    assert len(server.requests) == 4


def test_failures_are_nan_are_counted_and_not_remembered(serve: Any) -> None:
    """Reported by others: a parse failure is scored 0."""
    broken = True

    def reply(number: int, body: dict[str, Any]) -> Any:
        if not broken or thought_of(body) == "good":
            return serve.answer(grades(9, 9, 9))
        return {
            "error": lambda: serve.refusal(500),
            "words": lambda: serve.answer("A fine thought!"),
            "range": lambda: serve.answer(grades(9, 9, 99)),
            "garbage": lambda: (200, {}, b"<html>"),
            "silence": lambda: serve.answer(None),
        }[thought_of(body)]()

    server = serve(reply)
    judge = endpoint_judge(server.url)
    thoughts = ("good", "error", "words", "range", "garbage", "silence")
    first, *rest = score(judge, *thoughts)
    assert first == pytest.approx(0.9)
    assert all(map(math.isnan, rest))
    assert (judge.judged, judge.failures, judge.batch_judged, judge.batch_failures) == (6, 5, 6, 5)
    assert judge.last_error
    broken = False
    assert score(judge, *thoughts) == pytest.approx([0.9] * 6)
    assert (judge.judged, judge.failures, judge.batch_failures) == (12, 5, 0)


def test_too_many_failures_stop_the_run_with_a_line_that_says_why(serve: Any) -> None:
    """Reported by others: a parse failure is scored 0."""
    server = serve(lambda number, body: serve.answer("9!" if int(thought_of(body)) < 5 else grades(9, 9, 9)))
    numbers = [str(n) for n in range(8)]
    judge = endpoint_judge(server.url, failure_limit=0.5)
    with pytest.raises(UserError, match=r"grader failed on 5 of 8 .*failure_limit 0\.5.*without readable scores: '9!'"):
        score(judge, *numbers)
    assert judge.failures == 5
    assert sum(map(math.isnan, score(judge, *numbers[:7]))) == 5  # a small batch stops nothing
    allowed = endpoint_judge(server.url, failure_limit=5 / 8)
    assert sum(map(math.isnan, score(allowed, *numbers))) == 5  # at the limit, not past it


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_no_request_can_survive_is_told_at_once(serve: Any, status: int) -> None:
    server = serve(lambda number, body: serve.refusal(status, "no way"))
    judge = endpoint_judge(server.url, {"concurrency": 1})
    with pytest.raises(EndpointError, match="no way"):
        score(judge, *map(str, range(50)))
    assert len(server.requests) < 10


@pytest.mark.parametrize("status", [400, 422])
def test_a_server_without_response_format_is_asked_without(serve: Any, status: int) -> None:
    def reply(number: int, body: dict[str, Any]) -> Any:
        if "response_format" in body:
            return serve.refusal(status, "unknown field response_format")
        return serve.answer(f"Sure: {grades(8, 8, 8)}")

    server = serve(reply)
    judge = endpoint_judge(server.url)
    assert score(judge, "a") == score(judge, "b") == pytest.approx([0.8])
    assert ["response_format" in body for body in server.requests] == [True, False, False]


def test_a_request_that_is_refused_either_way_is_a_failure_of_its_own(serve: Any) -> None:
    server = serve(
        lambda number, body: (
            serve.refusal(400, "too long") if thought_of(body) == "a" else serve.answer(grades(8, 8, 8))
        )
    )
    judge = endpoint_judge(server.url)
    assert math.isnan(score(judge, "a")[0])
    assert "too long" in str(judge.last_error)
    score(judge, "b")
    assert "response_format" in server.requests[-1]  # it was not the schema's fault


def test_the_deadline_holds_for_the_batch(serve: Any) -> None:
    release = threading.Event()

    def reply(number: int, body: dict[str, Any]) -> Any:
        if thought_of(body) == "slow":
            release.wait(20)
        return serve.answer(grades(9, 9, 9))

    judge = endpoint_judge(serve(reply).url, {"timeout_seconds": 60}, deadline_seconds=0.5)
    try:
        quick, slow = score(judge, "quick", "slow")
    finally:
        release.set()
    assert quick == pytest.approx(0.9)
    assert math.isnan(slow)
    assert "deadline of 0.5 s" in str(judge.last_error)
    assert score(judge, "slow") == pytest.approx([0.9])


@pytest.mark.parametrize(("first", "asked", "result"), [(8, 1, 0.8), (5, 1, 0.5), (4, 2, 0.1)])
def test_two_passes_show_the_reference_after_a_low_first_score(
    serve: Any, first: int, asked: int, result: float
) -> None:
    def reply(number: int, body: dict[str, Any]) -> Any:
        value = 1 if "<<<reference rationale" in body["messages"][1]["content"] else first
        return serve.answer(grades(value, value, value))

    server = serve(reply)
    [found] = asyncio.run(endpoint_judge(server.url, two_pass=True).grade(items("a")))
    assert found.score == pytest.approx(result)
    assert [answer.with_reference for answer in found.answers] == [False, True][:asked]
    assert len(server.requests) == asked


def test_an_instance_without_a_rationale_is_judged_without_one(serve: Any) -> None:
    server = serve(lambda number, body: serve.answer(grades(2, 2, 2)))
    judge = endpoint_judge(server.url, two_pass=True)
    item = Judgement(instance(calls(ALARM), None), Completion("x", (ALARM,), ""))
    assert asyncio.run(judge.score([item])) == pytest.approx([0.2])
    assert len(server.requests) == 1


def test_an_empty_batch(serve: Any) -> None:
    judge = endpoint_judge(serve(lambda number, body: serve.answer()).url)
    assert asyncio.run(judge.score([])) == []


def test_the_settings_choose_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_judge(JudgeConfig()), RubricJudge)
    monkeypatch.delenv("NO_KEY", raising=False)
    endpoint = EndpointConfig(base_url="https://judge.example.com/v1", model="m", api_key_variable="NO_KEY")
    with pytest.raises(UserError, match="NO_KEY"):
        make_judge(JudgeConfig(kind="endpoint", endpoint=endpoint))


def test_the_rubric_is_a_judge_too() -> None:
    thoughts = (CASES["call"][1], None)
    assert asyncio.run(RubricJudge().score(items(*thoughts))) == pytest.approx([1, 0])


def test_criteria_come_with_the_score(serve: Any) -> None:
    server = serve(lambda number, body: serve.answer(grades(9, 6, 3)))
    judge = endpoint_judge(server.url)
    found, none = asyncio.run(grade(judge, items("a", None)))
    assert found.score == pytest.approx(0.6)
    assert found.criteria == pytest.approx({"coherence": 0.9, "correctness": 0.6, "appropriateness": 0.3})
    assert found.samples == pytest.approx((0.6,))
    assert (none.score, none.criteria) == (0, dict.fromkeys(CRITERIA, 0))
    [rubric_grades] = asyncio.run(grade(RubricJudge(), items("set_alarm: time 7:30")))
    assert rubric_grades.criteria == pytest.approx({"coherence": 1, "correctness": 4 / 7, "appropriateness": 1})
    assert rubric_grades.score == pytest.approx(0.3 + 0.4 * 4 / 7 + 0.3)
    drawn = make_judge(JudgeConfig(kind="correlated", correlation=0.5))
    [grades_of_none] = asyncio.run(grade(drawn, items("a")))
    assert (grades_of_none.criteria, math.isnan(grades_of_none.score)) == ({}, False)
    assert read_grades("no") is None


def test_several_samples_are_averaged_and_failed_ones_left_out(serve: Any) -> None:
    answers = [grades(10, 10, 10), "what?", grades(4, 4, 7), grades(0, 0, 0)]
    server = serve(lambda number, body: serve.answer(answers[number]))
    judge = endpoint_judge(server.url, {"temperature": 1.0, "concurrency": 1}, samples=3)
    [found] = asyncio.run(judge.grade(items("a")))
    assert found.score == pytest.approx((1 + 0.5) / 2)
    assert found.criteria == pytest.approx({"coherence": 0.7, "correctness": 0.7, "appropriateness": 0.85})
    assert [None if math.isnan(one) else round(one, 3) for one in found.samples] == [1.0, None, 0.5]
    assert (judge.judged, judge.failures) == (1, 0)
    assert len(server.requests) == 3
    assert [answer.text for answer in found.answers] == answers[:3]
    assert [bool(answer.failure) for answer in found.answers] == [False, True, False]
    assert all(answer.prompt_tokens > 0 and answer.seconds > 0 and not answer.cached for answer in found.answers)
    assert judge.metrics()["requests"] == 3


def test_samples_that_would_all_be_the_same_are_refused() -> None:
    endpoint = {"base_url": "http://localhost/v1", "model": "m"}
    with pytest.raises(UserError, match="samples = 2 at temperature 0 are the same answer 2 times"):
        JudgeConfig.read({"kind": "endpoint", "endpoint": endpoint, "samples": 2}, "test")
    with pytest.raises(UserError, match="samples = 2 asks a model several times"):
        JudgeConfig.read({"samples": 2}, "test")


def test_another_run_asks_nothing_again_but_another_draw_does(serve: Any, tmp_path: Path) -> None:
    server = serve(lambda number, body: serve.answer(grades(number, number, number)))
    config = JudgeConfig(
        kind="endpoint",
        endpoint=EndpointConfig(base_url=server.url, model="m", temperature=1, cache=str(tmp_path / "cache")),
        samples=2,
    )

    def judge(draw: int) -> list[float]:
        return asyncio.run(make_judge(config, draw=draw).score(items("a")))

    assert judge(0) == judge(0) == pytest.approx([0.05])
    assert len(server.requests) == 2
    assert judge(1) == pytest.approx([0.25])
    assert len(server.requests) == 4
