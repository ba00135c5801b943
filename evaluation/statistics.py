"""Intervals and differences, as pure functions of numbers.

Accuracies are shares in [0, 1]. Items of one dialogue are not independent (they share tools, wording and a plan),
so intervals and tests are by dialogue. That the intervals hold what they promise is simulated in
tests/evaluation/test_coverage.py; docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95
_Z = 1.959963984540054  # the normal quantile of CONFIDENCE, two-sided
# Resampling weights are drawn in pieces of at most this many numbers, which bounds the memory.
_PIECE = 1 << 23
_NO_SPREAD = 1e-12  # a variance or range below this is rounding

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its two-sided 95% interval, over `items` items of `clusters` dialogues.

    `effective` is the number of independent items that a share's interval is worth, None where it has no such number.
    """

    value: float
    low: float
    high: float
    items: int
    clusters: int
    effective: float | None = None


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


def clustered_share(values: Sequence[float] | Vector, clusters: Sequence[Hashable]) -> Estimate:
    """The mean of `values` (items,), each in [0, 1], with Wilson's interval over the effective number of items.

    Items of one dialogue (`clusters`, a label per item) are worth less than as many independent ones. The effective
    number is n / deff * (t(n - 1) / t(c - 1))^2 for n items in c clusters (Korn and Graubard 1998, Survey Methodology
    24:193), where deff, the design effect, is the linearised variance of the mean between clusters over that of n
    independent items; Wilson's interval by it is what Dean and Pagano 2015 (J. Survey Statistics and Methodology
    3:484) recommend. Where every item is a dialogue of its own this is Wilson's interval of n.

    Why not a bootstrap: the percentile interval of 40 dialogues covers a share of 0.05 in 89% of samples instead of
    95%, since a sample without the rare outcome has no spread. Here values without spread (all right, all wrong)
    count as one item per cluster. With fewer than two clusters nothing is known of the spread: the interval is (0, 1).

    Raises ValueError for no values, or values and clusters of different length.
    """
    sums, sizes = _by_cluster(values, clusters)
    items, count = int(sizes.sum()), len(sums)
    mean = float(sums.sum() / items)
    if count < 2:
        return Estimate(mean, 0.0, 1.0, items, count, 1.0)
    variance = _variance_of_mean(sums, sizes)
    effective = float(count)
    if variance > _NO_SPREAD and 0 < mean < 1:
        effective = mean * (1 - mean) / (items - 1) / variance * items
        effective *= (_student(items - 1) / _student(count - 1)) ** 2
    low, high = wilson(mean * effective, effective)
    return Estimate(mean, low, high, items, count, effective)


