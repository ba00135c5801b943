"""Simulated truth: intervals cover it in 93 to 97 of 100 samples, tests find nothing where there is nothing.

Seeds are fixed. Of 2,000 samples the share covered has a standard error of 0.5 points, of 1,000 of 0.7, so that an
interval that covers in 95% is told from one that covers in 92% or 98%. Dialogues have one to four items, whose verdicts are drawn with the
dialogue's own chance (beta-binomial, intraclass correlation 0.3: dialogues of this project's corpora have 0.1 to 0.5).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from evaluation.statistics import clustered_share, mcnemar, paired_difference, wilson

CELLS = list(itertools.product((100, 400, 2000), (0.05, 0.3, 0.7)))
CORRELATION = 0.3
LEVELS = 1000
SAME = 0.5
"""The share of items on which luck is the same in both runs, beside the dialogue's difficulty, which always is."""


def covered(intervals: list[tuple[float, float]], truth: float) -> float:
    return sum(low <= truth <= high for low, high in intervals) / len(intervals)


def dialogues(items: int) -> NDArray[np.int64]:
    """The dialogue of each item, (items,): sizes 1, 2, 3, 4, 1, .."""
    sizes = np.resize([1, 2, 3, 4], items)
    return np.repeat(np.arange(items), sizes)[:items]


def chances(share: float) -> NDArray[np.float64]:
    """The chances of dialogues to be right, from the hardest to the easiest, (LEVELS,): beta with mean `share`."""
    quantiles = (np.arange(LEVELS) + 0.5) / LEVELS
    found = stats.beta.ppf(quantiles, share * (1 / CORRELATION - 1), (1 - share) * (1 / CORRELATION - 1))
    return found + (share - found.mean())  # what cutting the distribution into levels has moved, below 1e-3


def pairs(
    generator: np.random.Generator, samples: int, labels: NDArray[np.int64], first: float, second: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Verdicts of two runs on the same items, both (samples, items): a dialogue hard for one is hard for the other."""
    difficulty = generator.integers(LEVELS, size=(samples, labels.max() + 1))[:, labels]
    luck = generator.random((samples, len(labels)))
    other = np.where(generator.random(luck.shape) < SAME, luck, generator.random(luck.shape))
    one = luck < chances(first)[difficulty]
    two = other < chances(second)[difficulty]
    return one.astype(float), two.astype(float)


@pytest.mark.parametrize(("items", "share"), CELLS)
def test_wilson_covers_by_exact_computation(items: int, share: float) -> None:
    """No simulation: the chance of each count times whether its interval holds the truth. 93.7% to 96.6%."""
    counts = np.arange(items + 1)
    held = np.array([low <= share <= high for low, high in (wilson(int(count), items) for count in counts)])
    assert 0.93 <= float(stats.binom.pmf(counts, items, share)[held].sum()) <= 0.97


@pytest.mark.parametrize(("items", "share"), CELLS)
def test_a_share_of_items_in_dialogues_is_covered(items: int, share: float) -> None:
    labels = dialogues(items)
    samples, _ = pairs(np.random.default_rng(items), 2000, labels, share, share)
    found, naive = [], []
    for right in samples:
        estimate = clustered_share(right, labels.tolist())
        found.append((estimate.low, estimate.high))
        naive.append(wilson(right.sum(), items))
    assert 0.93 <= covered(found, share) <= 0.97
    assert covered(naive, share) < 0.92, "as if items were independent: the test would not notice dialogues"


@pytest.mark.slow
@pytest.mark.parametrize(("items", "share"), CELLS)
def test_a_difference_of_runs_on_the_same_items_is_covered(items: int, share: float) -> None:
    """An effect of 5 points, by the bootstrap over dialogues."""
    generator, labels = np.random.default_rng(items), dialogues(items)
    first, second = pairs(generator, 1000, labels, share, share + 0.05)
    found = [
        paired_difference(one, two, labels.tolist(), resamples=500) for one, two in zip(first, second, strict=True)
    ]
    assert 0.93 <= covered([(one.low, one.high) for one in found], 0.05) <= 0.97


@pytest.mark.parametrize("items", [100, 400])
def test_mcnemar_finds_no_more_than_it_may(items: int) -> None:
    """No difference: p below 0.05 in at most 5% of samples (exact tests stay below); per item, it would be in more."""
    generator, labels = np.random.default_rng(items), dialogues(items)
    p_values, naive = [], []
    for _ in range(1000):
        # Either run is the better one throughout a dialogue: what dialogues share, and independent items do not.
        swing = generator.choice((-0.25, 0.25), size=labels.max() + 1)[labels]
        one, two = generator.random(items) < 0.5 + swing, generator.random(items) < 0.5 - swing
        p_values.append(mcnemar(one, two, labels.tolist()))
        naive.append(mcnemar(one, two))
    assert 0.02 <= np.mean(np.array(p_values) < 0.05) <= 0.055
    assert np.mean(np.array(naive) < 0.05) > 0.07


def test_mcnemar_finds_a_difference_that_is_there() -> None:
    first, second = pairs(np.random.default_rng(0), 500, dialogues(400), 0.5, 0.6)
    labels = dialogues(400).tolist()
    assert np.mean([mcnemar(one, two, labels) < 0.05 for one, two in zip(first, second, strict=True)]) > 0.9
