"""Intervals against published values, brute force and what must hold by construction."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from evaluation.statistics import (
    _resampled_means,
    clustered_share,
    holm,
    mcnemar,
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


def test_items_that_are_their_own_dialogues_have_wilsons_interval() -> None:
    for right in (0, 3, 81, 263):
        estimate = clustered_share([1.0] * right + [0.0] * (263 - right), range(263))
        assert (estimate.low, estimate.high) == pytest.approx(wilson(right, 263))
        assert (estimate.items, estimate.clusters) == (263, 263)


def test_the_effective_number_of_items_by_hand() -> None:
    """Ten dialogues of three items, in five of them all right, in five all wrong: worth ten items, less Student's due."""
    values = [1.0] * 15 + [0.0] * 15
    estimate = clustered_share(values, [item // 3 for item in range(30)])
    # Residuals are 3 - 1.5 or -1.5: variance 10 / 9 * 10 * 1.5^2 / 30^2 = 1 / 36; of 30 items alone 0.25 / 29.
    effective = 30 / ((1 / 36) / (0.25 / 29)) * (2.0452296 / 2.2621572) ** 2  # t(29), t(9)
    assert effective == pytest.approx(7.61, abs=0.005)
    assert (estimate.low, estimate.high) == pytest.approx(wilson(effective / 2, effective), abs=1e-6)


def test_items_of_one_dialogue_are_not_independent() -> None:
    """Each item five times over in its dialogue is about as much evidence as once."""
    values = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.5, 0.25])
    once = clustered_share(values, range(10))
    five = clustered_share(np.repeat(values, 5), np.repeat(np.arange(10), 5).tolist())
    loose = clustered_share(np.repeat(values, 5), range(50))
    assert once.high - once.low < five.high - five.low < 1.2 * (once.high - once.low)
    assert loose.high - loose.low < 0.6 * (once.high - once.low)


def test_means_over_samples_know_more_than_verdicts() -> None:
    """Items whose samples are half right each say more of the mean than items that are right or wrong."""
    halves = clustered_share([0.5, 0.375, 0.625, 0.5] * 10, range(40))
    verdicts = clustered_share([0.0, 1.0, 0.0, 1.0] * 10, range(40))
    assert halves.high - halves.low < 0.3 * (verdicts.high - verdicts.low)


def test_no_spread_is_not_certainty() -> None:
    for value in (0.0, 1.0):
        estimate = clustered_share([value] * 16, [item // 2 for item in range(16)])
        assert (estimate.low, estimate.high) == pytest.approx(wilson(8 * value, 8))
    assert (clustered_share([0.4, 0.6], ["one", "one"]).low, clustered_share([1.0], ["one"]).high) == (0.0, 1.0)
    lone = paired_difference([0.0, 1.0], [1.0, 1.0], ["one", "one"])
    assert (lone.value, lone.low, lone.high) == (0.5, -1.0, 1.0)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 5)), min_size=1, max_size=30),
)
def test_intervals_hold_the_estimate_and_keep_their_bounds(items: list[tuple[float, float, int]]) -> None:
    first, second, clusters = zip(*items, strict=True)
    share = clustered_share(first, clusters)
    assert 0 <= share.low <= share.value + 1e-9
    assert share.value - 1e-9 <= share.high <= 1
    difference = paired_difference(first, second, clusters, resamples=200)
    assert -1 <= difference.low <= difference.high <= 1
    assert share.clusters == difference.clusters == len(set(clusters))


def test_a_difference_of_single_items_has_the_normal_interval() -> None:
    before, after = [0.0] * 300 + [1.0] * 100, [0.0] * 250 + [1.0] * 150
    estimate = paired_difference(before, after, range(400), resamples=20_000)
    half = 1.959964 * math.sqrt(0.125 * 0.875 / 400)
    assert (estimate.low, estimate.high) == pytest.approx((0.125 - half, 0.125 + half), abs=0.003)


def test_the_interval_of_a_difference_is_expanded_by_students_quantile() -> None:
    """Of twelve dialogues and the two items that are added: t(11) instead of z, and sqrt(12 / 11) as wide."""
    differences = np.linspace(-0.3, 0.5, 12)
    found = paired_difference(np.zeros(12), np.maximum(differences, 0), range(12), resamples=200_000)
    with_added = np.append(np.maximum(differences, 0), (0.5 * math.sqrt(0.5), -0.5 * math.sqrt(0.5)))
    half = 2.2009852 * math.sqrt(12 / 11) * with_added.std() / math.sqrt(14)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.03)
    assert found.value == pytest.approx(np.maximum(differences, 0).mean())