def paired_difference(
    first: Sequence[float] | Vector,
    second: Sequence[float] | Vector,
    clusters: Sequence[Hashable],
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """Mean of `second - first` over the same items, (items,) each in [0, 1], with a bootstrap interval by cluster.

    Whole clusters (dialogues) are resampled. Two things make up for what percentiles lack where differences are few:

    - The tails are cut at Phi(-sqrt(c / (c - 1)) t(c - 1)) for c clusters, not at Phi(-z): percentiles are too narrow
      by sqrt((c - 1) / c) and know nothing of t (Hesterberg 2015, The American Statistician 69:371, "expanded").
    - Two items are added, one for either run, that together add 1/2 to each number of discordant items (Agresti and
      Min 2005, Statistics in Medicine 24:729; here of the size of the largest difference seen, which is 1 for
      verdicts): a sample that happens to hold few of them has too little spread. The value itself is without them.

    For 100 items of which the runs have 5% and 10% right, percentiles alone cover the truth in 91% of samples.

    With fewer than two clusters nothing is known of the spread, and the interval is (-1, 1). Where all differences are
    equal a bootstrap has no spread either, although a few equal values prove little; then as many clusters as Wilson's
    bound leaves for the unseen are taken to lie at a bound.

    Raises ValueError for no items, or numbers of values and clusters that differ.
    """
    one, two = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if one.shape != two.shape:
        raise ValueError(f"a paired difference needs the same items on both sides, not {len(one)} and {len(two)}")
    differences = two - one
    sums, sizes = _by_cluster(differences, clusters)
    mean, count = float(differences.mean()), len(sums)
    if count < 2:
        return Estimate(mean, -1.0, 1.0, len(one), count)
    if differences.max() - differences.min() <= _NO_SPREAD:
        unseen = wilson(0, count)[1]
        return Estimate(mean, mean - unseen * (mean + 1), mean + unseen * (1 - mean), len(one), count)
    from scipy import special

    added = math.sqrt(0.5) * float(np.abs(differences).max())
    sums, sizes = np.append(sums, (added, -added)), np.append(sizes, (1.0, 1.0))
    tail = float(special.ndtr(-math.sqrt(count / (count - 1)) * _student(count - 1, confidence)))
    low, high = np.quantile(_resampled_means(sums, sizes, resamples, seed), (tail, 1 - tail))
    return Estimate(mean, float(low), float(high), len(one), count)


def _by_cluster(values: Sequence[float] | Vector, clusters: Sequence[Hashable]) -> tuple[Vector, Vector]:
    """Sum of values and number of items of each cluster, both (clusters,), in order of first appearance."""
    data = np.asarray(values, dtype=np.float64)
    if not len(data) or len(data) != len(clusters):
        raise ValueError(f"{len(data)} values for {len(clusters)} cluster labels; need as many, and at least one")
    codes: dict[Hashable, int] = {}
    index = np.asarray([codes.setdefault(label, len(codes)) for label in clusters])
    return np.bincount(index, data).astype(np.float64), np.bincount(index).astype(np.float64)


def _variance_of_mean(sums: Vector, sizes: Vector) -> float:
    """Variance of sum(sums) / sum(sizes) between clusters, linearised (Cochran 1977, Sampling Techniques, ch. 9A)."""
    count, items = len(sums), float(sizes.sum())
    residuals = sums - sums.sum() / items * sizes
    return float(count / (count - 1) * (residuals @ residuals)) / items**2


def _student(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Student's two-sided quantile."""
    from scipy import special

    return float(special.stdtrit(freedom, (1 + confidence) / 2))


def _resampled_means(sums: Vector, sizes: Vector, resamples: int, seed: int) -> Vector:
    """Means over items of `resamples` samples of clusters with replacement; sums and sizes are per cluster.

    Clusters of equal sum and size are drawn together, by how many of them there are: the same distribution, for a
    fraction of the random numbers.
    """
    kinds, counts = np.unique(np.stack([sums, sizes], axis=1), axis=0, return_counts=True)
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    piece = max(1, _PIECE // len(kinds))
    for start in range(0, resamples, piece):
        drawn = generator.multinomial(len(sums), counts / len(sums), size=min(piece, resamples - start))
        means[start : start + len(drawn)] = (drawn @ kinds[:, 0]) / (drawn @ kinds[:, 1])
    return means


def mcnemar(
    first: Sequence[bool | float], second: Sequence[bool | float], clusters: Sequence[Hashable] | None = None
) -> float:
    """The exact two-sided p of no difference between two runs that answered the same items right or wrong.

    McNemar 1947 (Psychometrika 12:153), exact: of the items that only one run has right, either run has as many as a
    fair coin would give it. Items of one dialogue (`clusters`, a label per item) do not fall independently; with
    several of them the coin is thrown per dialogue, and decides which run's verdicts are whose throughout it (a
    randomisation test, Fisher 1935). That is the same test where each dialogue has one item, and its distribution is
    computed in full, for few discordant items as for many.

    Raises ValueError for verdicts that are not 0 or 1, no items, or numbers that differ.
    """
    one, two = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if one.shape != two.shape or not len(one):
        raise ValueError(f"McNemar's test needs the same items on both sides, not {len(one)} and {len(two)}")
    if not np.isin(one, (0, 1)).all() or not np.isin(two, (0, 1)).all():
        raise ValueError("McNemar's test is of verdicts, each 0 or 1")
    sums, _ = _by_cluster(two - one, range(len(one)) if clusters is None else clusters)
    found = np.abs(np.rint(sums).astype(np.int64))
    most = int(found.sum())
    from scipy import stats

    # Chances of how much of `most` falls to one side: every dialogue gives all of its difference or nothing.
    singles = int((found == 1).sum())
    chances = stats.binom.pmf(np.arange(singles + 1), singles, 0.5)
    for size in found[found > 1]:
        grown = np.zeros(len(chances) + size)
        grown[: len(chances)] += chances / 2
        grown[size:] += chances / 2
        chances = grown
    observed = abs(int(np.rint(sums.sum())))
    sides = np.abs(2 * np.arange(most + 1) - most)
    return min(1.0, float(chances[sides >= observed].sum()))


def weighted_mean(parts: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float, float]:
    """Mean of independent proportions by fixed weights, with a normal 95% interval clipped to [0, 1].

    `parts` holds (share, items) per stratum; items of dialogues count by their effective number. The variance is that of the stratified estimator, sum of
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
