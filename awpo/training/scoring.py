"""Scores the rollouts of one batch: each completion is parsed once, each reward computed once."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from awpo.chat import parse_completion
from awpo.config_training import PolicyConfig
from awpo.errors import UserError
from awpo.files import keep_rows
from awpo.judge import grade, make_judge
from awpo.judge_endpoint import EndpointJudge
from awpo.judge_prompts import judge_messages
from awpo.judgement import Grades, Judgement
from awpo.methods import Method
from awpo.rewards import FORMAT_MAX, outcome_parts, overlong_penalty, reward_range
from awpo.types import Instance

SAMPLES = "judge_samples.jsonl"
SAMPLES_PER_BATCH = 4
ROUNDING = 1e-6


@dataclass
class Scores:
    """Rewards of N rollouts, each list of length N; a failed judgement is NaN.

    `grades` are the judgements behind `reasoning`, empty without a judge; `judge_seconds` is how long they took.
    """

    format: list[float] = field(default_factory=list)
    correct: list[float] = field(default_factory=list)
    overlong: list[float] = field(default_factory=list)
    reasoning: list[float] = field(default_factory=list)
    r_min: list[float] = field(default_factory=list)
    r_max: list[float] = field(default_factory=list)
    grades: list[Grades] = field(default_factory=list)
    judge_seconds: float = 0.0


@dataclass
class Drawn:
    """One draw of N completions with their scores, each list of length N."""

    instances: list[Instance]
    texts: list[str]
    scores: Scores


def chosen_rows(draws: Sequence[Drawn], rows: Sequence[int]) -> Drawn:
    """Rows of several draws of N each, as one: row `i` is the draw i // N's row i % N. Seconds are of all draws."""
    places = [divmod(row, len(draws[0].texts)) for row in rows]
    scores = Scores(judge_seconds=sum(drawn.scores.judge_seconds for drawn in draws))
    for name in (column.name for column in fields(Scores) if column.name != "judge_seconds"):
        if getattr(draws[0].scores, name):
            setattr(scores, name, [getattr(draws[draw].scores, name)[row] for draw, row in places])
    return Drawn(
        [draws[draw].instances[row] for draw, row in places], [draws[draw].texts[row] for draw, row in places], scores
    )


