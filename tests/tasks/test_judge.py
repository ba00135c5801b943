"""Judgements reach MLflow as traces, and prompts its registry: all of them, each once, whatever happens between."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Trace
from mlflow.exceptions import MlflowException
from mlflow.tracing.client import TracingClient

import tasks.judge
from awpo.artifacts import open_stage
from awpo.config import JudgeConfig
from awpo.config_training import PolicyConfig
from awpo.data.store import write_instances
from awpo.judge_evaluation import write_evaluation
from awpo.judge_prompts import PROMPT_HASH, prompt_template
from awpo.methods import get_method
from awpo.training.scoring import SAMPLES, Scorer, drop_samples_from
from awpo.types import Instance, Message, Tool, ToolCall
from tasks.judge import BLIND_PROMPT, PROMPT, JudgementRelay, announce_judge, register_prompt, track_evaluation
from tasks.judge_traces import trace_id
from tasks.tracking import TrackedRun, open_run
from tasks.tracking_store import Tracking
from tasks.training import train_policy

WEATHER = Tool("get_weather", "weather of a city", {"type": "object", "properties": {"city": {"type": "string"}}})


def instance(city: str) -> Instance:
    return Instance(
        "test",
        city,
        0,
        1,
        "train",
        (WEATHER,),
        (Message("user", f"weather in {city}"),),
        Message("assistant", tool_calls=(ToolCall("get_weather", {"city": city}),)),
        f"get_weather fits: weather of a city. city is {city}.",
    )


def completion(city: str, thought: str = "") -> str:
    call = json.dumps({"name": "get_weather", "arguments": {"city": city}})
    return f"<think>\n{thought or f'get_weather: {city}'}\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


def grades(score: int) -> str:
    values = dict.fromkeys(("coherence", "correctness", "appropriateness"), score)
    return json.dumps({"reason": f"worth {score}", **values})


@pytest.fixture
def run(tracking: Tracking, tmp_path: Path) -> TrackedRun:
    (tmp_path / "stage").mkdir()
    return open_run(tracking, "stage", tmp_path / "stage", "w", {}, begun=True)


def again(run: TrackedRun) -> TrackedRun:
    """The run as the next process finds it."""
    return open_run(run.tracking, "stage", run.folder, "w", {}, begun=True)


def endpoint_judge(url: str, endpoint: dict[str, Any] | None = None, **settings: Any) -> JudgeConfig:
    endpoint = {"base_url": url, "model": "strong", "attempts": 1, "cache": "off", **(endpoint or {})}
    return JudgeConfig.read({"kind": "endpoint", "endpoint": endpoint, **settings}, "the test")


def write_samples(run: TrackedRun, judge: JudgeConfig, step: int, *texts: str) -> None:
    """Up to four rollouts of a step, scored by a real judge and written down by the trainer's own code."""
    scorer = Scorer(get_method("awpo"), PolicyConfig(judge=judge), run.folder / SAMPLES)
    chosen = [instance("Paris")] * len(texts)
    scores = scorer.begin(chosen, texts, [9] * len(texts)).result(timeout=60)
    scorer.write_samples(step, chosen, texts, scores, advantage=[0.5] * len(texts))


def traces(run: TrackedRun) -> list[Trace]:
    found = run.client.search_traces(locations=[run.tracking.experiment_id], run_id=run.run_id, max_results=100)
    return sorted(found, key=lambda trace: (int(trace.info.tags["awpo.step"]), trace.info.request_time))


