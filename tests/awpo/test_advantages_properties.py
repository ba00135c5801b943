"""Advantages: properties of any batch."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from awpo.advantages import Estimate, estimate
from awpo.methods import METHODS, Method, get_method
from tests.awpo.estimates import AWPO, JUDGED, NAN, OVER_THE_BATCH, TRAINED


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