class Scorer:
    """Scores rollouts for `method`. A judge that costs nothing also measures the thoughts of methods that don't use
    it; an endpoint is asked only where the method needs it."""

    def __init__(self, method: Method, config: PolicyConfig, samples_file: Path | None) -> None:
        self.method, self.config, self.samples_file = method, config, samples_file
        asked = method.needs_judge or config.judge.kind != "endpoint"
        self.judge = (
            make_judge(config.judge, config.seed, folder=samples_file and samples_file.parent) if asked else None
        )

    def begin(self, instances: Sequence[Instance], texts: Sequence[str], lengths: Sequence[int]) -> Future[Scores]:
        """`score`, begun now: where an endpoint is asked it answers while other things are computed."""
        begun: Future[Scores] = Future()

        def work() -> None:
            try:
                begun.set_result(self.score(instances, texts, lengths))
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                begun.set_exception(error)

        if isinstance(self.judge, EndpointJudge):
            # A daemon: a run that ends for another reason does not wait for the judge.
            threading.Thread(target=work, name="judge", daemon=True).start()
        else:
            work()
        return begun

    def metrics(self) -> dict[str, float]:
        """What an endpoint that judges was asked and has cost so far; nothing of another judge."""
        found = self.judge.metrics() if isinstance(self.judge, EndpointJudge) else {}
        return {f"judge/{name}": value for name, value in found.items()}

    def score(self, instances: Sequence[Instance], texts: Sequence[str], lengths: Sequence[int]) -> Scores:
        """`texts` are completions with their tags, `lengths` their tokens; all of length N.

        Raises UserError where more judgements fail than the judge's limit allows, and for a reward outside its range.
        """
        scores = Scores()
        completions = [parse_completion(text) for text in texts]
        for instance, completion, text in zip(instances, completions, texts, strict=True):
            shape, correct = outcome_parts(
                instance, text if self.config.reward_mode == "compat" else completion, mode=self.config.reward_mode
            )
            low, high = reward_range(instance.target, mode=self.config.reward_mode)
            scores.format.append(shape)
            scores.correct.append(correct)
            scores.r_min.append(low)
            scores.r_max.append(high)
        scores.overlong = (
            overlong_penalty(lengths, self.config.max_completion_length, self.method.overlong_share)
            if self.method.overlong_share
            else [0.0] * len(texts)
        )
        if self.judge is None:
            scores.reasoning = [math.nan] * len(texts)
            check_ranges(scores, instances, self.config.judge.scale)
            return scores
        start = time.perf_counter()
        judgements = [Judgement(i, c) for i, c in zip(instances, completions, strict=True)]
        scores.grades = asyncio.run(grade(self.judge, judgements))
        scores.judge_seconds = time.perf_counter() - start
        scores.reasoning = [self.config.judge.scale * grades.score for grades in scores.grades]
        check_ranges(scores, instances, self.config.judge.scale)
        return scores

    def write_samples(
        self, step: int, instances: Sequence[Instance], texts: Sequence[str], scores: Scores, **rows: Sequence[Any]
    ) -> None:
        """Appends a few rollouts of the batch for people to read; which ones depends on seed and step alone.

        `step` is the optimiser step, from 1, that first trains on the batch: the one whose metrics tell of it.
        """
        if self.samples_file is None:
            return
        generator = random.Random(f"samples-{self.config.seed}-{step}")
        picked = generator.sample(range(len(texts)), min(SAMPLES_PER_BATCH, len(texts)))
        with open(self.samples_file, "a", encoding="utf-8") as file:
            for index in sorted(picked):
                row = {
                    "step": step,
                    "instance": instances[index].id,
                    "kind": instances[index].kind,
                    "completion": texts[index],
                    "rationale": instances[index].rationale,
                    "format": scores.format[index],
                    "correct": scores.correct[index],
                    "reasoning": _known(scores.reasoning[index]),
                    **({"judgement": _judgement(scores.grades[index])} if scores.grades else {}),
                    **(_requests(instances[index], texts[index], scores.grades[index]) if scores.grades else {}),
                    **{name: values[index] for name, values in rows.items()},
                }
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def check_ranges(scores: Scores, instances: Sequence[Instance], scale: float) -> None:
    """Raises UserError for the first reward outside of its declared range: advantages would be of a scale of its own.

    Format is in [0, 1], the outcome in [r_min, r_max] of its instance, the penalty for length in [-1, 0], reasoning in
    [0, scale]. A reasoning reward may be NaN, a failed judgement; another one may not.
    """
    outcome = [sum(parts) for parts in zip(scores.format, scores.correct, strict=True)]
    for index, instance in enumerate(instances):
        low, high = scores.r_min[index], scores.r_max[index]
        for name, value, least, most in (
            ("format", scores.format[index], 0.0, FORMAT_MAX),
            ("outcome", outcome[index], low, high),
            ("overlong", scores.overlong[index], -1.0, 0.0),
            ("reasoning", scores.reasoning[index], 0.0, scale),
        ):
            if name == "reasoning" and math.isnan(value):
                continue
            if not least - ROUNDING <= value <= most + ROUNDING:
                raise UserError(
                    f"the reward {name!r} of a completion for the instance {instance.id} is {value:g}, outside of its "
                    f"range [{least:g}, {most:g}]; mend what computes it, no step was made with it"
                )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _judgement(grades: Grades) -> dict[str, Any]:
    """A judgement as JSON: score and criteria in [0, 1], the scores of several answers where they were averaged, why
    there is no score where there is none, and what a model answered."""
    samples = {"samples": [_known(sample) for sample in grades.samples]} if len(grades.samples) > 1 else {}
    failure = {"failure": grades.failure} if grades.failure else {}
    answers = {"answers": [asdict(answer) for answer in grades.answers]} if grades.answers else {}
    scores = {"score": _known(grades.score), **{k: _known(v) for k, v in grades.criteria.items()}}
    return {**scores, **samples, **failure, **answers}


def _requests(instance: Instance, text: str, grades: Grades) -> dict[str, Any]:
    """What a model was asked for the judgement, once for each way in which it was; nothing where none was asked."""
    completion = parse_completion(text)
    found = [
        {"with_reference": shown, "messages": judge_messages(instance, completion, with_reference=shown)}
        for shown in dict.fromkeys(answer.with_reference for answer in grades.answers)
    ]
    return {"requests": found} if found else {}


def drop_samples_from(file: Path, step: int) -> None:
    """Removes the samples of rollouts made for optimiser step `step` or a later one, which will be made again."""
    keep_rows(file, lambda row: int(row["step"]) < step)


def of_all_judges(counters: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sums of what `Scorer.metrics` told in each process; the latency is the mean over all answers."""
    names = dict.fromkeys(name for one in counters for name in one)
    found = {name: sum(one.get(name, 0.0) for one in counters) for name in names}
    if "judge/latency" in found:
        found["judge/latency"] = found["judge/seconds"] / found["judge/answers"]
    return found