def test_a_sampled_judgement_is_a_trace_of_its_run(run: TrackedRun, faults: Any) -> None:
    faults.script(default={"do": "answer", "text": grades(6), "delay": 0.05})
    judge = endpoint_judge(faults.url)
    write_samples(run, judge, 3, completion("Paris"))
    assert JudgementRelay(run, run.folder, judge).pump() == 1
    [trace] = traces(run)
    assert (trace.info.tags["mlflow.traceName"], trace.info.tags["awpo.step"]) == ("judgement", "3")
    assert trace.info.state == "OK"
    assert trace.info.token_usage == {"input_tokens": 100, "output_tokens": 10, "total_tokens": 110}
    assert trace.info.execution_duration is not None
    assert 50 <= trace.info.execution_duration < 30_000
    root, asked = trace.data.spans
    assert root.inputs["completion"] == completion("Paris")
    assert root.outputs["score"] == pytest.approx(0.6)
    assert (root.attributes["correct"], root.attributes["advantage"]) == (3.0, 0.5)
    assert asked.parent_id == root.span_id
    assert asked.inputs["messages"] == faults.log()[0]["body"]["messages"]
    assert asked.outputs["content"] == grades(6)
    found = {feedback.name: feedback for feedback in trace.info.assessments}
    assert found.keys() == {"score", "coherence", "correctness", "appropriateness"}
    assert all(one.value == pytest.approx(0.6) and one.rationale == "worth 6" for one in found.values())
    assert (found["score"].source.source_type, found["score"].source.source_id) == ("LLM_JUDGE", "strong")
    assert json.loads(trace.info.tags["mlflow.linkedPrompts"]) == [{"name": PROMPT, "version": "1"}]


def test_a_failed_judgement_is_an_error_and_no_number(run: TrackedRun, faults: Any) -> None:
    faults.script(default={"do": "answer", "text": "A fine thought."})
    judge = endpoint_judge(faults.url)
    write_samples(run, judge, 0, completion("Paris"))
    JudgementRelay(run, run.folder, judge).pump()
    [trace] = traces(run)
    assert trace.info.state == "ERROR"
    [feedback] = trace.info.assessments
    assert (feedback.name, feedback.value) == ("score", None)
    assert "without readable scores: 'A fine thought.'" in str(feedback.feedback.error)
    assert trace.data.spans[1].outputs["content"] == "A fine thought."


def test_each_of_several_answers_is_a_span_and_cached_ones_cost_nothing(
    run: TrackedRun, faults: Any, tmp_path: Path
) -> None:
    faults.script(default={"do": "answer", "text": grades(6)})
    judge = endpoint_judge(faults.url, {"temperature": 1.0, "cache": str(tmp_path / "cache")}, samples=2)
    for step in (0, 1):
        write_samples(run, judge, step, completion("Paris"))
    assert JudgementRelay(run, run.folder, judge).pump() == 2
    first, second = traces(run)
    assert [len(trace.data.spans) for trace in (first, second)] == [3, 3]
    assert first.info.token_usage == {"input_tokens": 200, "output_tokens": 20, "total_tokens": 220}
    assert second.info.token_usage is None
    assert [span.attributes["cached"] for span in second.data.spans[1:]] == [True, True]
    assert second.info.execution_duration is not None
    assert second.info.execution_duration < 1000


def test_of_a_judge_by_rules_the_first_of_each_step(run: TrackedRun) -> None:
    judge = JudgeConfig()
    for step in (0, 1):
        write_samples(run, judge, step, *(completion("Paris", f"thought {number}") for number in range(4)))
    assert JudgementRelay(run, run.folder, judge).pump() == 2
    found = traces(run)
    assert all("thought 0" in trace.data.spans[0].inputs["completion"] for trace in found)
    assert {feedback.source.source_type for feedback in found[0].info.assessments} == {"CODE"}
    tags = run.client.get_run(run.run_id).data.tags
    assert tags["awpo.judge"] == "rubric x3"
    assert tags["awpo.judge_rules"]
    assert run.client.search_prompts() == []


def test_what_grows_is_sent_once(run: TrackedRun, faults: Any) -> None:
    faults.script(default={"do": "answer", "text": grades(6)})
    judge = endpoint_judge(faults.url)
    relay = JudgementRelay(run, run.folder, judge)
    assert relay.pump() == 0
    write_samples(run, judge, 0, *(completion("Paris", f"thought {number}") for number in range(4)))
    assert relay.pump() == 4
    assert relay.pump() == 0
    write_samples(run, judge, 1, completion("Rome"))
    assert relay.pump() == 1
    assert JudgementRelay(again(run), run.folder, judge).pump() == 0  # the next process
    assert len(traces(run)) == 5


