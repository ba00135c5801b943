"""Gate, difficulty weight and clip radius, by hand."""

import math

import pytest
import torch

from awpo.methods import Method, get_method
from tests.awpo.estimates import NAN, first, near, one, run


@pytest.mark.parametrize(
    ("reasoning", "ratio", "correlation"),
    [
        ([2, 0, 2, 0], math.sqrt(0.5), math.sqrt(0.5)),  # independent: rho = 0, s = 1
        ([2, 2, 0, 0], 0.5, 1.0),  # agrees: rho = 1, s = 1
        ([1, 1, 3, 3], NAN, 0.0),  # contradicts: rho = -1, s = 1
        ([0, 0, 4, 4], 1.0, -1.0),  # contradicts: rho = -1, s = 2
    ],
)
def test_ratio_and_correlation(reasoning, ratio, correlation):
    result = run("awpo", [[1, 1, -1, -1]], [reasoning])
    assert one(result.stats["ratio"]) == pytest.approx(ratio, nan_ok=True)
    assert one(result.stats["correlation"]) == pytest.approx(correlation, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "weight"),
    [
        ("awpo", {}, 1),  # 0.7071 >= 0.7
        ("awpo", {"ratio_min": 0.71}, 0),
        ("awpo", {"ratio_min": math.sqrt(0.5)}, 1),  # met exactly
        ("awpo", {"eps_mix": 1.42}, 1),  # the paper's rho = 1.4142 <= eps_mix
        ("awpo", {"eps_mix": 1.41}, 0),
        ("awpo_soft", {}, math.sqrt(0.5)),
        ("awpo_correlation", {}, 1),
        ("awpo_correlation", {"c_min": 0.71}, 0),
        ("awpo_correlation", {"c_min": 0.7071}, 1),
        ("awpo_low_variance", {}, 0),  # std 1 > 0.05 x 7
        ("awpo_low_variance", {"tau": 1 / 7}, 1),
        ("awpo_low_variance", {"tau": 0.14}, 0),
        ("awpo_no_gating", {}, 1),
        ("awpo", {"gate": "never"}, 0),
    ],
)
def test_gates_on_an_independent_judge(name, changes, weight):
    result = run(get_method(name).changed(difficulty="none", **changes), [[1, 1, -1, -1]], [[2, 0, 2, 0]])
    assert one(result.stats["gate"]) == pytest.approx(weight)
    mixed = math.sqrt(2)  # R_mix = 3, 1, 1, -1 before centring
    expected = [(1 - weight) + weight * mixed, 1 - weight, -(1 - weight), -(1 - weight) - weight * mixed]
    assert first(result) == near(expected)
    assert one(result.clip_low) == pytest.approx(0.2 * (1 - weight * (1 - math.sqrt(0.5))))


def test_low_variance_is_measured_by_the_groups_own_range():
    """A std of 0.25 is under 5% of 7 (calls are due), and above 5% of 4 (a reply is)."""
    outcome, reasoning = [[0.25, -0.25, 0.25, -0.25]], [[2, 2, 0, 0]]
    assert one(run("awpo_low_variance", outcome, reasoning).stats["gate"]) == 1
    assert one(run("awpo_low_variance", outcome, reasoning, r_max=1).stats["gate"]) == 0


def test_a_failed_judgement_closes_its_own_group_only():
    outcome, reasoning = [[4, -2, 1, 1]], [[0.1, 0.2, 0.9, 0.4]]
    both = run("awpo", outcome * 2, [*reasoning, [0.1, NAN, 0.9, 0.4]])
    assert both.stats["gate"].tolist() == [1, 0]
    assert both.stats["closed_by_failure"].tolist() == [False, True]
    assert first(both) == first(run("awpo", outcome, reasoning))
    assert both.advantages[1].tolist() == near([1.388239, -1.388239, 0, 0])


def test_the_soft_gate_is_open_no_further_than_all_the_way():
    # r = 1.0062 on the worked example: the mixture alone, not 1.0062 of it
    rewards = [[4, -2, 1, 1]], [[0.1, 0.2, 0.9, 0.4]]
    result = run("awpo_soft", *rewards)
    assert one(result.stats["gate"]) == 1
    assert first(result) == first(run("awpo", *rewards))


def test_how_much_below_a_threshold_still_meets_it():
    method = get_method("awpo").changed(difficulty="band")
    weights = [
        one(run(method, [[0.2 - below]], [[0]], r_min=0, r_max=1).stats["difficulty"])
        for below in (0.0, 0.7e-6, 1e-6, 1.5e-6)
    ]
    assert weights == pytest.approx([1, 1, 1, 0.1])


def test_the_band_of_difficulty_ends_where_it_says():
    # p = mean / 10 on either side of 0.2 and 0.8, and on them, in float32 where 0.2 is not 0.2
    means = [1.99, 2.0, 2.01, 7.99, 8.0, 8.01]
    for dtype in (torch.float32, torch.float64):
        method = get_method("awpo").changed(difficulty="band", difficulty_floor=0.3)
        result = run(method, [[m, m] for m in means], [[0, 0]] * 6, r_min=0, r_max=10, dtype=dtype)
        assert result.stats["difficulty"].tolist() == pytest.approx([0.3, 1, 1, 1, 1, 0.3])


