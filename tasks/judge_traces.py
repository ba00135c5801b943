"""Sampled judgements as MLflow traces of the run that made them.

A trace's id follows from the run, the step and the sample's place in it, so that a sample that is sent again (by a
process that died before it noted that the store had it, or for a step that was trained again) is the same trace.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from mlflow.entities import (
    Assessment,
    AssessmentError,
    AssessmentSource,
    AssessmentSourceType,
    Feedback,
    Span,
    SpanType,
    TraceInfo,
    TraceLocation,
    TraceState,
)
from mlflow.entities.model_registry import PromptVersion
from mlflow.exceptions import MlflowException
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey

from awpo.config import JudgeConfig
from awpo.judge_prompts import CRITERIA, read_reason
from tasks.tracking import TrackedRun
from tasks.tracking_store import store_lock

TRACES_PER_PAGE = 100
LONGEST_PREVIEW = 1000  # characters


def trace_id(run_id: str, step: int, place: int) -> str:
    """The id of the trace of a sample: the one of that place among those of a step."""
    return "tr-" + hashlib.sha256(f"{run_id}/{step}/{place}".encode()).hexdigest()[:32]


def known_traces(run: TrackedRun) -> set[str]:
    """The ids of the run's traces that are whole: a trace names its run last."""
    found: set[str] = set()
    page: str | None = None
    while True:
        with store_lock:
            traces = run.client.search_traces(
                locations=[run.tracking.experiment_id],
                run_id=run.run_id,
                include_spans=False,
                max_results=TRACES_PER_PAGE,
                page_token=page,
            )
        found.update(trace.info.trace_id for trace in traces)
        page = traces.token
        if not page:
            return found


def send_traces(
    run: TrackedRun,
    config: JudgeConfig,
    prompts: list[PromptVersion],
    samples: list[tuple[str, dict[str, Any]]],
    time: float,
) -> None:
    """Makes a trace of each (id, row of judge_samples.jsonl); `time` is when, in seconds, of what was not asked for.

    MlflowClient's own traces end in a queue that only logs what the store refuses, and have ids by chance; here a
    refusal is raised.
    """
    tracing = TracingClient(run.tracking.uri)
    made = [(_spans(trace, row, time), trace, row) for trace, row in samples]
    try:
        with store_lock:
            tracing.log_spans(run.tracking.experiment_id, [span for spans, _, _ in made for span in spans])
    except NotImplementedError as error:
        raise MlflowException(f"it takes no traces: {error or 'give it a database'}") from None
    for spans, trace, row in made:
        with store_lock:
            tracing.start_trace(_info(run, config, prompts, spans, trace, row))


def _spans(trace: str, row: dict[str, Any], time: float) -> list[Span]:
    """The judgement, and below it each request that a model was sent for it."""
    judgement = row["judgement"]
    answers = judgement.get("answers", [])
    messages = {request["with_reference"]: request["messages"] for request in row.get("requests", [])}
    beginnings = [answer["time"] - _waited(answer) for answer in answers]
    root = _span(
        trace,
        0,
        "judgement",
        SpanType.EVALUATOR,
        min(beginnings, default=time),
        max((answer["time"] for answer in answers), default=time),
        {name: row[name] for name in ("completion", "rationale", "instance") if name in row},
        {name: value for name, value in judgement.items() if name != "answers"},
        judgement.get("failure", ""),
        {name: row[name] for name in ("step", "kind", "format", "correct", "reasoning", "advantage") if name in row},
    )
    found = [root]
    for number, (answer, begun) in enumerate(zip(answers, beginnings, strict=True), start=1):
        tokens = {"input_tokens": answer["prompt_tokens"], "output_tokens": answer["completion_tokens"]}
        # What came from the cache was paid for before, and took no time now.
        used = (
            {} if answer["cached"] else {SpanAttributeKey.CHAT_USAGE: {**tokens, "total_tokens": sum(tokens.values())}}
        )
        found.append(
            _span(
                trace,
                number,
                "answer from the cache" if answer["cached"] else "answer",
                SpanType.CHAT_MODEL,
                begun,
                answer["time"],
                {"messages": messages.get(answer["with_reference"], [])},
                {"content": answer["text"], **answer["criteria"]},
                answer["failure"],
                {**used, **{name: answer[name] for name in ("cached", "seconds", "with_reference")}},
            )
        )
    return found


