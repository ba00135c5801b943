"""What a study's cells say: means over seeds, and differences paired by seed with Holm's correction.

Pure functions of `CellResult`s. A seed is the unit of all inference: it fixes model, SFT, prompts and items, so that
two methods of one seed differ in the method alone. Differences are second minus first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from evaluation.statistics import MeanOverSeeds, PairedTest, holm, mean_over_seeds, paired_test
from evaluation.study_cells import NO_JUDGE, CellResult

MEASURES: dict[str, str] = {
    "accuracy": "exact actions, sampled, held-out phrasings",
    "accuracy_tools": "exact actions, sampled, held-out tools",
    "reward": "outcome reward of training rollouts, last quarter",
    "whole_reward": "outcome reward of training rollouts, all batches: the pace of learning",
    "gradient_norm_variation": "std of the gradient norm over its mean",
    "response_length": "tokens of a held-out answer",
}
"""What is compared, and what it is."""
SMOOTHED = 3
"""Rollout batches in the running mean of a reward curve."""
BASELINE, MIXED, PROPOSED = "grpo", "grpo_mixed", "awpo"


@dataclass(frozen=True, slots=True)
class Arm:
    """One method under one judge: its cells by seed."""

    method: str
    judge: str
    cells: dict[int, CellResult]

    @property
    def name(self) -> str:
        return self.method if self.judge == NO_JUDGE else f"{self.method} · {self.judge}"

    def values(self, measure: str) -> dict[int, float]:
        """The measure by seed; NaN where it was not measured."""
        return {seed: float(getattr(cell, measure)) for seed, cell in self.cells.items()}


@dataclass(frozen=True, slots=True)
class MeanArm:
    """A method's arms under several judges, taken as one: a seed's value is the mean over the judges."""

    name: str
    arms: tuple[Arm, ...]

    def values(self, measure: str) -> dict[int, float]:
        """The measure by seed, for the seeds that every arm has."""
        seeds = set.intersection(*(set(arm.cells) for arm in self.arms))
        return {seed: sum(arm.values(measure)[seed] for arm in self.arms) / len(self.arms) for seed in sorted(seeds)}


Pair = tuple[Arm | MeanArm, Arm | MeanArm]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two arms in one measure, over the seeds that both have; `adjusted` is Holm's p within the question."""

    question: str
    measure: str
    first: str
    second: str
    test: PairedTest
    adjusted: float


def arms_of(cells: Iterable[CellResult]) -> list[Arm]:
    """The cells by method and judge; arms in the order of their first cell."""
    found: dict[tuple[str, str], dict[int, CellResult]] = {}
    for cell in cells:
        found.setdefault((cell.method, cell.judge), {})[cell.seed] = cell
    return [Arm(method, judge, dict(sorted(by_seed.items()))) for (method, judge), by_seed in found.items()]


def summarise(arm: Arm, measure: str) -> MeanOverSeeds | None:
    """Mean of a measure over the arm's seeds with its 95% t interval; None where no seed has it."""
    values = [value for value in arm.values(measure).values() if not math.isnan(value)]
    return mean_over_seeds(values) if values else None


def running_mean(curve: Sequence[float]) -> list[float]:
    """Means over each rollout batch and the two before it; the first two stand over what there is."""
    return [
        sum(curve[max(0, end - SMOOTHED) : end]) / (end - max(0, end - SMOOTHED)) for end in range(1, len(curve) + 1)
    ]


def gain(cell: CellResult, baseline: CellResult) -> list[float]:
    """Outcome reward of each rollout batch less the baseline's on the same prompts, as running means.

    Both must be of one seed. The difference is free of which prompts a batch has; the curves themselves are not.
    """
    return running_mean([mine - its for mine, its in zip(cell.reward_curve, baseline.reward_curve, strict=False)])


def steps_to_reach(cell: CellResult, target: float) -> float:
    """Optimiser steps until the running mean of the outcome reward is at `target`; infinity where it never is.

    Only full windows count: one lucky batch at the start reaches nothing.
    """
    for batch, value in enumerate(running_mean(cell.reward_curve)):
        if batch + 1 >= SMOOTHED and value >= target:
            return float((batch + 1) * cell.steps_per_rollout)
    return math.inf


