"""A judge of set quality: its scores correlate with the outcome reward as much as they are told to.

It asks how a method bears a judge that agrees with the outcome, says nothing, or contradicts it. It knows the
reference action and is no use for training a model that is meant for use.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence

from awpo.judgement import Judgement
from awpo.rewards import outcome_reward
from awpo.types import content_hash

SPREAD = 0.2
"""Standard deviation of the scores before they are cut to [0, 1]: the cut is 2.5 of them away."""


class CorrelatedJudge:
    """Scores with correlation rho to the outcome reward over the batch that is judged at once.

        score = min(1, max(0, 0.5 + 0.2 (rho z + sqrt(1 - rho^2) e)))

    z is the outcome reward (mode `strict`) less its mean, over its std, both over the batch (0 where it does not
    vary); e is standard normal noise. The correlation holds over a batch: inside a group whose outcomes vary less
    than the batch's the same noise weighs more, as it does for a judge that gives absolute scores. The noise depends
    on seed, instance, completion and on how often that completion came before in the batch, and on nothing else.

    Raises ValueError for a correlation outside [-1, 1].
    """

    def __init__(self, correlation: float, seed: int = 0) -> None:
        if not -1 <= correlation <= 1:
            raise ValueError(f"a correlation lies in [-1, 1], not {correlation}")
        self.correlation, self.seed = correlation, seed

    async def score(self, items: Sequence[Judgement]) -> list[float]:
        outcomes = [outcome_reward(item.instance, item.completion) for item in items]
        mean = statistics.fmean(outcomes) if outcomes else 0.0
        std = statistics.pstdev(outcomes, mean) if outcomes else 0.0
        seen: Counter[str] = Counter()
        scores = []
        for item, outcome in zip(items, outcomes, strict=True):
            completion = item.completion
            calls = [call.to_json() for call in completion.tool_calls]
            key = content_hash([item.instance.id, completion.thought, calls, completion.content])
            noise = random.Random(f"{self.seed}-{key}-{seen[key]}").gauss(0.0, 1.0)
            seen[key] += 1
            signal = (outcome - mean) / std if std > 0 else 0.0
            mixed = self.correlation * signal + math.sqrt(1 - self.correlation**2) * noise
            scores.append(min(1.0, max(0.0, 0.5 + SPREAD * mixed)))
        return scores
