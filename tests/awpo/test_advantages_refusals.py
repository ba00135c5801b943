"""Rewards that are refused by a sentence, and odd ones that are taken."""

import math

import pytest
import torch

from awpo.advantages import estimate
from awpo.errors import UserError
from awpo.methods import Method, get_method
from tests.awpo.estimates import NAN, TRAINED, first, near, run


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