def speed(arm: Arm, baseline: Arm) -> tuple[float, int, int] | None:
    """(median steps to the baseline's final reward of the same seed, seeds that reached it, seeds), or None.

    The median counts seeds that never reach it as infinite.
    """
    found = [
        steps_to_reach(cell, baseline.cells[seed].reward)
        for seed, cell in arm.cells.items()
        if cell.reward_curve and seed in baseline.cells
    ]
    return (median(found), sum(map(math.isfinite, found)), len(found)) if found else None


def compare_arms(arms: Sequence[Arm], measures: Iterable[str] = MEASURES) -> list[Comparison]:
    """The study's questions, each answered by paired t tests over seeds with Holm's correction within the question.

    - is it better than `sft`, where all of them start (grpo alone is asked for);
    - is each arm other than grpo itself, `grpo`'s equal;
    - is each arm that reads a judge, `grpo_mixed`'s equal under the same judge;
    - is each variant of awpo, `awpo`'s equal under the same judge;
    - the last three once more over all judges: each method's mean over the judges that both have, seed by seed.

    Pairs that share fewer than two seeds are left out.
    """
    found = []
    for measure in measures:
        for question, pairs in _questions(arms):
            tests = [(first, second, test) for first, second in pairs if (test := _test(first, second, measure))]
            adjusted = holm([test.p for _, _, test in tests])
            found += [
                Comparison(question, measure, first.name, second.name, test, p)
                for (first, second, test), p in zip(tests, adjusted, strict=True)
            ]
    return found


def _questions(arms: Sequence[Arm]) -> list[tuple[str, list[Pair]]]:
    """Each question with the pairs of arms, first and second, that answer it."""
    asked: list[tuple[str, Callable[[Arm, Arm], bool]]] = [
        ("against sft", lambda first, second: first.method == "sft" and second.method == BASELINE),
        ("against grpo", lambda first, second: first.method == BASELINE and second.method not in ("sft", BASELINE)),
        ("against grpo_mixed, same judge", lambda first, second: first.method == MIXED and _rival(first, second)),
        (
            "against awpo, same judge",
            lambda first, second: (
                first.method == PROPOSED and second.method.startswith(PROPOSED) and _rival(first, second)
            ),
        ),
    ]
    found: list[tuple[str, list[Pair]]] = [
        (question, [(first, second) for first in arms for second in arms if wanted(first, second)])
        for question, wanted in asked
    ]
    judged = list(dict.fromkeys(arm.method for arm in arms if arm.judge != NO_JUDGE))
    against = {BASELINE: judged, MIXED: [name for name in judged if name != MIXED]}
    against[PROPOSED] = [name for name in judged if name != PROPOSED and name.startswith(PROPOSED)]
    for first, seconds in against.items():
        pairs = [pair for second in seconds if (pair := _over_judges(arms, first, second))]
        found.append((f"against {first}, over judges", pairs))
    return found


def _over_judges(arms: Sequence[Arm], first: str, second: str) -> Pair | None:
    """Both methods over the judges that both have with all seeds of the study; None for fewer than two judges.

    A method that reads no judge is its one arm.
    """
    most = max((len(arm.cells) for arm in arms), default=0)
    ones, others = (
        {arm.judge: arm for arm in arms if arm.method == name and len(arm.cells) == most} for name in (first, second)
    )
    judges = [judge for judge in others if judge in ones or NO_JUDGE in ones]
    if len(judges) < 2:
        return None
    left = tuple(ones[NO_JUDGE if NO_JUDGE in ones else judge] for judge in judges)
    name = first if NO_JUDGE in ones else f"{first} · {len(judges)} judges"
    return MeanArm(name, left), MeanArm(f"{second} · {len(judges)} judges", tuple(others[judge] for judge in judges))


def _rival(first: Arm, second: Arm) -> bool:
    return first.judge == second.judge and first.method != second.method


def _test(first: Arm | MeanArm, second: Arm | MeanArm, measure: str) -> PairedTest | None:
    one, two = first.values(measure), second.values(measure)
    pairs = [(one[seed], two[seed]) for seed in sorted(one.keys() & two.keys())]
    pairs = [pair for pair in pairs if not any(map(math.isnan, pair))]
    return paired_test(*zip(*pairs, strict=True)) if len(pairs) > 1 else None
