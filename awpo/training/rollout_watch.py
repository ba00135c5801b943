"""What a rollout batch reports of its rewards, and the warnings that several batches together give rise to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from awpo.advantages import Estimate
from awpo.methods import Method
from awpo.rewards import CORRECT_MIN, FORMAT_MAX

BATCHES = 5
"""Rollout batches in a row after which a reward that is constant, or a gate that decides nothing, is worth a warning."""
INERT = 0.01
"""A gate is inert when it is open, or closed, in a smaller share of the groups than this."""
# What moves a gate. The judge's scale is a setting of the run, the others are keys of the method.
REMEDIES = {
    "ratio": "policy.judge.scale, or the method's ratio_min",
    "soft": "policy.judge.scale",
    "low_outcome_variance": "the method's tau",
    "correlation": "policy.judge.scale, or the method's c_min",
}


def reward_metrics(method: Method, rewards_N: dict[str, Tensor]) -> dict[str, float]:
    """Mean rewards of N rollouts under the names that runs log, and how far judge and outcome agree.

    `rewards_N` holds format, correct, outcome (the sum of the two), overlong and reasoning (NaN where there is none),
    (N,) each. The total is what the method is trained on: with the overlong penalty, and with the reasoning reward
    where the method reads it. `reward/format_only_share` is of rollouts of the right form with nothing right in them. What
    is undefined is left out.
    """
    names = ["format", "correct", *(["overlong"] if method.overlong_share else []), "outcome"]
    values = {f"reward/{name}": rewards_N[name].mean().item() for name in names}
    only_form = (rewards_N["format"] == FORMAT_MAX) & (rewards_N["correct"] == CORRECT_MIN)
    values["reward/format_only_share"] = only_form.double().mean().item()
    total = values["reward/outcome"] + values.get("reward/overlong", 0.0)
    judged = ~rewards_N["reasoning"].isnan()
    if judged.any():
        values["reward/reasoning"] = rewards_N["reasoning"][judged].mean().item()
        pair = torch.stack([rewards_N["outcome"][judged], rewards_N["reasoning"][judged]])
        agreement = torch.corrcoef(pair.double())[0, 1].item() if judged.sum() > 1 else math.nan
        if math.isfinite(agreement):  # it is not where one of the two is constant
            values["judge/outcome_correlation"] = agreement
        if "reasoning" in method.rewards:
            total += method.mix_coefficient * values["reward/reasoning"]
    return {**values, "reward/total": total}


class RolloutWatch:
    """Warns once of a reward that never varies and once of a gate that decides nothing; see `BATCHES`.

    `memory` is plain data that a checkpoint keeps, so that a resumed run warns as one that was not interrupted.
    """

    def __init__(self, method: Method, warn: Callable[[str], None]) -> None:
        self.method, self.warn = method, warn
        self.memory: dict[str, Any] = {"constant": {}, "gate": [], "told_of_gate": False}

    def see(self, rewards_N: dict[str, Tensor], result: Estimate) -> None:
        """Takes notice of one rollout batch, in the order of training."""
        self._see_rewards(rewards_N)
        if self.method.gate in REMEDIES:
            self._see_gate(result)

    def _see_rewards(self, rewards_N: dict[str, Tensor]) -> None:
        """A reward that is constant by a bug must not go unnoticed (ms-swift#10148)."""
        constant = self.memory["constant"]
        for name in sorted(set(self.method.rewards) & set(rewards_N)):
            finite = rewards_N[name][rewards_N[name].isfinite()]
            still = not finite.numel() or bool(finite.max() == finite.min())
            constant[name] = constant.get(name, 0) + 1 if still else 0
            if constant[name] == BATCHES:
                self.warn(f"reward {name!r} has had no variance at all for {BATCHES} rollout batches")

    def _see_gate(self, result: Estimate) -> None:
        """A gate that is always open or always closed makes the method another one (docs/method.md).

        Left out are groups that are closed whatever the gate's test says (saturated, or with a failed judgement) and
        those in which nothing varies; for the gates that compare the outcome's spread with the mixture's, or their
        agreement, also those without a spread of outcomes, in which no scale could help.
        """
        stats = {name: value for name, value in result.stats.items() if isinstance(value, Tensor)}
        asked_P = stats["counted"] & ~stats["closed_by_failure"] & ~stats["saturated"].bool()
        asked_P &= stats["mixture_varies"]
        if self.method.gate != "low_outcome_variance":
            asked_P &= stats["outcome_varies"]
        weight_P = stats["gate"]
        batches = self.memory["gate"]
        batches.append([float(weight_P[asked_P].sum()), int(asked_P.sum())])
        del batches[:-BATCHES]
        groups = sum(number for _, number in batches)
        if self.memory["told_of_gate"] or len(batches) < BATCHES or not groups:
            return
        share = sum(weight for weight, _ in batches) / groups
        if INERT <= share <= 1 - INERT:
            return
        self.memory["told_of_gate"] = True
        effect = "the reasoning reward always counts" if share > INERT else "the reasoning reward never counts"
        self.warn(
            f"the gate {self.method.gate!r} of method {self.method.name!r} was open in {share:.1%} of the groups that "
            f"are not saturated, over the last {BATCHES} rollout batches: it decides nothing, {effect}; change {REMEDIES[self.method.gate]}"
        )
