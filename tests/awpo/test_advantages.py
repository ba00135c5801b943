"""Advantages: numbers worked out by hand from the formulas in the docstrings, then properties of any batch."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from awpo.advantages import Estimate, estimate
from awpo.errors import UserError
from awpo.groups import normalise
from awpo.methods import METHODS, Method, get_method

NAN = math.nan
TRAINED = [name for name, method in METHODS.items() if method.trains]
JUDGED = [name for name in TRAINED if METHODS[name].needs_judge]
AWPO = [name for name in TRAINED if METHODS[name].estimator == "awpo"]
OVER_THE_BATCH = ["gdpo", "dara"]


def run(
    method: str | Method,
    outcome: list[list[float]],
    reasoning: list[list[float]] | None = None,
    *,
    r_min: float = -3.0,
    r_max: float = 4.0,
    valid: list[list[bool]] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Estimate:
    method = get_method(method) if isinstance(method, str) else method
    rewards = {"outcome": torch.tensor(outcome, dtype=dtype)}
    if "format" in method.rewards:  # gdpo and dara: the whole outcome as `correct`, a format that is always wrong
        rewards["format"] = torch.zeros_like(rewards["outcome"])
        rewards["correct"] = rewards["outcome"].clone()
    if reasoning is not None:
        rewards["reasoning"] = torch.tensor(reasoning, dtype=dtype)
    return estimate(
        method,
        rewards,
        valid=None if valid is None else torch.tensor(valid),
        r_min=torch.full((len(outcome),), r_min, dtype=dtype),
        r_max=torch.full((len(outcome),), r_max, dtype=dtype),
    )


def one(values: torch.Tensor | float) -> float:
    return values.item() if isinstance(values, torch.Tensor) else values


def first(result: Estimate) -> list[float]:
    return result.advantages[0].tolist()


def near(values: list[float]) -> object:
    return pytest.approx(values, abs=2e-5)


# The worked example


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_worked_example(dtype):
    result = run("awpo", [[4, -2, 1, 1]], [[0.1, 0.2, 0.9, 0.4]], dtype=dtype)
    assert first(result) == pytest.approx([1.2571, -1.4899, 0.2328, 0], abs=5e-5)
    assert one(result.stats["ratio"]) == pytest.approx(1.0062, abs=5e-5)
    assert one(result.stats["difficulty"]) == pytest.approx(0.9816, abs=5e-5)
    assert one(result.stats["gate"]) == 1
    assert one(result.clip_low) == one(result.clip_high) == pytest.approx(0.2)
    assert result.advantages.dtype == result.clip_low.dtype == result.clip_high.dtype == dtype


# Degenerate groups. p = 4/7 has the difficulty weight 0.1 + 0.9 x 4 x 12/49 = 0.981633.


def test_all_outcomes_equal_and_not_saturated():
    outcome, reasoning = [[1, 1, 1, 1]], [[0, 1, 2, 3]]
    mixed = [0.981633 * a for a in (-1.341641, -0.447214, 0.447214, 1.341641)]
    for name, gate in (("awpo", 0), ("awpo_soft", 0), ("awpo_correlation", 0), ("awpo_low_variance", 1)):
        result = run(name, outcome, reasoning)
        assert one(result.stats["ratio"]) == 0
        assert one(result.stats["gate"]) == gate
        assert first(result) == (near(mixed) if gate else [0, 0, 0, 0])
    # u = 1 (1 - 0) takes the radius of the open gate to its floor
    assert one(run("awpo_low_variance", outcome, reasoning).clip_high) == pytest.approx(0.05)
    assert one(run("awpo", outcome, reasoning).clip_high) == pytest.approx(0.2)


def test_all_correct():
    outcome, reasoning = [[4, 4, 4, 4]], [[0, 1, 2, 3]]
    for name in AWPO:
        result = run(name, outcome, reasoning)
        assert one(result.stats["saturated"]) is True
        if name == "awpo_no_gating":  # open all the same; p = 1 leaves the floor of the difficulty weight
            assert first(result) == near([0.1 * a for a in (-1.341641, -0.447214, 0.447214, 1.341641)])
        else:
            assert one(result.stats["gate"]) == 0
            assert first(result) == [0, 0, 0, 0]


def test_saturation_has_a_margin_and_follows_the_instances_own_range():
    assert one(run("awpo", [[4, 4 - 1e-3]], [[1, 2]]).stats["saturated"]) is True
    assert one(run("awpo", [[4, 4 - 1e-2]], [[1, 2]]).stats["saturated"]) is False
    assert one(run("awpo", [[1, 1]], [[1, 2]]).stats["saturated"]) is False
    assert one(run("awpo", [[1, 1]], [[1, 2]], r_max=1).stats["saturated"]) is True


def test_where_saturation_begins():
    means = [4 - 0.9e-3, 4 - 1.1e-3]
    assert run("awpo", [[m, m] for m in means], [[1, 2]] * 2).stats["saturated"].tolist() == [True, False]
    # met exactly, by a lone rollout
    assert one(run("awpo", [[4 - 1e-3]], [[1]]).stats["saturated"]) is True


def test_all_reasoning_equal():
    result = run("awpo", [[4, -2, 1, 1]], [[0.7, 0.7, 0.7, 0.7]])
    assert one(result.stats["ratio"]) == 1
    assert one(result.stats["gate"]) == 1
    assert first(result) == near([1.388239, -1.388239, 0, 0])  # 0.981633 x sqrt 2
    assert one(result.clip_low) == pytest.approx(0.2)


@pytest.mark.parametrize("name", TRAINED)
def test_everything_equal(name):
    result = run(name, [[0.1, 0.1, 0.1], [4, 4, 4]], [[0.3, 0.3, 0.3], [3, 3, 3]])
    assert result.advantages.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert result.stats["ratio"].tolist() == [1, 1]


@pytest.mark.parametrize("name", TRAINED)
def test_a_lone_rollout(name):
    for outcome in (4.0, -3.0, 0.5):
        result = run(name, [[outcome]], [[1.3]])
        assert result.advantages.tolist() == [[0]]
        assert math.isfinite(one(result.clip_low))


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("std", ["population", "sample"])
def test_a_lone_valid_rollout(name, std):
    """One valid reward in a group must not make a NaN std that poisons the batch (trl#5773)."""
    method = Method.read({**get_method(name).to_json(), "std": std}, "here")
    result = run(method, [[2, 4, -1], [4, -2, 1]], [[1, 0, 2], [1, 2, 0]], valid=[[False, True, False], [True] * 3])
    assert result.advantages[0].tolist() == [0, 0, 0]
    assert result.advantages.isfinite().all()
    assert result.advantages[1].abs().max() > 0.05


@pytest.mark.parametrize("name", JUDGED)
def test_a_failed_judgement_leaves_the_outcome_alone(name):
    """Reported by others: a parse failure is scored 0."""
    failed = run(name, [[4, -2, 1, 1]], [[0.1, NAN, 0.9, 0.4]])
    # an outcome alone: a judge that says nothing
    silent = run(name, [[4, -2, 1, 1]], [[0, 0, 0, 0]])
    assert failed.advantages.tolist() == silent.advantages.tolist()
    assert first(failed)[0] > 0.5
    assert one(failed.stats["closed_by_failure"]) is True
    assert one(failed.stats["gate"]) == 0
    assert math.isnan(one(failed.stats["ratio"]))
    assert math.isnan(one(failed.stats["correlation"]))
    assert failed.stats["judge_failure_rate"] == 0.25
    assert one(failed.clip_low) == pytest.approx(0.2)
    assert failed.metrics()["gate/closed_by_failure_share"] == 1


@pytest.mark.parametrize("name", JUDGED)
def test_a_failed_judgement_of_an_invalid_rollout_closes_nothing(name):
    rewards = [[4, -2, 1, 1]], [[0.1, 0.2, 0.9, NAN]]
    result = run(name, *rewards, valid=[[True, True, True, False]])
    assert one(result.stats["closed_by_failure"]) is False
    assert result.stats["judge_failure_rate"] == 0
    assert first(result)[:3] == first(run(name, [[4, -2, 1]], [[0.1, 0.2, 0.9]]))


def test_judge_cancels_the_outcome_exactly():
    # R_mix = 3 in every rollout: no variance, so r has no value. p = 5/7: d = 0.1 + 0.9 x 4 x 10/49 = 0.834694
    outcome, reasoning = [[3, 1, 3, 1]], [[0, 2, 0, 2]]
    for name in ("awpo", "awpo_soft", "awpo_correlation", "awpo_low_variance"):
        result = run(name, outcome, reasoning)
        assert math.isnan(one(result.stats["ratio"]))
        assert one(result.stats["correlation"]) == 0
        assert one(result.stats["gate"]) == 0
        assert first(result) == near([0.834694, -0.834694, 0.834694, -0.834694])
    for name in ("awpo_no_gating", "grpo_mixed"):
        assert first(run(name, outcome, reasoning)) == [0, 0, 0, 0]


def test_the_ratio_read_literally_lets_in_a_judge_that_contradicts_the_outcome():
    # rho = -1, s = 2: r = 1 and c = -1, and the better rollout is pushed down. p = 4.5/7, d = 0.926531
    outcome, reasoning = [[2, 1]], [[0, 2]]
    result = run("awpo", outcome, reasoning)
    assert one(result.stats["ratio"]) == pytest.approx(1)
    assert one(result.stats["correlation"]) == pytest.approx(-1, abs=1e-4)
    assert first(result) == near([-0.926531 + 2e-6, 0.926531 - 2e-6])
    # the gate that asks for agreement keeps it out
    assert first(run("awpo_correlation", outcome, reasoning)) == near([0.926531, -0.926531])


@pytest.mark.parametrize(
    ("r_min", "weight"),
    [
        (-3.0, 0.49375),  # strict: p = 3.5 / 4
        (0.0, 1.0),  # compat: p = 0.5 / 1
    ],
)
def test_reply_only_groups_use_their_own_range(r_min, weight):
    result = run("awpo", [[1, 0, 1, 0]], [[1, 1, 1, 1]], r_min=r_min, r_max=1)
    assert one(result.stats["difficulty"]) == pytest.approx(weight)
    assert first(result) == near([weight, -weight, weight, -weight])


@pytest.mark.parametrize("name", TRAINED)
def test_the_last_bit_of_a_float32_is_no_variance(name):
    """A float residue in place of an exact zero std would become an advantage in the thousands (NeMo-RL#4161)."""
    above = torch.nextafter(torch.tensor(0.7), torch.tensor(1.0)).item()
    result = run(name, [[0.7, above, 0.7, 0.7]], [[0.7, 0.7, above, 0.7]], dtype=torch.float32)
    assert first(result) == [0, 0, 0, 0]
    assert result.stats["zero_variance_share/outcome"] == 1


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_have_no_variance_whatever_their_mean_rounds_to(name, dtype):
    """Seven times 0.1 has a mean that is not 0.1, and so a std that is not 0 (NeMo-RL#4161)."""
    values = (0.1, 1 / 3, 0.7, 2.3, -1.9)
    for count in (3, 5, 6, 7, 11):
        result = run(name, [[v] * count for v in values], [[abs(v)] * count for v in values], dtype=dtype)
        assert result.advantages.abs().max() == 0
        assert result.stats["zero_variance_share/outcome"] == 1
        assert result.stats["ratio"].tolist() == [1] * len(values)


def test_no_variance_is_relative_to_the_size_of_the_rewards():
    assert first(run("grpo", [[1, 1 + 0.9e-6]])) == [0, 0]
    assert first(run("grpo", [[1, 1 + 1.1e-6]])) != [0, 0]
    assert first(run("grpo", [[1, 1 + 2e-6]])) != [0, 0]
    assert first(run("grpo", [[1000, 1000 + 2e-6]], r_max=2000)) == [0, 0]
    assert first(run("grpo", [[-1000, -1000 + 2e-6]], r_min=-2000)) == [0, 0]
    assert first(run("grpo", [[1000, 1000 + 2e-6, 5]], r_max=2000, valid=[[True, True, False]])) == [0, 0, 0]
    assert first(run("grpo", [[0, 5e-7]])) == [0, 0]  # never finer than 1e-6
    assert first(run("grpo", [[0, 1e-6]])) == [0, 0]  # met exactly


def test_a_cancelling_judge_is_seen_through_the_rounding_of_large_rewards():
    # R_mix = out + 0.1 rea is 0 but for the rounding of its terms, which is 1e-8 of their size
    method = get_method("awpo").changed(mix_coefficient=0.1)
    result = run(method, [[-100.01, -300.03]], [[1000.1, 3000.3]], r_min=-1000, r_max=1000, dtype=torch.float32)
    assert math.isnan(one(result.stats["ratio"]))
    assert one(result.stats["gate"]) == 0


def test_normalise_reads_nothing_of_an_invalid_rollout():
    valid_PG = torch.tensor([[True, True, False], [True, True, False]])
    for garbage in (NAN, math.inf, 1e12):
        reward_PG = torch.tensor([[1.0, 3.0, garbage], [0.0, 0.0, garbage]], dtype=torch.float64)
        normalised = normalise(reward_PG, valid_PG, get_method("grpo"))
        assert normalised.centred_PG.tolist() == [[-1, 1, 0], [0, 0, 0]]
        assert normalised.std_P.tolist() == [1, 0]
        assert normalised.varies_P.tolist() == [True, False]


@pytest.mark.parametrize("name", TRAINED)
def test_an_invalid_rollout_is_in_no_statistic(name):
    """trl#5773: one valid reward makes a NaN std."""
    whole = run(name, [[4, -2, 1], [2, 0, -1]], [[0.1, 0.2, 0.9], [2, 1, 3]])
    # what stands at the invalid rollouts does not matter: outside the range, infinite, not a number
    padded = run(
        name,
        [[99, 4, -2, 1], [2, NAN, 0, -1], [1, math.inf, 2, 3]],
        [[-5, 0.1, 0.2, 0.9], [2, math.inf, 1, 3], [0, 0, 0, 0]],
        valid=[[False, True, True, True], [True, False, True, True], [False] * 4],
    )
    mask = torch.tensor([[False, True, True, True], [True, False, True, True], [False] * 4])
    torch.testing.assert_close(padded.advantages[mask], whole.advantages.flatten(), atol=1e-12, rtol=0)
    assert (padded.advantages[~mask] == 0).all()
    for name in ("ratio", "correlation", "gate", "difficulty", "radius"):
        torch.testing.assert_close(padded.stats[name][:2], whole.stats[name], atol=1e-12, rtol=0, equal_nan=True)
    assert padded.stats["counted"].tolist() == [True, True, False]
    assert padded.stats["saturated"].tolist()[2] is False
    assert padded.metrics() == pytest.approx(whole.metrics())


def test_a_batch_without_a_valid_rollout():
    for name in TRAINED:
        result = run(name, [[1, 2]], [[1, 2]], valid=[[False, False]])
        assert result.advantages.tolist() == [[0, 0]]
        assert all(math.isfinite(value) for value in result.metrics().values())
        assert result.stats["judge_failure_rate"] == 0
        assert result.stats["zero_variance_share/outcome"] == 0
    assert one(run("awpo", [[-1, -2]], [[1, 2]], r_max=-0.5, valid=[[False, False]]).stats["saturated"]) is False


def test_a_failed_judgement_of_a_lone_rollout():
    result = run("awpo", [[1]], [[NAN]])
    assert result.stats["judge_failure_rate"] == 1
    assert result.advantages.tolist() == [[0]]


# Gate, difficulty and clip radius by hand


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


# Baselines by hand


def test_grpo_population_and_sample():
    assert first(run("grpo", [[4, -2, 1, 1]])) == near([1.414213, -1.414213, 0, 0])
    trl = get_method("grpo").changed(std="sample", eps=1e-4)
    assert first(run(trl, [[4, -2, 1, 1]])) == near([3 / (math.sqrt(6) + 1e-4), -3 / (math.sqrt(6) + 1e-4), 0, 0])


def test_the_sample_std_of_two_divides_by_one():
    assert first(run(get_method("grpo").changed(std="sample"), [[1, -1]])) == near([math.sqrt(0.5), -math.sqrt(0.5)])


def test_dr_grpo_does_not_divide():
    assert first(run("dr_grpo", [[4, -2, 1, 1]])) == [3, -3, 0, 0]


def test_grpo_mixed():
    # R_mix = 4.1, -1.8, 1.9, 1.4: mean 1.4, std sqrt(4.445)
    expected = [x / math.sqrt(4.445) for x in (2.7, -3.2, 0.5, 0)]
    assert first(run("grpo_mixed", [[4, -2, 1, 1]], [[0.1, 0.2, 0.9, 0.4]])) == near(expected)


def test_gated_accumulation_adds_from_the_middle_of_the_range_on():
    # the middle of -3 to 4 is 0.5: R = 1, 3, 0, 0
    assert first(run("gated_accumulation", [[1, 1, 0, 0]], [[0, 2, 3, 3]])) == near(
        [0, 2 / math.sqrt(1.5), -1 / math.sqrt(1.5), -1 / math.sqrt(1.5)]
    )
    # reached exactly: R = 2.5, 0.5
    assert first(run("gated_accumulation", [[0.5, 0.5]], [[2, 0]])) == near([1, -1])


def decoupled(name: str, form: list, correct: list, reasoning: list, r_min: float = -3, r_max: float = 4) -> Estimate:
    parts = {"format": form, "correct": correct, "reasoning": reasoning}
    rewards = {key: torch.tensor(value, dtype=torch.float64) for key, value in parts.items()}
    bound_P = torch.ones(len(form), dtype=torch.float64)
    return estimate(get_method(name), rewards, r_min=r_min * bound_P, r_max=r_max * bound_P)


def test_gdpo():
    # sums in the groups: 1, -1 (format alone) and 2, -2 (correct and reasoning); std over the batch sqrt(2.5)
    result = decoupled("gdpo", [[1, 0], [1, 1]], [[3, 3], [3, -3]], [[1, 1], [3, 0]])
    expected = [[x / math.sqrt(2.5) for x in row] for row in ([1, -1], [2, -2])]
    assert result.advantages.tolist() == [near(expected[0]), near(expected[1])]
    assert result.stats["zero_variance_share/format"] == 0.5
    assert result.stats["zero_variance_share/reasoning"] == 0.5
    assert result.stats["zero_variance_share/outcome"] == 0


def test_dara_weights_positive_advantages_of_rare_rewards_and_leaves_silent_groups_alone():
    # format and correct vary in one group each, reasoning in two: w = sqrt 2, sqrt 2, 1
    # sums: sqrt 2 + 1, -2 in the first two groups, 0, 0 in the third; mean 0.138071, std 1.804740 over the batch
    result = decoupled("dara", [[1, 0], [1, 1], [1, 1]], [[3, 3], [3, -3], [1, 1]], [[3, 0], [3, 0], [2, 2]])
    assert result.advantages.tolist() == [near([1.261200, -1.184700]), near([1.261200, -1.184700]), [0, 0]]


def test_daras_weight_is_at_most_four():
    groups = 20  # format varies in 1 of 20, reasoning in all: sqrt 20 = 4.47
    result = decoupled("dara", [[1, 0]] + [[1, 1]] * (groups - 1), [[0, 0]] * groups, [[1, 0]] * groups)
    total = [4 + 1, -2] + [1, -1] * (groups - 1)
    mean = sum(total) / len(total)
    std = math.sqrt(sum((x - mean) ** 2 for x in total) / len(total))
    assert first(result) == near([(5 - mean) / std, (-2 - mean) / std])


def test_for_dara_a_reward_varies_in_a_group_though_one_rollout_stands_at_its_mean():
    # format: +-sqrt 1.5 and 0 between them, in one group of two: w = sqrt 2; correct: sqrt 2, -sqrt 1/2, -sqrt 1/2
    result = decoupled("dara", [[1, 0.5, 0], [1, 1, 1]], [[1, 0, 0]] * 2, [[1, 1, 1]] * 2)
    alone = [math.sqrt(2), -math.sqrt(0.5), -math.sqrt(0.5)]
    total = [math.sqrt(2) * math.sqrt(1.5) + alone[0], alone[1], -math.sqrt(1.5) + alone[2], *alone]
    mean = sum(total) / 6
    std = math.sqrt(sum((x - mean) ** 2 for x in total) / 6)
    assert result.advantages.flatten().tolist() == near([(x - mean) / std for x in total])


def test_for_dara_a_failing_judge_is_not_a_sparse_one():
    # reasoning varies wherever it is known: weight 1, although it is known in half of the groups only
    result = decoupled("dara", [[1, 0]] * 2, [[0, 0]] * 2, [[1, 0], [NAN, 0]])
    assert result.advantages.tolist() == [
        near([2 / math.sqrt(2.5), -2 / math.sqrt(2.5)]),
        near([1 / math.sqrt(2.5), -1 / math.sqrt(2.5)]),
    ]


@pytest.mark.parametrize("name", OVER_THE_BATCH)
def test_gdpo_and_dara_see_the_whole_batch(name):
    """Why they are left out where groups must not see each other: the last step is over the batch."""
    small, large = [[1, 0]], [[3, -3]]
    alone = decoupled(name, small, [[0, 0]], [[1, 1]])
    beside = decoupled(name, small * 2, [[0, 0], *large], [[1, 1], [3, 0]])
    assert first(alone) == near([1, -1])
    assert abs(first(beside)[0]) < 0.7


@pytest.mark.parametrize("name", [name for name in TRAINED if name not in OVER_THE_BATCH])
def test_format_and_correct_given_apart_are_the_outcome(name):
    form, correct = torch.tensor([[1.0, 0, 1, 1]]).double(), torch.tensor([[3.0, -2, 0, 0.25]]).double()
    bounds = {"r_min": torch.tensor([-3.0]), "r_max": torch.tensor([4.0])}
    reasoning = {"reasoning": torch.tensor([[0.1, 0.2, 0.9, 0.4]]).double()}
    reasoning = reasoning if METHODS[name].needs_judge else {}
    apart = estimate(name, {"format": form, "correct": correct, **reasoning}, **bounds)
    whole = estimate(name, {"outcome": form + correct, **reasoning}, **bounds)
    assert apart.advantages.tolist() == whole.advantages.tolist()
    assert apart.clip_low.tolist() == whole.clip_low.tolist()
    assert apart.advantages.abs().max() > 0.5


# Metrics


def test_metrics_are_over_the_counted_groups():
    """trl#6365, trl#7068: groups without variance in the denominator."""
    result = run(
        "awpo",
        [[4, -2, 1, 1], [4, 4, 4, 4], [4, -2, 1, 1], [0, 0, 0, 0]],
        [[0.1, 0.2, 0.9, 0.4], [1, 2, 3, 0], [NAN, 0, 0, 0], [0, 0, 0, 0]],
        valid=[[True] * 4, [True] * 4, [True] * 4, [False] * 4],
    )
    metrics = result.metrics()
    assert metrics["gate/open_share"] == pytest.approx(1 / 3)
    assert metrics["gate/closed_by_failure_share"] == pytest.approx(1 / 3)
    assert metrics["saturated_share"] == pytest.approx(1 / 3)
    assert metrics["judge/failure_rate"] == pytest.approx(1 / 12)
    assert metrics["difficulty/mean"] == pytest.approx((0.981633 + 0.1 + 0.981633) / 3, abs=1e-6)
    assert metrics["zero_variance_share/outcome"] == pytest.approx(1 / 3)
    assert metrics["zero_variance_share/reasoning"] == 0  # of the two groups whose judgements are all there
    assert metrics["gate/ratio_p50"] == pytest.approx((1.006168 + 0) / 2, abs=1e-6)
    assert metrics["clip/radius_mean"] == pytest.approx(0.2)


def test_quantiles_of_ratio_and_correlation():
    # out +-1 with judges +-s in phase: r = 1 / (1 + s), c = 1; quantiles of five values lie at 0.4, 2 and 3.6 of them
    outcome = [[1, -1]] * 5
    metrics = run("awpo", outcome, [[2 * s, 0] for s in (0, 1, 3, 4, 9)]).metrics()
    ratios = [0.1, 0.2, 0.25, 0.5, 1.0]
    assert metrics["gate/ratio_p10"] == pytest.approx(ratios[0] + 0.4 * 0.1)
    assert metrics["gate/ratio_p50"] == pytest.approx(ratios[2])
    assert metrics["gate/ratio_p90"] == pytest.approx(ratios[3] + 0.6 * 0.5)
    # and one that contradicts, twice as loud: r = 1, c = -1
    contradicted = run("awpo", outcome, [[0, 4], *[[0, 0]] * 4]).metrics()
    assert contradicted["gate/correlation_p10"] == pytest.approx(-1 + 0.4 * 2, abs=1e-5)
    assert contradicted["gate/correlation_p50"] == contradicted["gate/correlation_p90"] == pytest.approx(1, abs=1e-5)


def test_without_a_judge_nothing_is_said_of_it():
    result = run("grpo", [[4, -2, 1, 1]])
    assert "gate/ratio_p50" not in result.metrics()
    assert result.metrics()["judge/failure_rate"] == 0
    assert one(result.stats["closed_by_failure"]) is False


def test_a_judge_that_is_not_used_is_still_observed():
    result = run("grpo", [[4, -2, 1, 1]], [[0.1, 0.2, 0.9, 0.4]])
    assert one(result.stats["ratio"]) == pytest.approx(1.0062, abs=5e-5)
    assert result.advantages.tolist() == run("grpo", [[4, -2, 1, 1]]).advantages.tolist()


# What is refused


def test_a_method_goes_by_its_name_or_by_its_entry():
    rewards = {"outcome": torch.tensor([[4.0, -2, 1, 1]]), "reasoning": torch.tensor([[0.1, 0.2, 0.9, 0.4]])}
    bounds = {"r_min": torch.tensor([-3.0]), "r_max": torch.tensor([4.0])}
    by_name, by_entry = estimate("awpo", rewards, **bounds), estimate(get_method("awpo"), rewards, **bounds)
    assert first(by_name) == first(by_entry) == pytest.approx([1.2571, -1.4899, 0.2328, 0], abs=5e-5)
    with pytest.raises(UserError, match="no method 'awpo_sotf'; did you mean 'awpo_soft'"):
        estimate("awpo_sotf", rewards, **bounds)
    with pytest.raises(ValueError, match="'sft' trains no policy"):
        estimate("sft", rewards, **bounds)


@pytest.mark.parametrize(
    ("outcome", "reasoning", "message"),
    [
        ([[4.1, 0]], [[1, 1]], "'outcome' of prompt 0, rollout 0"),
        ([[0, -3.1]], [[1, 1]], "'outcome' of prompt 0, rollout 1"),
        ([[NAN, 0]], [[1, 1]], "'outcome'"),
        ([[math.inf, 0]], [[1, 1]], "'outcome'"),
        ([[1, 0]], [[-0.1, 1]], "'reasoning'"),
        ([[1, 0]], [[math.inf, 1]], "'reasoning'"),
    ],
)
@pytest.mark.parametrize("name", ["awpo", "grpo_mixed", "gdpo"])
def test_a_reward_outside_its_range(name, outcome, reasoning, message):
    with pytest.raises(ValueError, match=message):
        run(name, outcome, reasoning)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize(
    ("reward", "value"),
    [
        ("format", -0.1), ("format", 1.1), ("format", NAN), ("format", math.inf),
        ("correct", -3.1), ("correct", 4.1), ("correct", NAN), ("correct", -math.inf),
        ("outcome", -4.2), ("outcome", 4.1), ("outcome", NAN), ("outcome", math.inf),
        ("reasoning", -0.1), ("reasoning", math.inf), ("reasoning", -math.inf),
    ],
)  # fmt: skip
def test_each_reward_outside_its_range_is_refused_by_name(name, reward, value):
    rewards = {key: torch.ones(2, 2) for key in ("format", "correct", "outcome", "reasoning")}
    bounds = {"r_min": torch.full((2,), -3.0), "r_max": torch.full((2,), 4.0)}
    estimate(name, rewards, **bounds)
    rewards[reward][1, 0] = value
    with pytest.raises(ValueError, match=f"reward '{reward}' of prompt 1, rollout 0"):
        estimate(name, rewards, **bounds)
    valid = torch.tensor([[True, True], [False, True]])
    assert estimate(name, rewards, valid=valid, **bounds).advantages.isfinite().all()


def test_the_ends_of_the_range_have_a_tolerance_of_their_own_size():
    for factor, refused in ((0.9e-5, False), (1.1e-5, True)):
        for bound in (1.0, 4.0, 1000.0):
            for end in (bound * (1 + factor), -bound * (1 + factor)):
                if refused:
                    with pytest.raises(ValueError, match="'outcome'"):
                        run("grpo", [[end, 0]], r_min=-bound, r_max=bound)
                else:
                    run("grpo", [[end, 0]], r_min=-bound, r_max=bound)
    for end in (0.5, -0.5):  # never finer than that of a bound of 1
        with pytest.raises(ValueError, match="'outcome'"):
            run("grpo", [[end + math.copysign(1.1e-5, end), 0]], r_min=-0.5, r_max=0.5)
        run("grpo", [[end + math.copysign(0.9e-5, end), 0]], r_min=-0.5, r_max=0.5)
    run("grpo", [[4 + 1e-5 * 4, -3 - 1e-5 * 3]])  # met exactly
    run("grpo", [[-10 + 0.9e-4, -15]], r_min=-20, r_max=-10)


def test_the_widest_of_the_rewards_types_is_that_of_the_result():
    outcome, reasoning = torch.tensor([[1.0, -1]]), torch.tensor([[0.0, 1]])
    for one_type, other, expected in (
        (torch.float64, torch.float32, torch.float64),
        (torch.float32, torch.float64, torch.float64),
        (torch.float32, torch.float16, torch.float32),
    ):
        rewards = {"outcome": outcome.to(one_type), "reasoning": reasoning.to(other)}
        result = estimate("awpo", rewards, r_min=torch.tensor([-3.0]), r_max=torch.tensor([4.0]))
        assert result.advantages.dtype == result.clip_low.dtype == expected


def test_the_largest_range_that_is_taken():
    assert first(run("grpo", [[1e100, -1e100]], r_min=-1e100, r_max=1e100)) == near([1, -1])
    for r_min, r_max in ((-1.1e100, 1e100), (-1e100, 1.1e100)):
        with pytest.raises(ValueError, match="r_min must be less than r_max"):
            run("grpo", [[1, -1]], r_min=r_min, r_max=r_max)


def test_a_reward_that_no_method_knows_need_only_be_a_number():
    rewards = {"outcome": torch.tensor([[1.0, -1]]), "style": torch.tensor([[-1e6, 1e6]])}
    bounds = {"r_min": torch.tensor([-3.0]), "r_max": torch.tensor([4.0])}
    assert first(estimate("grpo", rewards, **bounds)) == near([1, -1])
    for value in (NAN, math.inf, -math.inf):
        with pytest.raises(ValueError, match="'style' of prompt 0, rollout 1"):
            estimate("grpo", {**rewards, "style": torch.tensor([[0.0, value]])}, **bounds)


def test_rounding_at_the_ends_of_the_range_is_not_refused():
    run("awpo", [[4 + 1e-6, -3 - 1e-6]], [[0, 0]], dtype=torch.float32)


def test_only_an_overlong_penalty_may_go_below_the_range():
    run("dapo", [[-4, 1]])
    with pytest.raises(ValueError, match="outcome"):
        run("dapo", [[-4.1, 1]])
    with pytest.raises(ValueError, match="outcome"):
        run("grpo", [[-4, 1]])


def test_wrong_shapes_types_and_names():
    reward_PG, bound_P = torch.zeros(2, 3), torch.ones(2)
    grpo = get_method("grpo")

    def refuse(message: str, method: Method = grpo, valid: torch.Tensor | None = None, **others: object) -> None:
        rewards = others.pop("rewards", {"outcome": reward_PG})
        bounds = {"r_min": -bound_P, "r_max": bound_P, **others}
        with pytest.raises(ValueError, match=message):
            estimate(method, rewards, valid=valid, **bounds)

    refuse("no rewards", rewards={})
    refuse("shape", rewards={"outcome": torch.zeros(3)})
    refuse("shape", rewards={"outcome": torch.zeros(2, 0)})
    refuse("shape", rewards={"outcome": reward_PG, "reasoning": torch.zeros(2, 2)})
    refuse("r_min", r_min=torch.zeros(3))
    refuse("r_max", r_max=torch.tensor(1.0))
    refuse("valid", valid=torch.ones(2, 2, dtype=torch.bool))
    refuse("valid", valid=torch.ones(2, 3))
    refuse("r_min must be less", r_max=-bound_P)
    refuse("r_min must be less", r_max=bound_P * NAN)
    refuse("r_min must be less", r_max=bound_P * math.inf)
    refuse("r_min must be less", r_min=-bound_P * math.inf)
    refuse("r_min must be less", r_max=torch.tensor([1.0, -1.0]))  # one prompt's is enough
    refuse("'reasoning'", method=get_method("awpo"))
    refuse("'format', 'correct'", method=get_method("gdpo"), rewards={"outcome": reward_PG, "reasoning": reward_PG})
    refuse("trains no policy", method=get_method("base"))
    refuse("trains no policy", method=get_method("sft"))


def test_rewards_are_left_as_they_were():
    rewards = {"outcome": torch.tensor([[1.0, 2.0]]), "reasoning": torch.tensor([[NAN, 2.0]])}
    before = {name: reward_PG.clone() for name, reward_PG in rewards.items()}
    estimate(get_method("awpo"), rewards, r_min=torch.tensor([-3.0]), r_max=torch.tensor([4.0]))
    for name, reward_PG in rewards.items():
        torch.testing.assert_close(reward_PG, before[name], equal_nan=True, rtol=0, atol=0)


def test_integer_rewards():
    rewards = {"outcome": torch.tensor([[1, -1]])}
    result = estimate(get_method("grpo"), rewards, r_min=torch.tensor([-3]), r_max=torch.tensor([4]))
    assert first(result) == near([1, -1])


# Properties


@st.composite
def batches(draw, *, failures: bool = True, least: int = 1) -> dict[str, torch.Tensor]:
    """Rewards on a grid of tenths, which float32 cannot hold exactly: equal, or apart by more than rounding."""
    prompts, rollouts = draw(st.integers(1, 4)), draw(st.integers(least, 6))
    shape = (prompts, rollouts)

    def grid(low: int, high: int) -> torch.Tensor:
        numbers = st.lists(st.integers(low, high), min_size=prompts * rollouts, max_size=prompts * rollouts)
        return torch.tensor(draw(numbers), dtype=torch.float64).reshape(shape) / 10

    form = (grid(0, 1) * 10).round()
    correct = grid(-30, 30)
    reasoning = grid(0, 30)
    if failures:
        reasoning = reasoning.masked_fill(grid(0, 9) == 0, NAN)
    valid = grid(0, 9) > 0
    return {"format": form, "correct": correct, "outcome": form + correct, "reasoning": reasoning, "valid": valid}


def of(method: str | Method, batch: dict[str, torch.Tensor], dtype: torch.dtype = torch.float64) -> Estimate:
    method = get_method(method) if isinstance(method, str) else method
    batch = {
        "r_min": torch.full((len(batch["valid"]),), -3.0),
        "r_max": torch.full((len(batch["valid"]),), 4.0),
        **batch,
    }
    rewards = {name: batch[name].to(dtype) for name in ("outcome", "format", "correct", "reasoning")}
    return estimate(method, rewards, valid=batch["valid"], r_min=batch["r_min"], r_max=batch["r_max"])


def same(one: Estimate, other: Estimate, tolerance: float = 1e-6) -> None:
    for name in ("advantages", "clip_low", "clip_high"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", TRAINED)
@given(batch=batches(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_permuting_rollouts_and_groups_permutes_the_result(name, batch, data):
    prompts, rollouts = batch["valid"].shape
    order_P = data.draw(st.permutations(range(prompts)))
    order_G = data.draw(st.permutations(range(rollouts)))
    permuted = of(name, {key: value[order_P][:, order_G] for key, value in batch.items()})
    result = of(name, batch)
    torch.testing.assert_close(permuted.advantages, result.advantages[order_P][:, order_G], atol=1e-9, rtol=0)
    torch.testing.assert_close(permuted.clip_low, result.clip_low[order_P], atol=1e-9, rtol=0)


# Not gated_accumulation, which by its definition pays the constant to the rollouts of good outcome alone.
@pytest.mark.parametrize("name", sorted(set(JUDGED) - {"gated_accumulation"}))
@given(batch=batches(), constant=st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_a_constant_added_to_the_judge_changes_nothing(name, batch, constant):
    same(of(name, {**batch, "reasoning": batch["reasoning"] + constant / 10}), of(name, batch))


@pytest.mark.parametrize("name", TRAINED)
@given(batch=batches())
@settings(max_examples=25, deadline=None)
def test_moving_the_outcome_and_its_range_changes_nothing(name, batch):
    moved = {**batch, "outcome": batch["outcome"] + 1, "correct": batch["correct"] + 1}
    prompts = len(batch["valid"])
    moved |= {"r_min": torch.full((prompts,), -2.0), "r_max": torch.full((prompts,), 5.0)}
    same(of(name, moved), of(name, batch))


@pytest.mark.parametrize("name", TRAINED)
@given(batch=batches())
@settings(max_examples=10, deadline=None)
def test_a_mask_that_is_true_everywhere_is_no_mask(name, batch):
    everywhere = of(name, {**batch, "valid": torch.ones_like(batch["valid"])})
    rewards = {key: batch[key] for key in ("outcome", "format", "correct", "reasoning")}
    prompts = len(batch["valid"])
    without = estimate(name, rewards, r_min=torch.full((prompts,), -3.0), r_max=torch.full((prompts,), 4.0))
    same(everywhere, without, tolerance=0)


@pytest.mark.parametrize("name", AWPO)
@given(batch=batches(), score=st.floats(0, 3, width=32))
@settings(max_examples=25, deadline=None)
def test_a_constant_judge_is_no_judge(name, batch, score):
    batch = {**batch, "reasoning": torch.full_like(batch["reasoning"], score)}
    same(of(name, batch), of(get_method(name).changed(gate="never"), batch))


@pytest.mark.parametrize("name", [name for name in TRAINED if name not in OVER_THE_BATCH])
@given(batch=batches())
@settings(max_examples=25, deadline=None)
def test_groups_do_not_see_each_other(name, batch):
    result = of(name, batch)
    for prompt in range(len(batch["valid"])):
        alone = of(name, {key: value[prompt : prompt + 1] for key, value in batch.items()})
        torch.testing.assert_close(alone.advantages[0], result.advantages[prompt], atol=1e-12, rtol=0)
        torch.testing.assert_close(alone.clip_low[0], result.clip_low[prompt], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", TRAINED)
@given(batch=batches())
@settings(max_examples=25, deadline=None)
def test_float32_and_float64_agree(name, batch):
    single, double = of(name, batch, torch.float32), of(name, batch, torch.float64)
    torch.testing.assert_close(single.advantages.double(), double.advantages, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(single.clip_low.double(), double.clip_low, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in TRAINED if name not in OVER_THE_BATCH])
@given(batch=batches())
@settings(max_examples=25, deadline=None)
def test_advantages_of_a_group_sum_to_nothing(name, batch):
    total_P = of(name, batch).advantages.sum(dim=1)
    torch.testing.assert_close(total_P, torch.zeros_like(total_P), atol=1e-9, rtol=0)


@given(batch=batches(failures=False, least=2))
@settings(max_examples=150, deadline=None)
def test_ratio_and_correlation_are_those_of_the_formulas(batch):
    outcome_G, reasoning_G = batch["outcome"][0], batch["reasoning"][0]
    assume(outcome_G.unique().numel() > 1 and reasoning_G.unique().numel() > 1)
    result = of("awpo", {**batch, "valid": torch.ones_like(batch["valid"])})
    assume(not result.stats["ratio"][0].isnan() and (outcome_G + reasoning_G).std() > 1e-6)
    s = (reasoning_G.std() / outcome_G.std()).item()
    rho = torch.corrcoef(torch.stack([outcome_G, reasoning_G]))[0, 1].item()
    ratio = 1 / math.sqrt(1 + 2 * rho * s + s * s)
    assert result.stats["ratio"][0].item() == pytest.approx(ratio, rel=1e-4)
    assert result.stats["correlation"][0].item() == pytest.approx((1 + rho * s) * ratio, abs=1e-3)


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32) | st.sampled_from([low, high, (low + high) / 2])


@pytest.mark.parametrize("name", TRAINED)
@given(data=st.data(), std=st.sampled_from(["population", "sample"]))
@settings(max_examples=60, deadline=None)
def test_no_input_in_range_gives_a_number_that_is_none(name, data, std):
    prompts, rollouts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))

    def draw(values: st.SearchStrategy[float]) -> torch.Tensor:
        rows = st.lists(values, min_size=prompts * rollouts, max_size=prompts * rollouts)
        return torch.tensor(data.draw(rows)).reshape(prompts, rollouts)

    form, correct = draw(numbers(0, 1)), draw(numbers(-3, 3))
    reasoning = draw(numbers(0, 3) | numbers(0, 2**20) | st.just(NAN))
    batch = {"format": form, "correct": correct, "outcome": form + correct, "reasoning": reasoning}
    batch["valid"] = draw(st.sampled_from([0.0, 1.0, 1.0, 1.0])).bool()
    method = Method.read({**get_method(name).to_json(), "std": std}, "here")
    result = of(method, batch, torch.float32)
    assert result.advantages.isfinite().all()
    assert (result.advantages[~batch["valid"]] == 0).all()
    assert ((result.clip_low >= 0.05 - 1e-6) & (result.clip_low <= 0.2 + 1e-6)).all()
    assert result.clip_high.isfinite().all()
    assert ((result.stats["gate"] >= 0) & (result.stats["gate"] <= 1)).all()
    assert all(math.isfinite(value) for value in result.metrics().values())
    if method.estimator not in ("dr_grpo", "gdpo", "dara"):  # |A| <= sqrt(K - 1) in units of its own std
        assert result.advantages.abs().max() <= math.sqrt(rollouts) + 1e-4


@pytest.mark.parametrize("name", TRAINED)
@given(batch=batches(), excess=st.floats(1e-3, 10), data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_outcome_outside_its_range_is_refused(name, batch, excess, data):
    assume(batch["valid"].any())
    prompt, rollout = data.draw(st.sampled_from(batch["valid"].nonzero().tolist()))
    lowest = -4.0 if METHODS[name].overlong_share else -3.0
    outside = data.draw(st.sampled_from([4 + excess, lowest - excess]))
    outcome = batch["outcome"].clone()
    outcome[prompt, rollout] = outside
    with pytest.raises(ValueError, match="outcome"):
        of(name, {**batch, "outcome": outcome})


# What people give by mistake


LOW, HIGH = torch.tensor([-3.0]), torch.tensor([4.0])


@pytest.mark.parametrize("name", ["grpo", "awpo", "gdpo", "dara", "dr_grpo", "gated_accumulation"])
def test_an_empty_batch_has_an_empty_result(name):
    parts = {key: torch.zeros(0, 4) for key in ("format", "correct", "reasoning")}
    result = estimate(name, parts, r_min=LOW[:0], r_max=HIGH[:0])
    assert result.advantages.shape == (0, 4)
    assert result.clip_low.shape == (0,)


def test_results_carry_no_gradient():
    outcome = torch.tensor([[4.0, -2, 1, 1]], requires_grad=True)
    result = estimate("grpo", {"outcome": outcome}, r_min=LOW, r_max=HIGH)
    assert not result.advantages.requires_grad


def test_half_precision_is_widened():
    outcome = torch.tensor([[60000.0, *[-60000.0] * 7]], dtype=torch.float16)
    result = estimate("dr_grpo", {"outcome": outcome}, r_min=torch.tensor([-6e4]), r_max=torch.tensor([6e4]))
    assert result.advantages.dtype == torch.float32
    assert result.advantages[0, 0] == 105000.0  # 60000 - (60000 - 7 x 60000) / 8


@pytest.mark.parametrize(
    ("rewards", "bounds", "message"),
    [
        ({"outcome": [[1.0, 2.0]]}, (LOW, HIGH), "outcome must be a tensor of real numbers, got <class 'list'>"),
        ({"outcome": torch.zeros(1, 2)}, (-3.0, HIGH), "r_min must be a tensor of real numbers, got <class 'float'>"),
        ({"outcome": torch.zeros(1, 2, dtype=torch.complex64)}, (LOW, HIGH), "real numbers, got torch.complex64"),
        ({"format": torch.zeros(1, 2)}, (LOW, HIGH), r"needs the rewards 'outcome' \('outcome', or 'format' and"),
        ({"outcome": torch.zeros(1, 2)}, (LOW, HIGH * 1e200), "those of prompt 0 are -3.0 and inf"),
        ({"outcome": torch.zeros(1, 2)}, (HIGH, LOW), "those of prompt 0 are 4.0 and -3.0"),
    ],
)
def test_a_mistake_is_answered_by_a_sentence(rewards, bounds, message):
    with pytest.raises(ValueError, match=message):
        estimate("grpo", rewards, r_min=bounds[0], r_max=bounds[1])


def test_a_reward_whose_square_would_overflow_is_refused():
    outcome = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    bound = torch.tensor([1e160], dtype=torch.float64)
    with pytest.raises(ValueError, match="at most 1e"):
        estimate("grpo", {"outcome": outcome * 1e160}, r_min=-bound, r_max=bound)


def test_groups_in_which_nothing_varies_do_not_speak_for_the_gate():
    outcome = torch.tensor([[4.0, -2, 1, 1], *[[1.0] * 4] * 7])
    reasoning = torch.tensor([[0.1, 0.2, 0.9, 0.4], *[[0.5] * 4] * 7])
    result = estimate("awpo", {"outcome": outcome, "reasoning": reasoning}, r_min=LOW.expand(8), r_max=HIGH.expand(8))
    metrics = result.metrics()
    assert metrics["gate/open_share"] == 1.0
    assert metrics["gate/ratio_p50"] == pytest.approx(1.0062, abs=1e-4)
    assert metrics["gate/correlation_p50"] > 0.9
    flat = estimate(
        "awpo", {"outcome": outcome[1:], "reasoning": reasoning[1:]}, r_min=LOW.expand(7), r_max=HIGH.expand(7)
    )
    assert "gate/open_share" not in flat.metrics()


def test_the_largest_rewards_are_taken_and_the_widest_type_is_kept():
    bound = torch.tensor([1e100], dtype=torch.float64)
    outcome = torch.tensor([[1e100, -1e100]], dtype=torch.float64)
    result = estimate("grpo", {"outcome": outcome}, r_min=-bound, r_max=bound)
    assert result.advantages.tolist() == [[1.0, -1.0]]
    mixed = {"outcome": torch.tensor([[1.0, -1.0]]), "reasoning": torch.zeros(1, 2, dtype=torch.float64)}
    assert estimate("awpo", mixed, r_min=LOW, r_max=HIGH).advantages.dtype == torch.float64
