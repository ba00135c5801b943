"""Degenerate groups, by hand. p = 4/7 has the difficulty weight 0.1 + 0.9 x 4 x 12/49 = 0.981633."""

import math

import pytest
import torch

from awpo.groups import normalise
from awpo.methods import Method, get_method
from tests.awpo.estimates import AWPO, JUDGED, NAN, TRAINED, first, near, one, run


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
