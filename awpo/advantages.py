"""From rewards to advantages: pure functions on tensors, one per estimator.

Axis suffixes: _P prompts (groups), _G rollouts of a prompt. `out` is the verifiable outcome reward, `rea` the
judge's reasoning reward (already scaled), mean and std are over the valid rollouts of one group.

Shared by every estimator:
- Statistics are computed in float64, whatever comes in, and results go out in the dtype of the rewards.
- A group has *no variance* in a reward R when max - min <= 1e-6 max(1, max|R|). Its advantages are then 0, every
  one: the last bit of a float32 must not become an advantage. So a lone rollout has advantage 0 too.
- An invalid rollout has advantage 0 and is in no statistic. A group that is wholly invalid is in no share or mean.
- A reasoning reward of NaN is a failed judgement. Such a group is trained on its outcome alone, and is counted.
- Undefined is not zero: where a quantity has no value there is a mask, never a product (0 * NaN is NaN).
- Groups do not see each other, except in gdpo and dara (batch normalisation) and under `renormalise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from awpo.clipping import clip_radii
from awpo.groups import Batch, Normalised, advantage_correlation, normalise, read_batch, variance_ratio
from awpo.methods import Method, get_method

COMPARISON_TOLERANCE = 1e-6
"""A threshold counts as met from this far below: rounding of float32 rewards decides nothing."""
SATURATION_MARGIN = 1e-3
"""A group is saturated when its mean outcome comes this near to r_max."""
DARA_WEIGHT_MAX = 4.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages (P, G), clip radii (P,), and what led to them.

    `stats` holds, per group (P,): ratio r_g (NaN where undefined), correlation c_g (NaN where undefined), gate w_g,
    saturated, difficulty d_g, radius (mean of the two clip radii), closed_by_failure (a judgement failed, so the
    outcome alone is used), counted (at least one valid rollout: the groups that shares and means are over),
    outcome_varies and mixture_varies. And as floats: zero_variance_share/<reward>, the share of groups without variance in it among those where it is known,
    and judge_failure_rate, the share of valid rollouts whose judgement failed.
    """

    advantages: Tensor
    clip_low: Tensor
    clip_high: Tensor
    stats: dict[str, Tensor | float]

    def metrics(self) -> dict[str, float]:
        """The statistics of one batch as numbers, under the names that runs log; what is undefined is left out.

        Those of the gate are over the groups in which a reward varies: where none does the gate decides nothing.
        """
        counted_P = self._stat("counted")
        telling_P = counted_P & (self._stat("outcome_varies") | self._stat("mixture_varies"))
        metrics = {
            "gate/open_share": _mean(self._stat("gate")[telling_P]),
            "gate/closed_by_failure_share": _mean(self._stat("closed_by_failure")[counted_P]),
            "saturated_share": _mean(self._stat("saturated")[counted_P]),
            "difficulty/mean": _mean(self._stat("difficulty")[counted_P]),
            "clip/radius_mean": _mean(self._stat("radius")[counted_P]),
            "judge/failure_rate": float(self.stats["judge_failure_rate"]),
        }
        for name in ("ratio", "correlation"):
            value_P = self._stat(name)[telling_P]
            defined = value_P[~value_P.isnan()].double()
            for quantile in (0.1, 0.5, 0.9) if len(defined) else ():
                metrics[f"gate/{name}_p{quantile * 100:.0f}"] = float(defined.quantile(quantile))
        for name, value in self.stats.items():
            if name.startswith("zero_variance_share/"):
                metrics[name] = float(value)
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _stat(self, name: str) -> Tensor:
        value = self.stats[name]
        assert isinstance(value, Tensor)
        return value


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


@dataclass(frozen=True, slots=True)
class Groups:
    """What the estimators read: the batch and the statistics of its groups."""

    batch: Batch
    out: Normalised
    mix: Normalised  # as `out` in groups without a reasoning reward
    ratio_P: Tensor
    correlation_P: Tensor
    saturated_P: Tensor
    gate_P: Tensor
    difficulty_P: Tensor


