"""The reasoning reward's source: a score in [0, 1] for the thought of a completion.

`RubricJudge` scores by fixed rules and needs nothing but the instance; `EndpointJudge` asks a strong model over an
OpenAI-compatible endpoint; `CorrelatedJudge` draws scores of a set quality, for studies. A judgement that failed, or that
cannot be made, is NaN, never 0: the methods leave such rollouts' groups to the outcome reward, and count them.
How good a judge is `awpo.judge_evaluation` measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from awpo.config import JudgeConfig
from awpo.judge_correlated import CorrelatedJudge
from awpo.judge_endpoint import EndpointJudge
from awpo.judge_prompts import PROMPT_HASH
from awpo.judge_rubric import RUBRIC_HASH, RubricJudge
from awpo.judgement import Grades, Judge, Judgement


def make_judge(config: JudgeConfig, seed: int = 0, draw: int = 0, folder: Path | None = None) -> Judge:
    """The judge that the settings name; `seed` is that of a correlated judge's noise.

    Another `draw` is the same judge asked anew: what it said before is not taken from a cache. `folder` is the run's:
    what all of its judges spend together is kept there.
    Raises UserError where its endpoint has no key or a wrong address.
    """
    if config.kind == "correlated":
        return CorrelatedJudge(config.correlation or 0.0, seed + draw)
    return EndpointJudge(config, draw=draw, folder=folder) if config.kind == "endpoint" else RubricJudge()


async def grade(judge: Judge, items: Sequence[Judgement]) -> list[Grades]:
    """What `judge.score` gives, with the criteria's scores where the judge has them."""
    if isinstance(judge, RubricJudge | EndpointJudge):
        return await judge.grade(items)
    return [Grades(score) for score in await judge.score(items)]


def judge_identity(config: JudgeConfig) -> dict[str, Any]:
    """Who judges and by which version of which prompt or rules: what every result holds that a judge had a hand in."""
    identity: dict[str, Any] = {"kind": config.kind, "scale": config.scale}
    if config.endpoint:
        asked = config.endpoint.model_dump(include={"model", "temperature", "max_tokens", "options"})
        identity |= {"endpoint": asked, "samples": config.samples, "two_pass": config.two_pass, "prompt": PROMPT_HASH}
    elif config.kind == "correlated":
        identity["correlation"] = config.correlation
    else:
        identity["rules"] = RUBRIC_HASH
    return identity
