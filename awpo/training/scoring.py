"""Scores the rollouts of one batch: each completion is parsed once, each reward computed once."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from awpo.artifacts import write_atomically
from awpo.chat import parse_completion
from awpo.config import PolicyConfig
from awpo.judge import Judgement, make_judge
from awpo.methods import Method
from awpo.rewards import outcome_parts, overlong_penalty, reward_range
from awpo.types import Instance

SAMPLES = "judge_samples.jsonl"
SAMPLES_PER_BATCH = 4


@dataclass
class Scores:
    """Rewards of N rollouts, each list of length N; a failed judgement is NaN."""

    format: list[float] = field(default_factory=list)
    correct: list[float] = field(default_factory=list)
    overlong: list[float] = field(default_factory=list)
    reasoning: list[float] = field(default_factory=list)
    r_min: list[float] = field(default_factory=list)
    r_max: list[float] = field(default_factory=list)
    judge_seconds: float = 0.0
    judged: int = 0


class Scorer:
    """Scores rollouts for `method`. A judge that costs nothing also measures the thoughts of methods that don't use
    it; an endpoint is asked only where the method needs it."""

    def __init__(self, method: Method, config: PolicyConfig, samples_file: Path | None) -> None:
        self.method, self.config, self.samples_file = method, config, samples_file
        asked = method.needs_judge or config.judge.kind != "endpoint"
        self.judge = make_judge(config.judge, config.seed) if asked else None

    def score(self, instances: Sequence[Instance], texts: Sequence[str], lengths: Sequence[int]) -> Scores:
        """`texts` are completions with their tags, `lengths` their tokens; all of length N.

        Raises UserError where more judgements fail than the judge's limit allows.
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
            return scores
        start = time.perf_counter()
        judgements = [Judgement(i, c) for i, c in zip(instances, completions, strict=True)]
        raw = asyncio.run(self.judge.score(judgements))
        scores.judge_seconds, scores.judged = time.perf_counter() - start, len(raw)
        scores.reasoning = [self.config.judge.scale * value for value in raw]
        return scores

    def write_samples(
        self, step: int, instances: Sequence[Instance], texts: Sequence[str], scores: Scores, **rows: Sequence[Any]
    ) -> None:
        """Appends a few rollouts of the batch, evenly spread, for people to read."""
        if self.samples_file is None:
            return
        with open(self.samples_file, "a", encoding="utf-8") as file:
            for index in range(0, len(texts), max(1, len(texts) // SAMPLES_PER_BATCH)):
                row = {
                    "step": step,
                    "instance": instances[index].id,
                    "kind": instances[index].kind,
                    "completion": texts[index],
                    "rationale": instances[index].rationale,
                    "format": scores.format[index],
                    "correct": scores.correct[index],
                    "reasoning": scores.reasoning[index] if math.isfinite(scores.reasoning[index]) else None,
                    **{name: values[index] for name, values in rows.items()},
                }
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def drop_samples_from(file: Path, step: int) -> None:
    """Removes the samples of rollouts made at optimiser step `step` (from 0) or later, which will be made again."""
    if not file.exists():
        return
    kept = [line for line in file.read_text("utf-8").splitlines(keepends=True) if _step_of(line) < step]
    write_atomically(file, "".join(kept))


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf  # half a line, of a process that died in writing it
