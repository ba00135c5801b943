"""Intervals against published values, brute force and what must hold by construction."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.statistics import (
    clustered_bootstrap,
    holm,
    mean_over_seeds,
    paired_difference,
    paired_test,
    pass_at_k,
    weighted_mean,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        # Newcombe 1998 (Statistics in Medicine 17:857), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0000),
    ],
)
def test_wilson_as_published(successes: int, total: int, low: float, high: float) -> None:
    assert wilson(successes, total) == pytest.approx((low, high), abs=6e-5)


def test_wilson_knows_nothing_of_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


def test_bootstrap_of_single_items_agrees_with_the_normal_interval() -> None:
    values = [1.0] * 120 + [0.0] * 280
    estimate = clustered_bootstrap(values, range(400))
    half = 1.959964 * math.sqrt(0.3 * 0.7 / 400)
    assert estimate.value == pytest.approx(0.3)
    assert (estimate.low, estimate.high) == pytest.approx((0.3 - half, 0.3 + half), abs=0.008)
    assert (estimate.items, estimate.clusters) == (400, 400)


def test_items_of_one_dialogue_are_not_independent() -> None:
    """Each item five times over in its dialogue is no more evidence than once."""
    values = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.5, 0.25])
    once = clustered_bootstrap(values, range(10))
    five = clustered_bootstrap(np.repeat(values, 5), np.repeat(np.arange(10), 5).tolist())
    assert (five.low, five.high) == pytest.approx((once.low, once.high))
    loose = clustered_bootstrap(np.repeat(values, 5), range(50))
    assert loose.high - loose.low < 0.6 * (once.high - once.low)


def test_bootstrap_weighs_items_not_dialogues() -> None:
    """A dialogue of nine ones and one of a single zero: the mean is 0.9, resamples are 0, 0.9 or 1."""
    estimate = clustered_bootstrap([1.0] * 9 + [0.0], ["a"] * 9 + ["b"])
    assert (estimate.value, estimate.low, estimate.high) == (pytest.approx(0.9), 0.0, 1.0)


def test_bootstrap_is_repeatable_and_seeded() -> None:
    values = np.random.default_rng(3).random(60)
    assert clustered_bootstrap(values, range(60), seed=1) == clustered_bootstrap(values, range(60), seed=1)
    assert clustered_bootstrap(values, range(60), seed=1) != clustered_bootstrap(values, range(60), seed=2)


def test_no_spread_is_not_certainty() -> None:
    for value in (0.0, 1.0):
        estimate = clustered_bootstrap([value] * 8, range(8))
        assert (estimate.low, estimate.high) == pytest.approx(wilson(8 * value, 8))
    assert clustered_bootstrap([0.4, 0.6], ["one", "one"]) == clustered_bootstrap([0.5, 0.5], ["one", "one"])
    assert (clustered_bootstrap([0.5], ["one"]).low, clustered_bootstrap([0.5], ["one"]).high) == (0.0, 1.0)


def test_paired_difference_uses_the_pairing() -> None:
    """Item difficulty varies widely, the second run is better by 0.1 everywhere but for one tie."""
    first = np.linspace(0.0, 0.9, 50)
    second = first + 0.1
    second[0] = first[0]
    estimate = paired_difference(first, second, range(50))
    assert estimate.value == pytest.approx(0.098)
    assert 0.08 < estimate.low <= 0.098 <= estimate.high <= 0.1 + 1e-12
    opposite = paired_difference(second, first, range(50))
    assert opposite.value == pytest.approx(-0.098)


def test_equal_runs_differ_by_zero_within_bounds() -> None:
    estimate = paired_difference([1.0, 0.0, 1.0], [1.0, 0.0, 1.0], "abc")
    assert estimate.value == 0.0
    # at most as many dialogues can differ as Wilson's bound leaves for what was seen in none of three
    assert (estimate.low, estimate.high) == pytest.approx((-wilson(0, 3)[1], wilson(0, 3)[1]))


def test_values_and_clusters_must_match() -> None:
    with pytest.raises(ValueError, match="2 values for 1 cluster"):
        clustered_bootstrap([1.0, 0.0], ["a"])
    with pytest.raises(ValueError, match="0 values"):
        clustered_bootstrap([], [])
    with pytest.raises(ValueError, match="same items"):
        paired_difference([1.0], [1.0, 0.0], "a")


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one() -> None:
    for correct, k in itertools.product(range(7), range(1, 7)):
        subsets = list(itertools.combinations(range(6), k))
        share = sum(any(index < correct for index in subset) for subset in subsets) / len(subsets)
        assert pass_at_k(correct, 6, k) == pytest.approx(share)
    with pytest.raises(ValueError, match="pass@9 of 8"):
        pass_at_k(1, 8, 9)


def test_weighted_mean() -> None:
    mean, low, high = weighted_mean([(1.0, 30), (0.0, 30)], [300, 100])
    assert mean == pytest.approx(0.75)
    # p = 32/34 and 2/34 in the variance: sqrt((9/16 + 1/16) * (32/34)(2/34) / 34) * 1.96
    half = 1.959964 * math.sqrt((9 + 1) / 16 * (32 / 34) * (2 / 34) / 34)
    assert (low, high) == pytest.approx((0.75 - half, 0.75 + half))
    with pytest.raises(ValueError, match="at least one part"):
        weighted_mean([], [])


def test_a_paired_t_test_by_hand() -> None:
    # Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t = 3.4641, p with 2 degrees of freedom 0.07418.
    found = paired_test([1.0, 1.0, 1.0], [2.0, 3.0, 4.0])
    assert found.difference == pytest.approx(2.0)
    assert found.p == pytest.approx(0.07418, abs=1e-5)
    assert (found.low, found.high) == (pytest.approx(2 - 2.484138, abs=1e-5), pytest.approx(2 + 2.484138, abs=1e-5))
    assert found.pairs == 3


def test_pairs_that_all_differ_alike() -> None:
    assert paired_test([0.0, 1.0], [0.0, 1.0]).p == 1.0
    assert paired_test([0.0, 1.0], [1.0, 2.0]).p == 0.0


def test_a_paired_test_needs_pairs() -> None:
    for first, second in (([1.0], [2.0]), ([1.0, 2.0], [1.0])):
        with pytest.raises(ValueError, match="two pairs or more"):
            paired_test(first, second)
    with pytest.raises(ValueError, match="at least one seed"):
        mean_over_seeds([])


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.03, 0.9: times 4, 3, 2, 1 and never falling.
    assert holm([0.02, 0.9, 0.01, 0.03]) == pytest.approx([0.06, 0.9, 0.04, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_is_between_the_raw_value_and_bonferronis(values: list[float]) -> None:
    for raw, adjusted in zip(values, holm(values), strict=True):
        assert raw <= adjusted <= min(1.0, raw * len(values))
