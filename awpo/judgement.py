"""What a judge is given and what it gives: the nouns of the reasoning reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from awpo.types import Completion, Instance


@dataclass(frozen=True, slots=True)
class Judgement:
    """One thought to be judged: the completion that holds it and the instance that it answers."""

    instance: Instance
    completion: Completion


@dataclass(frozen=True, slots=True)
class JudgeAnswer:
    """What came of asking a model for a judgement once.

    `criteria` are the scores in [0, 1] that it gives, by name; without any, `failure` says why. `time` is when it came,
    in seconds since 1970; tokens and `seconds` are what it took when it was made, and `cached` says that this was
    earlier. A request that got no answer has no text.
    """

    with_reference: bool
    time: float
    text: str = ""
    criteria: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: bool = False

    @property
    def score(self) -> float:
        """The mean of the criteria's scores, in [0, 1]; NaN without any."""
        return math.fsum(self.criteria.values()) / len(self.criteria) if self.criteria else math.nan


@dataclass(frozen=True, slots=True)
class Grades:
    """A judgement: its score in [0, 1], or NaN where there is none; then `failure` says why.

    `criteria` are the scores in [0, 1] that it is made of, by name (none where the judge has none); `samples` the
    scores of the answers that were averaged, NaN for those that failed; `answers` all that a model was asked for.
    """

    score: float
    criteria: Mapping[str, float] = field(default_factory=dict)
    samples: tuple[float, ...] = ()
    answers: tuple[JudgeAnswer, ...] = ()
    failure: str = ""


class Judge(Protocol):
    """Scores thoughts."""

    async def score(self, items: Sequence[Judgement]) -> list[float]:
        """One score in [0, 1], or NaN where there is none, per item, in order."""
        ...