@torch.no_grad()
def estimate(
    method: str | Method,
    rewards: Mapping[str, Tensor],
    *,
    valid: Tensor | None = None,
    r_min: Tensor,
    r_max: Tensor,
) -> Estimate:
    """Advantages and clip radii of a batch of P groups of G rollouts.

    method: a name of the registry, or an entry of it, as it stands or changed (`Method.changed`).
    rewards: (P, G) tensors by name. `outcome`, or `format` and `correct`, of which it is the sum; gdpo and dara
    need the two parts. `reasoning`, scaled, >= 0, NaN where a judgement failed; needed by the methods that read it,
    and else only for the statistics.
    valid: (P, G) bool, all true by default.
    r_min, r_max: (P,), smallest and largest outcome of each prompt. A method with an overlong penalty may lie up to
    1 below r_min.

    Results carry no gradient. They have the dtype of the rewards, but at least float32: advantages without a std
    may be larger than half precision holds.

    Raises UserError for a name that the registry does not hold; ValueError for a method that trains no policy, a
    missing reward, something that is no real tensor, a wrong shape, an empty range, and a reward outside its range at
    a valid rollout (`awpo.groups.check_ranges`).
    """
    method = get_method(method) if isinstance(method, str) else method
    if method.estimator is None:
        raise ValueError(f"method {method.name!r} trains no policy: it has no advantages")
    batch = read_batch(method, rewards, valid, r_min, r_max)
    groups = compare_rewards(method, batch)
    advantages_PG = ESTIMATORS[method.estimator](method, groups)
    low_P, high_P = clip_radii(method, groups.gate_P, groups.ratio_P)

    closed_by_failure_P = batch.failed_PG.any(dim=1)
    stats: dict[str, Tensor | float] = {
        "ratio": groups.ratio_P,
        "correlation": groups.correlation_P,
        "gate": groups.gate_P,
        "saturated": groups.saturated_P,
        "difficulty": groups.difficulty_P,
        "radius": (low_P + high_P) / 2,
        "closed_by_failure": closed_by_failure_P,
        "counted": batch.counted_P,
        "outcome_varies": groups.out.varies_P,
        "mixture_varies": groups.mix.varies_P,
        "judge_failure_rate": float(batch.failed_PG.sum() / batch.valid_PG.sum().clamp(min=1)),
    }
    for name, reward_PG in {**batch.parts, "outcome": batch.outcome_PG}.items():
        flat_P = ~normalise(reward_PG, batch.valid_PG, method).varies_P
        known_P = batch.known_P(name)
        stats[f"zero_variance_share/{name}"] = float((flat_P & known_P).sum() / known_P.sum().clamp(min=1))

    dtype = torch.float64 if any(reward.dtype == torch.float64 for reward in rewards.values()) else torch.float32
    return Estimate(advantages_PG.to(dtype), low_P.to(dtype), high_P.to(dtype), stats)


# Statistics of a group


def gate(
    method: Method, batch: Batch, out: Normalised, ratio_P: Tensor, correlation_P: Tensor, saturated_P: Tensor
) -> Tensor:
    """w in [0, 1], the share of the mixed advantage in the final one. (P,)

        w_g = open_g 1[mean_out < r_max - 1e-3]

    ratio                 open = 1[r >= ratio_min]
    soft                  open = min(r, 1)
    low_outcome_variance  open = 1[std_out <= tau (r_max - r_min)]
    correlation           open = 1[c >= c_min]
    always, never         w = 1 and w = 0, saturated or not

    A reconstruction of equation 21 of arXiv 2512.19126: `ratio` is the reading of its section 3 (the paper's
    rho <= eps_mix, see `Method`), `low_outcome_variance` that of its introduction; `soft` and `correlation` are
    ours. A failed judgement closes every gate. Where r is undefined only `always` stays open.
    """
    if method.gate == "never":
        return torch.zeros_like(ratio_P)
    if method.gate == "always":
        return batch.judged_P.to(ratio_P.dtype)
    if method.gate == "ratio":
        open_P = _at_least(ratio_P, method.ratio_min)
    elif method.gate == "soft":
        open_P = ratio_P.clamp(max=1)
    elif method.gate == "low_outcome_variance":
        open_P = _at_least(method.tau * (batch.r_max_P - batch.r_min_P), out.std_P)
    else:
        open_P = _at_least(correlation_P, method.c_min)
    shut_P = saturated_P | ratio_P.isnan()  # r is NaN, too, without a reasoning reward
    return open_P.to(ratio_P.dtype).masked_fill(shut_P, 0)


