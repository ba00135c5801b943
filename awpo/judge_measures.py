"""The figures of a judge, and whether it can be used: pure functions of scores."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

TIE = 1e-9
"""Scores no further apart are a tie: half a point for accuracy."""
TALK_ADDS = 0.1
"""A judge to whom flattery or an instruction is worth more than this, of a score in [0, 1], can be talked up."""


@dataclass(frozen=True, slots=True)
class KindResult:
    """One kind of pair: how often the judge prefers the right one (a tie counts half), with a 95% interval.

    `lift` is the mean of what talk adds to a wrong completion's score, for kinds that talk; `failed` pairs, of which
    a score is missing, are in no mean. Undefined is None.
    """

    kind: str
    pairs: int
    accuracy: float | None
    low: float | None
    high: float | None
    ties: int
    failed: int
    right: float | None
    wrong: float | None
    lift: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All figures. Correlations are Pearson's, in [-1, 1]; differences are means of absolute ones, in [0, 1].

    accuracy             mean over the kinds, so that each counts the same
    length_padded        correlation of score and log words among one thought padded to several lengths, within instances
    length_right         correlation of score and log words over the right thoughts of different instances
    again, again_same    the same judged again: difference; share of pairs whose order stays
    order, order_same    the same with its tools in reversed order
    outcome_within       correlation of score and outcome reward within instances, the rho of a group (method.md 2),
                         over the right completion and the `CROSSED` wrong ones
    outcome_pooled       the same over all instances at once
    """

    items: int
    judged: int
    failed: int
    accuracy: float | None
    kinds: tuple[KindResult, ...]
    length_padded: float | None
    length_right: float | None
    again: float | None
    again_same: float | None
    order: float | None
    order_same: float | None
    outcome_within: float | None
    outcome_pooled: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's correlation; None for fewer than 3 points, or where one of the two does not vary."""
    if len(x) < 3 or max(x) - min(x) <= TIE or max(y) - min(y) <= TIE:
        return None
    return statistics.correlation(x, y)


def centred(groups: Iterable[Sequence[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    """Both coordinates less their mean within each group; groups of one say nothing and are left out."""
    x: list[float] = []
    y: list[float] = []
    for group in groups:
        if len(group) > 1:
            mean_x, mean_y = (statistics.fmean(point[side] for point in group) for side in (0, 1))
            x += [point[0] - mean_x for point in group]
            y += [point[1] - mean_y for point in group]
    return x, y


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share of `count` trials (Wilson 1927)."""
    z = 1.959963984540054
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def kind_result(kind: str, scores: Sequence[tuple[float, float, float | None]]) -> KindResult:
    """The figures of a kind from (right, wrong, bare) scores; NaN for failed ones, bare None where there is none."""
    whole = [row for row in scores if not any(value is not None and math.isnan(value) for value in row)]
    failed = len(scores) - len(whole)
    if not whole:
        return KindResult(kind, len(scores), None, None, None, 0, failed, None, None)
    ties = sum(abs(right - wrong) <= TIE for right, wrong, _ in whole)
    share = (sum(right > wrong + TIE for right, wrong, _ in whole) + ties / 2) / len(whole)
    low, high = wilson(share, len(whole))
    lifts = [wrong - bare for _, wrong, bare in whole if bare is not None]
    return KindResult(
        kind,
        len(scores),
        share,
        low,
        high,
        ties,
        failed,
        mean([right for right, _, _ in whole]),
        mean([wrong for _, wrong, _ in whole]),
        mean(lifts),
    )


def columns(groups: Sequence[Sequence[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    points = [point for group in groups for point in group]
    return [point[0] for point in points], [point[1] for point in points]


def sign(value: float) -> int:
    return (value > TIE) - (value < -TIE)


def verdict(found: Evaluation, failure_limit: float) -> list[str]:
    """Why AWPO cannot work with a judge of these figures, a line each; none where nothing speaks against it.

    These are the least that is asked: it answers (training stops past `failure_limit`, a share), it prefers the right
    completion more often than chance (95% interval over all pairs), its scores rise with the outcome within instances
    (the rho of method.md 2: below 0 it pulls against the outcome), and it cannot be talked up.
    """
    reasons = []
    if found.failed > failure_limit * found.judged:
        reasons.append(f"it gave no score for {found.failed} of {found.judged} thoughts")
    counted = [(kind.accuracy, kind.pairs - kind.failed) for kind in found.kinds if kind.accuracy is not None]
    pairs = sum(count for _, count in counted)
    if not pairs:
        return [*reasons, "no pair has two scores to compare"]
    share = sum(accuracy * count for accuracy, count in counted) / pairs
    low, high = wilson(share, pairs)
    if low <= 0.5:
        reasons.append(
            f"it prefers the right one in {share:.1%} of {pairs} pairs ({low:.1%} to {high:.1%}): chance is 50%"
        )
    if found.outcome_within is None:
        reasons.append("its scores do not vary with the outcome within instances")
    elif found.outcome_within <= TIE:
        reasons.append(
            f"its scores do not rise with the outcome within instances (correlation {found.outcome_within:.2f})"
        )
    for kind in found.kinds:
        if kind.lift is not None and kind.lift > TALK_ADDS:
            reasons.append(f"{kind.kind} adds {kind.lift:.2f} to the score of a wrong completion")
    return reasons
