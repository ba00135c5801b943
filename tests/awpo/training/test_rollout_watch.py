import math
import re
from typing import Any

import pytest
import torch

from awpo.advantages import Estimate
from awpo.methods import get_method
from awpo.training.rollout_watch import RolloutWatch, reward_metrics


def estimate(weights: list[float], failed: int = 0, saturated: int = 0, flat: int = 0) -> Estimate:
    """A batch of groups with these gate weights; the first `failed` have a failed judgement, the first `saturated`
    are solved, the first `flat` have outcomes that are all alike."""
    count = len(weights)
    stats: dict[str, Any] = {
        "gate": torch.tensor(weights),
        "closed_by_failure": torch.arange(count) < failed,
        "saturated": torch.arange(count) < saturated,
        "counted": torch.ones(count, dtype=torch.bool),
        "outcome_varies": torch.arange(count) >= flat,
        "mixture_varies": torch.ones(count, dtype=torch.bool),
    }
    return Estimate(torch.zeros(count, 2), torch.zeros(count), torch.zeros(count), stats)


def watch(name: str) -> tuple[RolloutWatch, list[str]]:
    said: list[str] = []
    return RolloutWatch(get_method(name), said.append), said


VARYING = {"outcome": torch.tensor([0.0, 1.0]), "reasoning": torch.tensor([1.0, 2.0])}


@pytest.mark.parametrize(
    ("name", "weights", "expected"),
    [
        (
            "awpo",
            [1.0] * 100,
            "open in 100.0% of the groups .* over the last 5 rollout batches.*always counts; change policy.judge",
        ),
        ("awpo", [0.0] * 100, "open in 0.0% .*never counts; change policy.judge.scale, or the method's ratio_min"),
        ("awpo", [1.0] * 99 + [0.0], None),  # 99% is not more than 99%
        ("awpo", [0.0] * 99 + [1.0], None),
        ("awpo_soft", [0.999] * 100, "'soft' of method 'awpo_soft'.*change policy.judge.scale"),
        ("awpo_soft", [0.6] * 100, None),
        ("awpo_low_variance", [0.0] * 100, "the method's tau"),
        ("awpo_no_gating", [1.0] * 100, None),  # always open by its own wish
        ("grpo", [0.0] * 100, None),
    ],
)
def test_a_gate_that_decides_nothing_is_told_once(name: str, weights: list[float], expected: str | None) -> None:
    watched, said = watch(name)
    for _ in range(4):
        watched.see(VARYING, estimate(weights))
    assert said == []
    for _ in range(8):
        watched.see(VARYING, estimate(weights))
    assert len(said) == (expected is not None)
    if expected:
        assert re.search(expected, said[0])


def test_the_share_is_that_of_the_last_batches_and_of_groups_with_a_judgement() -> None:
    watched, said = watch("awpo")
    for weights in ([0.0] * 4, *[[1.0] * 4] * 4):
        watched.see(VARYING, estimate(weights))
    assert said == []
    # A fifth open batch pushes the closed one out; its two groups closed by a failed judgement do not count.
    watched.see(VARYING, estimate([0.0, 0.0, 1.0, 1.0], failed=2))
    assert len(said) == 1


def test_groups_that_are_solved_say_nothing_of_the_gate() -> None:
    watched, said = watch("awpo")
    for _ in range(5):
        watched.see(VARYING, estimate([0.0] * 4, saturated=4))
    assert said == []
    for _ in range(5):
        watched.see(VARYING, estimate([0.0, 0.0, 1.0, 1.0], saturated=2))
    assert len(said) == 1
    assert "open in 100.0%" in said[0]


def test_a_reward_without_variance_is_told_once_by_its_name() -> None:
    """A reward that is constant by a bug goes unnoticed (ms-swift#10148)."""
    watched, said = watch("grpo")
    for _ in range(20):
        watched.see(VARYING, estimate([1.0] * 4))
    assert said == []
    constant = {**VARYING, "outcome": torch.full((2,), 0.5)}
    for batch in range(20):
        watched.see(constant, estimate([1.0] * 4))
        assert len(said) == (batch >= 4)
    assert "reward 'outcome' has had no variance at all for 5 rollout batches" in said[0]


def test_one_batch_that_varies_starts_the_count_anew() -> None:
    watched, said = watch("grpo")
    for batch in range(24):
        watched.see({**VARYING, "outcome": torch.tensor([0.0, float(batch % 5 == 4)])}, estimate([1.0] * 4))
    assert said == []


def test_a_resumed_run_remembers() -> None:
    """ms-swift#10148: a reward that is constant by a bug."""
    watched, _ = watch("awpo")
    for _ in range(4):
        watched.see({**VARYING, "outcome": torch.ones(2)}, estimate([1.0] * 4))
    resumed, said = watch("awpo")
    resumed.memory = watched.memory
    resumed.see({**VARYING, "outcome": torch.ones(2)}, estimate([1.0] * 4))
    assert len(said) == 2
    assert "reward 'outcome' has had no variance at all for 5 rollout batches" in said[0]


def test_reward_means_leave_failed_judgements_out() -> None:
    rewards = {
        "format": torch.tensor([1.0, 0.0, 1.0, 1.0]),
        "correct": torch.tensor([3.0, -3.0, 1.0, 0.0]),
        "overlong": torch.tensor([0.0, -1.0, 0.0, 0.0]),
        "reasoning": torch.tensor([2.0, 1.0, math.nan, 3.0]),
    }
    rewards["outcome"] = rewards["format"] + rewards["correct"] + rewards["overlong"]  # 4, -4, 2, 1
    found = reward_metrics(get_method("grpo_mixed"), rewards)
    assert found["reward/format"] == 0.75
    assert found["reward/format_only_share"] == 0.0  # the one of -3 has no form either
    assert found["reward/outcome"] == 0.75
    assert found["reward/reasoning"] == 2.0
    assert found["reward/total"] == 2.75
    # Outcomes 4, -4, 1 and judgements 2, 1, 3: deviations 11/3, -13/3, 2/3 and 0, -1, 1.
    norm = math.sqrt((121 + 169 + 4) / 9 * 2)
    assert found["judge/outcome_correlation"] == pytest.approx(5 / norm)
    assert "reward/overlong" not in found
    assert reward_metrics(get_method("dapo"), rewards)["reward/overlong"] == -0.25
    assert reward_metrics(get_method("grpo"), rewards)["reward/total"] == 0.75
    formal = {**rewards, "correct": torch.tensor([-3.0, -3.0, -3.0, 0.0])}
    assert reward_metrics(get_method("grpo"), formal)["reward/format_only_share"] == 0.5
    none = reward_metrics(get_method("grpo"), {**rewards, "reasoning": torch.full((4,), math.nan)})
    assert "reward/reasoning" not in none


def test_groups_in_which_no_scale_could_help_do_not_count() -> None:
    watched, said = watch("awpo")
    for _ in range(6):
        watched.see(VARYING, estimate([0.0] * 60 + [1.0, 0.0] * 20, flat=60))
    assert said == []
    watched, said = watch("awpo_low_variance")
    for _ in range(6):
        watched.see(VARYING, estimate([1.0] * 100, flat=100))  # this gate is about such groups
    assert len(said) == 1