@pytest.mark.parametrize("call", ["log_spans", "start_trace"])
def test_what_a_store_that_is_away_missed_is_sent_later(
    run: TrackedRun, faults: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It goes away in the middle of a batch, and comes back for the next run of the stage."""
    faults.script(default={"do": "answer", "text": grades(6)})
    judge = endpoint_judge(faults.url)
    write_samples(run, judge, 0, *(completion("Paris", f"thought {number}") for number in range(4)))
    real, left = getattr(TracingClient, call), [2 if call == "start_trace" else 0]

    def away(*arguments: Any) -> Any:
        if not left[0]:
            raise MlflowException("the store is away")
        left[0] -= 1
        return real(*arguments)

    monkeypatch.setattr(TracingClient, call, away)
    relay = JudgementRelay(run, run.folder, judge)
    assert relay.pump() == 0
    assert relay.problem == "the store is away"
    monkeypatch.undo()
    JudgementRelay(again(run), run.folder, judge).pump()
    found = traces(run)
    assert [len(trace.data.spans) for trace in found] == [2, 2, 2, 2]
    assert [len(trace.info.assessments) for trace in found] == [4, 4, 4, 4]


def test_a_store_away_at_the_start_gets_the_prompt_later(
    run: TrackedRun, faults: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.script(default={"do": "answer", "text": grades(6)})
    judge = endpoint_judge(faults.url)
    write_samples(run, judge, 0, completion("Paris"))

    def away(*_: object, **__: object) -> None:
        raise MlflowException("the store is away")

    relay = JudgementRelay(run, run.folder, judge)
    with monkeypatch.context() as patch:
        patch.setattr(run.client, "log_batch", away)
        assert relay.pump() == 0
    assert relay.pump() == 1
    assert run.client.get_prompt_version(PROMPT, 1) is not None


def test_a_store_that_takes_no_traces_does_not_end_the_training(
    run: TrackedRun, faults: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(*_: object) -> None:
        raise NotImplementedError

    faults.script(default={"do": "answer", "text": grades(6)})
    judge = endpoint_judge(faults.url)
    write_samples(run, judge, 0, completion("Paris"))
    monkeypatch.setattr(TracingClient, "log_spans", unable)
    with JudgementRelay(run, run.folder, judge) as relay:
        pass
    assert "takes no traces" in str(relay.problem)


def test_steps_that_a_resumed_trainer_writes_again_stand_once(run: TrackedRun, faults: Any) -> None:
    faults.script(default={"do": "answer", "text": grades(6)})
    judge = endpoint_judge(faults.url)
    relay = JudgementRelay(run, run.folder, judge)
    for step in range(3):
        write_samples(run, judge, step, completion("Paris", f"step {step}"))
    assert relay.pump() == 3
    drop_samples_from(run.folder / SAMPLES, 1)  # the trainer goes on from step 1
    for step in (1, 2, 3):
        write_samples(run, judge, step, completion("Paris", f"step {step}"))
    assert relay.pump() == 1
    assert JudgementRelay(again(run), run.folder, judge).pump() == 0
    assert [trace.info.tags["awpo.step"] for trace in traces(run)] == ["0", "1", "2", "3"]


def test_rows_without_a_judgement_and_broken_lines_are_passed_over(run: TrackedRun) -> None:
    judge = JudgeConfig()
    (run.folder / SAMPLES).write_text('{"step": 0, "completion": "x"}\nnonsense\n{"step": 1, "judg')
    relay = JudgementRelay(run, run.folder, judge)
    assert (relay.pump(), relay.problem) == (0, None)


def test_ids_differ_by_run_step_and_place() -> None:
    ids = {trace_id(run, step, place) for run in "ab" for step in range(3) for place in range(3)}
    assert len(ids) == 18


def test_a_prompt_is_registered_once_for_its_hash(
    run: TrackedRun, tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = endpoint_judge("http://127.0.0.1:1/v1", two_pass=True)
    for _ in range(2):
        shown, blind = announce_judge(run, judge)
    assert (shown.name, shown.version, blind.name, blind.version) == (PROMPT, 1, BLIND_PROMPT, 1)
    assert shown.template == prompt_template(with_reference=True)
    assert blind.template == prompt_template(with_reference=False)
    assert shown.tags["awpo.prompt_hash"] == PROMPT_HASH
    tags = run.client.get_run(run.run_id).data.tags
    assert {one["name"] for one in json.loads(tags["mlflow.linkedPrompts"])} == {PROMPT, BLIND_PROMPT}
    assert (tags["awpo.judge"], tags["awpo.judge_prompt"]) == ("strong x3", PROMPT_HASH)

    monkeypatch.setattr(tasks.judge, "PROMPT_HASH", "another")
    assert register_prompt(tracking, with_reference=True).version == 2
    monkeypatch.undo()
    assert register_prompt(tracking, with_reference=True).version == 1
    for thread in threading.enumerate():  # in which MLflow links a new prompt with its experiment
        if thread.name.startswith("link_prompt_to_experiment"):
            thread.join(30)
    linked = run.client.get_prompt(PROMPT)
    assert linked is not None
    assert linked.tags["_mlflow_experiment_ids"] == f",{tracking.experiment_id},"


def test_a_training_run_has_its_judgements(tracking: Tracking, tiny_model: Path, tmp_path: Path, faults: Any) -> None:
    """Real training of a tiny model in a process of its own, judged over HTTP; then the same again, which sends nothing.

    A random model thinks nothing, and no thought is worth 0 without asking.
    """
    with open_stage(tmp_path / "instances", "decompose", {}, {}) as stage:
        write_instances(stage.folder, [instance(city) for city in ("Paris", "Rome", "Oslo", "Lima")])
        stage.finish()
    config = PolicyConfig(
        steps=2,
        prompts_per_rollout=2,
        group_size=2,
        steps_per_rollout=1,
        micro_batch_size=4,
        max_completion_length=8,
        judge=endpoint_judge(faults.url),
    )
    out = tmp_path / "out" / "policy"
    for _ in range(2):
        train_policy.fn(str(tiny_model), "tiny", "base", tmp_path / "instances", out, config, tracking)
    [trained] = tracking.client().search_runs([tracking.experiment_id])
    samples = (out / SAMPLES).read_text().splitlines()
    found = tracking.client().search_traces(
        locations=[tracking.experiment_id], run_id=trained.info.run_id, max_results=100
    )
    assert len(found) == len(samples) == 8
    assert {trace.info.tags["awpo.step"] for trace in found} == {"1", "2"}
    assert {feedback.value for trace in found for feedback in trace.info.assessments} == {0.0}
    assert trained.data.tags["awpo.judge_prompt"] == PROMPT_HASH


def test_an_evaluation_of_a_judge_is_a_run_once(tracking: Tracking, tmp_path: Path) -> None:
    with open_stage(tmp_path / "instances", "rationales", {}, {}) as stage:
        write_instances(stage.folder, [instance(city) for city in ("Paris", "Rome", "Oslo", "Lima")])
        stage.finish()
    out = tmp_path / "judged"
    summary = write_evaluation(tmp_path / "instances", out, JudgeConfig(), items=4)
    runs = {track_evaluation(tracking, JudgeConfig(), out, summary).run_id for _ in range(2)}
    [run_id] = runs
    recorded = tracking.client().get_run(run_id)
    assert recorded.info.status == "FINISHED"
    assert recorded.data.metrics["accuracy"] == pytest.approx(summary["accuracy"])
    wrong_value = next(kind for kind in summary["kinds"] if kind["kind"] == "wrong_value")
    assert recorded.data.metrics["wrong_value/right"] == pytest.approx(wrong_value["right"])
    assert recorded.data.tags["awpo.judge_usable"] == str(not summary["unusable"])
    assert recorded.data.params["kind"] == "rubric"