@pytest.mark.parametrize("floor", [0.0, 0.1, 0.3, 0.7, 1.0])
def test_the_floor_is_where_difficulty_is_least_and_no_form_passes_one(floor):
    outcome = [[0.0, 0.0], [5.0, 5.0], [10.0, 10.0]]
    for difficulty, least in (("parabola", floor), ("band", floor), ("none", 1), ("gaussian", None)):
        values = {**get_method("awpo").to_json(), "difficulty": difficulty, "difficulty_floor": floor}
        method = Method.read(values, "here")
        weights = run(method, outcome, [[0, 0]] * 3, r_min=0, r_max=10).stats["difficulty"].tolist()
        least = floor + (1 - floor) * math.exp(-2) if least is None else least
        assert weights == pytest.approx([least, 1, least])


def test_lambda_scales_the_reasoning_reward():
    method = get_method("awpo").changed(mix_coefficient=0.5, difficulty="none")
    result = run(method, [[1, 1, -1, -1]], [[4, 0, 4, 0]])
    assert one(result.stats["ratio"]) == pytest.approx(math.sqrt(0.5))
    assert first(result) == near([math.sqrt(2), 0, 0, -math.sqrt(2)])
    nothing = run(get_method("awpo").changed(mix_coefficient=0), [[1, 1, -1, -1]], [[4, 0, 4, 0]])
    assert one(nothing.stats["ratio"]) == 1


@pytest.mark.parametrize(
    ("difficulty", "weights"),
    [
        # p = 0, 0.1, 0.2, 0.5, 0.8, 1
        ("parabola", [0.1, 0.424, 0.676, 1.0, 0.676, 0.1]),
        ("gaussian", [0.221802, 0.350234, 0.538077, 1.0, 0.538077, 0.221802]),
        ("band", [0.1, 0.1, 1, 1, 1, 0.1]),
        ("none", [1, 1, 1, 1, 1, 1]),
    ],
)
def test_difficulty_weights(difficulty, weights):
    means = [0.0, 1.0, 2.0, 5.0, 8.0, 10.0]
    result = run(
        get_method("awpo").changed(difficulty=difficulty), [[m, m] for m in means], [[0, 0]] * 6, r_min=0, r_max=10
    )
    assert result.stats["difficulty"].tolist() == pytest.approx(weights, abs=1e-6)


def test_an_overlong_penalty_cannot_push_the_difficulty_weight_below_its_floor():
    result = run(get_method("awpo").changed(overlong_share=0.2), [[-4, -4]], [[1, 1]])
    assert one(result.stats["difficulty"]) == pytest.approx(0.1)


def test_an_outcome_that_rounding_carries_past_its_range_has_the_weight_of_the_end():
    for outcome in (4 + 3e-5, -3 - 2e-5):
        assert one(run("awpo", [[outcome, outcome]], [[1, 1]]).stats["difficulty"]) == 0.1


def test_rounding_of_float32_does_not_decide_a_threshold():
    # std = 0.35 = tau (r_max - r_min), but 1.7 is a little more than 1.7 in float32
    result = run("awpo_low_variance", [[1.7, 1.0]], [[1, 2]], dtype=torch.float32)
    assert one(result.stats["gate"]) == 1


def test_renormalised_weights_have_mean_one_over_the_counted_groups():
    method = get_method("awpo").changed(renormalise=True)
    outcome, reasoning = [[0, 1], [4, 0], [1, 1]], [[0, 0]] * 3
    result = run(method, outcome, reasoning, valid=[[True, True], [True, True], [False, False]])
    # p = 1/2 and 5/7: weights 1 and 0.834694, mean 0.917347
    assert result.stats["difficulty"].tolist() == pytest.approx([1.090100, 0.909900, 0], abs=1e-6)


def test_renormalised_weights_differ_by_one_factor_only():
    """The batch is seen through the mean of the weights alone; clip radii and gates are as they were."""
    outcome, reasoning = [[4, -2, 1, 1], [3, 3, 3, 2], [-3, -3, -3, 1]], [[0.1, 0.2, 0.9, 0.4]] * 3
    plain = run("awpo", outcome, reasoning)
    scaled = run(get_method("awpo").changed(renormalise=True), outcome, reasoning)
    assert scaled.stats["difficulty"].mean().item() == pytest.approx(1)
    factor = 3 / plain.stats["difficulty"].sum().item()
    torch.testing.assert_close(scaled.advantages, factor * plain.advantages, atol=1e-12, rtol=0)
    assert scaled.clip_low.tolist() == plain.clip_low.tolist()
    # a sum of weights below 1 is scaled like any other
    assert one(run(get_method("awpo").changed(renormalise=True), [[4, 4]], [[0, 1]]).stats["difficulty"]) == 1
    # where every weight is 0 there is nothing to scale
    nothing = get_method("awpo").changed(renormalise=True, difficulty_floor=0)
    assert run(nothing, [[4, 4]], [[0, 1]]).advantages.tolist() == [[0, 0]]
