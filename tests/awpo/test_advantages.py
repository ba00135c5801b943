"""Advantages worked out by hand from the formulas in the docstrings: the worked example, baselines, metrics."""

import math

import pytest
import torch

from awpo.advantages import Estimate, estimate
from awpo.methods import METHODS, get_method
from tests.awpo.estimates import NAN, OVER_THE_BATCH, TRAINED, first, near, one, run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_worked_example(dtype):
    result = run("awpo", [[4, -2, 1, 1]], [[0.1, 0.2, 0.9, 0.4]], dtype=dtype)
    assert first(result) == pytest.approx([1.2571, -1.4899, 0.2328, 0], abs=5e-5)
    assert one(result.stats["ratio"]) == pytest.approx(1.0062, abs=5e-5)
    assert one(result.stats["difficulty"]) == pytest.approx(0.9816, abs=5e-5)
    assert one(result.stats["gate"]) == 1
    assert one(result.clip_low) == one(result.clip_high) == pytest.approx(0.2)
    assert result.advantages.dtype == result.clip_low.dtype == result.clip_high.dtype == dtype


# Baselines


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
