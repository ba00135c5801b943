"""What a judge is given and what it gives: the nouns of the reasoning reward."""

from __future__ import annotations

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
class Grades:
    """A judgement: its score in [0, 1], or NaN where there is none.

    `criteria` are the scores in [0, 1] that it is made of, by name (none where the judge has none); `samples` the
    scores of the answers that were averaged, NaN for those that failed.
    """

    score: float
    criteria: Mapping[str, float] = field(default_factory=dict)
    samples: tuple[float, ...] = ()


class Judge(Protocol):
    """Scores thoughts."""

    async def score(self, items: Sequence[Judgement]) -> list[float]:
        """One score in [0, 1], or NaN where there is none, per item, in order."""
        ...