def _waited(answer: dict[str, Any]) -> float:
    return 0.0 if answer["cached"] else float(answer["seconds"])


def _span(
    trace: str,
    number: int,
    name: str,
    kind: str,
    begun: float,
    ended: float,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    failure: str,
    attributes: dict[str, Any],
) -> Span:
    """A span, the root's where `number` is 0; times in seconds since 1970. Its id follows from trace and number."""
    own = {
        SpanAttributeKey.REQUEST_ID: trace,
        SpanAttributeKey.SPAN_TYPE: kind,
        SpanAttributeKey.INPUTS: inputs,
        SpanAttributeKey.OUTPUTS: outputs,
    }
    return Span.from_dict(
        {
            "name": name,
            "trace_id": trace,
            "span_id": _span_id(trace, number),
            "parent_span_id": _span_id(trace, 0) if number else None,
            "start_time_unix_nano": int(begun * 1e9),
            "end_time_unix_nano": int(ended * 1e9),
            "status": {"code": "ERROR" if failure else "OK", "message": failure},
            "attributes": {key: json.dumps(value, ensure_ascii=False) for key, value in {**own, **attributes}.items()},
        }
    )


def _span_id(trace: str, number: int) -> str:
    return hashlib.sha256(f"{trace}/{number}".encode()).hexdigest()[:16]


def _info(
    run: TrackedRun,
    config: JudgeConfig,
    prompts: list[PromptVersion],
    spans: list[Span],
    trace: str,
    row: dict[str, Any],
) -> TraceInfo:
    judgement, root = row["judgement"], spans[0]
    linked = json.dumps([{"name": prompt.name, "version": str(prompt.version)} for prompt in prompts])
    begun, ended = root.start_time_ns // 1_000_000, (root.end_time_ns or root.start_time_ns) // 1_000_000
    return TraceInfo(
        trace_id=trace,
        trace_location=TraceLocation.from_experiment_id(run.tracking.experiment_id),
        request_time=begun,
        execution_duration=ended - begun,
        state=TraceState.ERROR if judgement.get("failure") else TraceState.OK,
        request_preview=str(row.get("completion", ""))[:LONGEST_PREVIEW],
        response_preview=_said(judgement)[:LONGEST_PREVIEW],
        trace_metadata={TraceMetadataKey.SOURCE_RUN: run.run_id},
        tags={
            TraceTagKey.TRACE_NAME: "judgement",
            "awpo.step": str(row["step"]),
            "awpo.instance": str(row.get("instance", ""))[:250],
            **({TraceTagKey.LINKED_PROMPTS: linked} if prompts else {}),
        },
        assessments=_assessments(config, trace, judgement),
    )


def _said(judgement: dict[str, Any]) -> str:
    if judgement.get("failure"):
        return f"no score: {judgement['failure']}"
    score = judgement.get("score")
    return f"no score {_reason(judgement)}" if score is None else f"{score:.3f} {_reason(judgement)}"


def _reason(judgement: dict[str, Any]) -> str:
    """The model's own line for the last of its answers; empty where it gave none."""
    answers = judgement.get("answers", [])
    return read_reason(answers[-1]["text"]) if answers else ""


def _assessments(config: JudgeConfig, trace: str, judgement: dict[str, Any]) -> list[Assessment]:
    """The score and each criterion as feedback, in [0, 1]; a failed judgement is an error, never a number."""
    asked = config.endpoint
    source = (
        AssessmentSource(AssessmentSourceType.LLM_JUDGE, asked.model)
        if asked
        else AssessmentSource(AssessmentSourceType.CODE, config.kind)
    )
    found: list[Assessment] = []
    for name in ("score", *CRITERIA):
        value = judgement.get(name)
        if value is not None:
            feedback = Feedback(name, value, source=source, rationale=_reason(judgement) or None)
        elif name == "score":
            failure = judgement.get("failure") or "the judge gave no score"
            feedback = Feedback(name, error=AssessmentError("JUDGEMENT_FAILED", failure), source=source)
        else:
            continue
        feedback.assessment_id = "a-" + hashlib.sha256(f"{trace}/{name}".encode()).hexdigest()[:32]
        found.append(feedback)
    return found