def test_dialogues_of_equal_sums_may_be_drawn_together() -> None:
    """The bootstrap's means have the moments of resampled dialogues, whatever is drawn together."""
    sums, sizes = np.array([1.0, 1.0, 0.0, 2.0, 0.0, 0.0]), np.array([2.0, 2.0, 1.0, 3.0, 1.0, 1.0])
    means = _resampled_means(sums, sizes, 100_000, 0)
    index = np.random.default_rng(1).integers(6, size=(100_000, 6))
    plain = sums[index].sum(axis=1) / sizes[index].sum(axis=1)
    assert means.mean() == pytest.approx(plain.mean(), abs=0.003)
    assert np.quantile(means, (0.025, 0.5, 0.975)) == pytest.approx(np.quantile(plain, (0.025, 0.5, 0.975)), abs=0.01)


def test_the_bootstrap_is_repeatable_and_seeded() -> None:
    values = np.random.default_rng(3).random((2, 60))
    found = [paired_difference(*values, range(60), seed=seed) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_a_higher_confidence_is_a_wider_interval() -> None:
    values = np.random.default_rng(3).random((2, 60))
    usual, wide = (paired_difference(*values, range(60), confidence=level) for level in (0.95, 0.995))
    assert wide.low < usual.low < usual.high < wide.high


def test_paired_difference_uses_the_pairing() -> None:
    """Item difficulty varies widely, the second run is better by 0.1 everywhere but for one tie."""
    first = np.linspace(0.0, 0.9, 50)
    second = first + 0.1
    second[0] = first[0]
    estimate = paired_difference(first, second, range(50))
    assert estimate.value == pytest.approx(0.098)
    assert 0.08 < estimate.low < 0.098 < estimate.high < 0.105
    opposite = paired_difference(second, first, range(50))
    assert opposite.value == pytest.approx(-0.098)


def test_equal_runs_differ_by_zero_within_bounds() -> None:
    estimate = paired_difference([1.0, 0.0, 1.0], [1.0, 0.0, 1.0], "abc")
    assert estimate.value == 0.0
    # at most as many dialogues can differ as Wilson's bound leaves for what was seen in none of three
    assert (estimate.low, estimate.high) == pytest.approx((-wilson(0, 3)[1], wilson(0, 3)[1]))


def test_values_and_clusters_must_match() -> None:
    with pytest.raises(ValueError, match="2 values for 1 cluster"):
        clustered_share([1.0, 0.0], ["a"])
    with pytest.raises(ValueError, match="0 values"):
        clustered_share([], [])
    with pytest.raises(ValueError, match="same items"):
        paired_difference([1.0], [1.0, 0.0], "a")


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (0, 1), (1, 5), (4, 4), (3, 14), (40, 61), (180, 240)])
def test_mcnemar_is_the_binomial_test_of_the_discordant(lost: int, won: int) -> None:
    first = [1] * lost + [0] * won + [1] * 20 + [0] * 7
    second = [0] * lost + [1] * won + [1] * 20 + [0] * 7
    expected = stats.binomtest(lost, lost + won).pvalue if lost + won else 1.0
    assert mcnemar(first, second) == pytest.approx(expected)
    assert mcnemar(second, first) == pytest.approx(expected)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 6)), min_size=1, max_size=24))
def test_mcnemar_by_dialogue_counts_every_way_the_coins_may_fall(items: list[tuple[bool, bool, int]]) -> None:
    first, second, clusters = zip(*items, strict=True)
    sums = [sum(b - a for a, b, label in items if label == chosen) for chosen in range(7)]
    falls = [sum(x * y for x, y in zip(sums, signs, strict=True)) for signs in itertools.product((-1, 1), repeat=7)]
    expected = sum(abs(fall) >= abs(sum(sums)) for fall in falls) / len(falls)
    assert mcnemar(first, second, clusters) == pytest.approx(expected)


def test_mcnemar_takes_verdicts_of_the_same_items() -> None:
    with pytest.raises(ValueError, match="each 0 or 1"):
        mcnemar([0.5], [1])
    with pytest.raises(ValueError, match="same items"):
        mcnemar([1], [1, 0])
    with pytest.raises(ValueError, match="same items"):
        mcnemar([], [])


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
