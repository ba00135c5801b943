"""Intervals and differences, as pure functions of numbers.

Accuracies are shares in [0, 1]. Items of one dialogue are not independent (they share tools, wording and a plan),
so whatever is resampled is resampled by dialogue.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95
_Z = 1.959963984540054  # the normal quantile of CONFIDENCE, two-sided
# Resampling weights are drawn in pieces of at most this many numbers, which bounds the memory.
_PIECE = 1 << 23

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its two-sided 95% interval, over `items` items of `clusters` dialogues."""

    value: float
    low: float
    high: float
    items: int
    clusters: int


def wilson(successes: float, total: float) -> tuple[float, float]:
    """The Wilson score interval of a proportion (Wilson 1927), 95%; (0, 1) where `total` is 0.

    `successes` may be fractional, 0 <= successes <= total.
    """
    if total <= 0:
        return 0.0, 1.0
    share, square = successes / total, _Z * _Z
    centre = (share + square / (2 * total)) / (1 + square / total)
    half = _Z * math.sqrt(share * (1 - share) / total + square / (4 * total * total)) / (1 + square / total)
    # At 0 and 1 the bound is exact; rounding would leave 1e-17 there.
    return (0.0 if share == 0 else max(0.0, centre - half)), (1.0 if share == 1 else min(1.0, centre + half))


def clustered_bootstrap(
    values: Sequence[float] | Vector,
    clusters: Sequence[Hashable],
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """The mean of `values` (items,) with a percentile interval from resampling whole clusters (items,).

    `bounds` are the least and greatest value there can be: with fewer than two clusters nothing is known of the
    spread, and the interval is all of them. Where all values are equal a bootstrap has no spread either, although
    a few equal values prove little; then as many clusters as Wilson's bound leaves for the unseen are taken to lie
    at a bound. For all right or all wrong answers that is Wilson's interval over the clusters.
    Raises ValueError for no values, or values and clusters of different length.
    """
    data = np.asarray(values, dtype=np.float64)
    if not len(data) or len(data) != len(clusters):
        raise ValueError(f"{len(data)} values for {len(clusters)} cluster labels; need as many, and at least one")
    codes: dict[Hashable, int] = {}
    index = np.asarray([codes.setdefault(label, len(codes)) for label in clusters])
    count = len(codes)
    mean = float(data.mean())
    low, high = bounds
    if count < 2:
        return Estimate(mean, low, high, len(data), count)
    if data.max() == data.min():
        unseen = wilson(0, count)[1]
        return Estimate(mean, mean - unseen * (mean - low), mean + unseen * (high - mean), len(data), count)
    means = _resampled_means(np.bincount(index, data), np.bincount(index), resamples, seed)
    tail = (1 - CONFIDENCE) / 2
    bottom, top = np.quantile(means, (tail, 1 - tail))
    return Estimate(mean, float(bottom), float(top), len(data), count)


def _resampled_means(sums: NDArray[Any], sizes: NDArray[Any], resamples: int, seed: int) -> Vector:
    """Means over items of `resamples` samples of clusters with replacement; sums and sizes are per cluster."""
    generator = np.random.default_rng(seed)
    count = len(sums)
    equal = np.full(count, 1 / count)
    means = np.empty(resamples)
    piece = max(1, _PIECE // count)
    for start in range(0, resamples, piece):
        weights = generator.multinomial(count, equal, size=min(piece, resamples - start))
        means[start : start + len(weights)] = (weights @ sums) / (weights @ sizes)
    return means


def paired_difference(
    first: Sequence[float] | Vector,
    second: Sequence[float] | Vector,
    clusters: Sequence[Hashable],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """Mean of `second - first` over the same items, (items,) each in [0, 1], resampled by cluster."""
    one, two = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if one.shape != two.shape:
        raise ValueError(f"a paired difference needs the same items on both sides, not {len(one)} and {len(two)}")
    return clustered_bootstrap(two - one, clusters, bounds=(-1.0, 1.0), resamples=resamples, seed=seed)


def weighted_mean(parts: Sequence[tuple[float, int]], weights: Sequence[float]) -> tuple[float, float, float]:
    """Mean of independent proportions by fixed weights, with a normal 95% interval clipped to [0, 1].

    `parts` holds (share, items) per stratum. The variance is that of the stratified estimator, sum of
    w^2 p(1 - p) / n with the Agresti-Coull p, so that a stratum without a miss does not count as certain.
    """
    total = sum(weights)
    if not parts or total <= 0 or any(items <= 0 for _, items in parts):
        raise ValueError("a weighted mean needs at least one part, items in each and a positive total weight")
    mean = variance = 0.0
    for (share, items), weight in zip(parts, weights, strict=True):
        adjusted = (share * items + 2) / (items + 4)
        mean += weight / total * share
        variance += (weight / total) ** 2 * adjusted * (1 - adjusted) / (items + 4)
    half = _Z * math.sqrt(variance)
    return mean, max(0.0, mean - half), min(1.0, mean + half)


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """The chance that at least one of k samples is correct, unbiased: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021 (arXiv 2107.03374), equation 1; `correct` of `samples` were, 1 <= k <= samples.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples with {correct} correct is not defined")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


@dataclass(frozen=True, slots=True)
class MeanOverSeeds:
    """A mean over seeds with Student's two-sided 95% interval; the bounds are NaN for a single seed."""

    mean: float
    low: float
    high: float
    seeds: int


def mean_over_seeds(values: Sequence[float]) -> MeanOverSeeds:
    """Student's t interval of a mean, by the sample standard deviation. Raises ValueError for no values."""
    if not values:
        raise ValueError("a mean over seeds needs at least one seed")
    from scipy import stats

    data = np.asarray(values, dtype=np.float64)
    count, mean = len(data), float(data.mean())
    if count < 2:
        return MeanOverSeeds(mean, math.nan, math.nan, count)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * data.std(ddof=1) / math.sqrt(count))
    return MeanOverSeeds(mean, mean - half, mean + half, count)


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Mean of second - first over pairs, its 95% t interval, and the two-sided p of no difference."""

    difference: float
    low: float
    high: float
    p: float
    pairs: int


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Student's paired t test. Pairs that all differ by the same amount have p = 0, or 1 where that is 0.

    Raises ValueError for fewer than two pairs, or unequal numbers.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"a paired test needs two pairs or more, not {len(first)} and {len(second)} values")
    from scipy import stats

    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    mean = mean_over_seeds(differences.tolist())
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    if error == 0:
        p = 1.0 if mean.mean == 0 else 0.0
    else:
        p = float(2 * stats.t.sf(abs(mean.mean) / error, len(differences) - 1))
    return PairedTest(mean.mean, mean.low, mean.high, p, len(differences))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values, in order, that hold the chance of any false finding among them (Holm 1979).

    The k-th smallest of m is multiplied by m - k + 1, is no smaller than the one before it and at most 1.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