def difficulty_weight(method: Method, mean_out_P: Tensor, batch: Batch) -> Tensor:
    """d in [floor, 1], largest for prompts of middling success p = (mean_out - r_min) / (r_max - r_min). (P,)

    parabola  floor + (1 - floor) 4 p (1 - p)
    gaussian  floor + (1 - floor) exp(-(p - 0.5)^2 / (2 0.25^2))
    band      1 for 0.2 <= p <= 0.8, else floor
    none      1

    A reconstruction of equation 22 of arXiv 2512.19126, whose prose asks for prompts of medium difficulty and leaves
    the form open. `renormalise` divides by the mean over the batch's groups. 0 for a group without a valid rollout.
    """
    progress_P = ((mean_out_P - batch.r_min_P) / (batch.r_max_P - batch.r_min_P)).clamp(0, 1)
    if method.difficulty == "parabola":
        shape_P = 4 * progress_P * (1 - progress_P)
    elif method.difficulty == "gaussian":
        shape_P = torch.exp(-((progress_P - 0.5) ** 2) / (2 * 0.25**2))
    elif method.difficulty == "band":
        shape_P = (_at_least(progress_P, 0.2) & _at_least(0.8, progress_P)).to(progress_P.dtype)
    else:
        shape_P = torch.ones_like(progress_P)
    weight_P = (method.difficulty_floor + (1 - method.difficulty_floor) * shape_P).where(batch.counted_P, 0)
    if method.renormalise and weight_P.sum() > 0:
        weight_P = weight_P * (batch.counted_P.sum() / weight_P.sum())
    return weight_P


def compare_rewards(method: Method, batch: Batch) -> Groups:
    """Outcome against outcome + lambda x reasoning, group by group.

    R_mix = R_out + lambda R_rea (equation 20 of arXiv 2512.19126), each centred before they are added, so that a
    constant judge leaves no rounding behind and R_mix is R_out.
    """
    valid_PG = batch.valid_PG
    out = normalise(batch.outcome_PG, valid_PG, method)
    rea = normalise(batch.reasoning_PG, valid_PG, method)
    mix = normalise(
        out.centred_PG + method.mix_coefficient * rea.centred_PG,
        valid_PG,
        method,
        magnitude_PG=batch.outcome_PG.abs() + method.mix_coefficient * batch.reasoning_PG.abs(),
    )
    mean_out_P = batch.outcome_PG.sum(dim=1) / valid_PG.sum(dim=1).clamp(min=1)
    saturated_P = batch.counted_P & (mean_out_P >= batch.r_max_P - SATURATION_MARGIN)
    ratio_P = variance_ratio(out, mix).masked_fill(~batch.judged_P, math.nan)
    correlation_P = advantage_correlation(out, mix, valid_PG, method).masked_fill(~batch.judged_P, math.nan)
    gate_P = gate(method, batch, out, ratio_P, correlation_P, saturated_P)
    difficulty_P = difficulty_weight(method, mean_out_P, batch)
    return Groups(batch, out, mix, ratio_P, correlation_P, saturated_P, gate_P, difficulty_P)


def _at_least(value: Tensor | float, threshold: Tensor | float) -> Tensor:
    return torch.as_tensor(value >= threshold - COMPARISON_TOLERANCE)


# Estimators: (method, groups) -> (P, G)


def grpo(method: Method, groups: Groups) -> Tensor:
    """A = (R_out - mean) / (std + eps). GRPO, arXiv 2402.03300; with this reward ToolRL, arXiv 2504.13958."""
    return groups.out.advantages_PG


def dr_grpo(method: Method, groups: Groups) -> Tensor:
    """A = R_out - mean: without the std, which overweights prompts that are nearly solved or nearly hopeless.

    Dr. GRPO, arXiv 2503.20783.
    """
    return groups.out.centred_PG


def grpo_mixed(method: Method, groups: Groups) -> Tensor:
    """A = (R_mix - mean) / (std + eps), R_mix = R_out + lambda R_rea: the naive mixture of arXiv 2512.19126."""
    return groups.mix.advantages_PG


def gated_accumulation(method: Method, groups: Groups) -> Tensor:
    """GRPO on R_out + lambda R_rea 1[R_out >= (r_min + r_max) / 2], rollout by rollout.

    Gated Reward Accumulation, arXiv 2508.10548, which counts lower rewards only once the higher one meets a
    threshold. The middle of the outcome's range as threshold is this project's choice.
    """
    batch = groups.batch
    middle_P1 = ((batch.r_min_P + batch.r_max_P) / 2)[:, None]
    reached_PG = _at_least(batch.outcome_PG, middle_P1)
    reward_PG = batch.outcome_PG + method.mix_coefficient * batch.reasoning_PG.where(reached_PG, 0)
    return normalise(reward_PG, batch.valid_PG, method).advantages_PG


def gdpo(method: Method, groups: Groups) -> Tensor:
    """Every reward normalised in its group, summed, then normalised over the batch.

        A_sum = sum over k of (R_k - mean_k) / (std_k + eps);    A = (A_sum - batch mean) / (batch std + eps)

    GDPO, arXiv 2601.05242. Rewards k: format, correct, reasoning.
    """
    return _summed_over_the_batch(method, groups, _in_groups(method, groups))


def dara(method: Method, groups: Groups) -> Tensor:
    """GDPO with the positive advantages of reward k weighted by how rarely that reward says anything.

        pi_k = share of groups where A_k is not 0 everywhere;    w_k = min(4, sqrt(max over j of pi_j / pi_k))

    Negative advantages keep weight 1. The share is over the groups where reward k is known: a judge that fails is
    not a judge that is sparse. Density-Aware Reward Aggregation, arXiv 2610.00574.
    """
    parts_KPG = _in_groups(method, groups)
    known_KP = torch.stack([groups.batch.known_P(name) for name in groups.batch.parts])
    density_K = (parts_KPG != 0).any(dim=2).sum(dim=1) / known_KP.sum(dim=1).clamp(min=1)
    weight_K = (density_K.max() / density_K).sqrt().where(density_K > 0, 1).clamp(max=DARA_WEIGHT_MAX)
    weighted_KPG = torch.where(parts_KPG > 0, weight_K[:, None, None] * parts_KPG, parts_KPG)
    return _summed_over_the_batch(method, groups, weighted_KPG)


def awpo(method: Method, groups: Groups) -> Tensor:
    """A = d [ (1 - w) A_out + w A_mix ], with the gate w (`gate`) and the difficulty weight d (`difficulty_weight`).

    A reconstruction of equation 23 of arXiv 2512.19126 from its prose. Alternatives that fit the same words: mixing
    the rewards before they are normalised instead of the advantages after (the same for w in {0, 1}, not for the
    gate `soft`), and d on the mixed advantage alone.
    """
    weight_P1 = groups.gate_P[:, None]
    blend_PG = (1 - weight_P1) * groups.out.advantages_PG + weight_P1 * groups.mix.advantages_PG
    return groups.difficulty_P[:, None] * blend_PG


ESTIMATORS: Mapping[str, Callable[[Method, Groups], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "grpo_mixed": grpo_mixed,
    "gated_accumulation": gated_accumulation,
    "gdpo": gdpo,
    "dara": dara,
    "awpo": awpo,
}


def _in_groups(method: Method, groups: Groups) -> Tensor:
    """A_k of each of the method's rewards in its group, (K, P, G)."""
    parts = groups.batch.parts.values()
    return torch.stack([normalise(part_PG, groups.batch.valid_PG, method).advantages_PG for part_PG in parts])


def _summed_over_the_batch(method: Method, groups: Groups, parts_KPG: Tensor) -> Tensor:
    """The sum over rewards, normalised over the batch's valid rollouts.

    A group in which no reward varies counts in the statistics but stays at 0: the mean that dara's weights leave
    must not push on rollouts that nothing tells apart.
    """
    valid_PG = groups.batch.valid_PG
    total_PG = parts_KPG.sum(dim=0)
    if not total_PG.numel():
        return total_PG
    whole = normalise(total_PG.reshape(1, -1), valid_PG.reshape(1, -1), method)
    silent_P1 = (parts_KPG == 0).all(dim=0).all(dim=1, keepdim=True)
    return whole.advantages_PG.reshape(total_PG.shape).masked_fill(silent_P1, 0)
