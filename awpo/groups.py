"""Rewards in their groups: the checked batch, a reward normalised in its group, and two rewards compared.

Axis suffixes: _P prompts (groups), _G rollouts of a prompt. Mean and std are over the valid rollouts of one group,
in float64. `awpo.advantages` says what holds throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from awpo.methods import Method

LARGEST = 1e100
"""Rewards beyond this size are refused: their squares would leave the range of float64."""
VARIANCE_TOLERANCE = 1e-6
"""Relative spread up to which rewards count as equal."""
RANGE_TOLERANCE = 1e-5
"""How far, relative to the bound, an outcome may lie outside its declared range."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Checked rewards in float64; 0 at invalid rollouts, and `reasoning` also where it is not known."""

    outcome_PG: Tensor
    reasoning_PG: Tensor
    parts: dict[str, Tensor]  # the method's rewards by name, (P, G) each
    valid_PG: Tensor
    failed_PG: Tensor  # valid, and its judgement failed
    judged_P: Tensor  # every valid rollout of the group has a reasoning reward
    r_min_P: Tensor
    r_max_P: Tensor

    @property
    def counted_P(self) -> Tensor:
        """Groups with at least one valid rollout."""
        return self.valid_PG.any(dim=1)

    def known_P(self, reward: str) -> Tensor:
        """Groups that have this reward."""
        return self.judged_P if reward == "reasoning" else self.counted_P


@dataclass(frozen=True, slots=True)
class Normalised:
    """A reward in its group: R - mean, std, whether it varies, and A = (R - mean) / (std + eps)."""

    centred_PG: Tensor
    std_P: Tensor
    varies_P: Tensor
    advantages_PG: Tensor


def read_batch(
    method: Method, rewards: Mapping[str, Tensor], valid: Tensor | None, r_min: Tensor, r_max: Tensor
) -> Batch:
    """Checks what `estimate` was given; see there for shapes and errors."""
    if not rewards:
        raise ValueError("no rewards given")
    valid_given = {} if valid is None else {"valid": valid}
    for name, value in {**rewards, "r_min": r_min, "r_max": r_max, **valid_given}.items():
        if not isinstance(value, Tensor) or value.is_complex():
            raise ValueError(f"{name} must be a tensor of real numbers, got {getattr(value, 'dtype', type(value))}")
    shape = next(iter(rewards.values())).shape
    if len(shape) != 2 or shape[1] == 0:
        raise ValueError(f"rewards must have the shape (prompts, rollouts), got {tuple(shape)}")
    for name, reward_PG in rewards.items():
        if reward_PG.shape != shape:
            raise ValueError(f"reward {name!r} has shape {tuple(reward_PG.shape)}, others {tuple(shape)}")
    for name, bound_P in (("r_min", r_min), ("r_max", r_max)):
        if bound_P.shape != shape[:1]:
            raise ValueError(f"{name} must have the shape ({shape[0]},), got {tuple(bound_P.shape)}")
    valid_PG = torch.ones_like(next(iter(rewards.values())), dtype=torch.bool) if valid is None else valid
    if valid_PG.shape != shape or valid_PG.dtype != torch.bool:
        raise ValueError(f"valid must be bool of shape {tuple(shape)}")

    values = {name: reward_PG.double().where(valid_PG, 0) for name, reward_PG in rewards.items()}
    if "outcome" not in values and {"format", "correct"} <= values.keys():
        values["outcome"] = values["format"] + values["correct"]
    missing = [name for name in dict.fromkeys(("outcome", *method.rewards)) if name not in values]
    if missing:
        either = " ('outcome', or 'format' and 'correct')" if "outcome" in missing else ""
        raise ValueError(f"method {method.name!r} needs the rewards {', '.join(map(repr, missing))}{either}")
    r_min_P, r_max_P = r_min.double(), r_max.double()
    check_ranges(method, values, valid_PG, r_min_P, r_max_P)

    reasoning_PG = values.get("reasoning", torch.full_like(values["outcome"], math.nan))
    failed_PG = reasoning_PG.isnan() & ("reasoning" in values)
    judged_P = valid_PG.any(dim=1) & ~reasoning_PG.isnan().any(dim=1)
    values["reasoning"] = reasoning_PG = reasoning_PG.where(judged_P[:, None], 0)
    parts: dict[str, Tensor] = {name: values[name] for name in method.rewards}
    return Batch(values["outcome"], reasoning_PG, parts, valid_PG, failed_PG, judged_P, r_min_P, r_max_P)


def check_ranges(
    method: Method, values: Mapping[str, Tensor], valid_PG: Tensor, r_min_P: Tensor, r_max_P: Tensor
) -> None:
    """Raises ValueError for an empty range, and for a reward outside its range at a valid rollout.

    outcome r_min to r_max, and down to r_min - 1 with an overlong penalty; format 0 to 1; correct r_min to r_max;
    reasoning from 0 on, or NaN.
    """
    bounded_P = (r_min_P.abs() <= LARGEST) & (r_max_P.abs() <= LARGEST)
    refused_P = ~(bounded_P & (r_min_P < r_max_P))
    if refused_P.any():
        prompt = int(refused_P.nonzero()[0])
        raise ValueError(
            f"r_min must be less than r_max, both at most {LARGEST:g} in size; those of prompt {prompt} are "
            f"{float(r_min_P[prompt])} and {float(r_max_P[prompt])}"
        )
    ranges: dict[str, tuple[Tensor, Tensor]] = {
        "outcome": (r_min_P - 1 if method.overlong_share else r_min_P, r_max_P),
        "format": (torch.zeros_like(r_min_P), torch.ones_like(r_min_P)),
        "correct": (r_min_P, r_max_P),
        "reasoning": (torch.zeros_like(r_min_P), torch.full_like(r_min_P, LARGEST)),
    }
    anything = torch.full_like(r_min_P, -LARGEST), torch.full_like(r_min_P, LARGEST)
    for name, value_PG in values.items():
        low_P, high_P = ranges.get(name, anything)
        above_PG = value_PG >= (low_P - RANGE_TOLERANCE * low_P.abs().clamp(min=1))[:, None]
        below_PG = value_PG <= (high_P + RANGE_TOLERANCE * high_P.abs().clamp(min=1))[:, None]
        allowed_PG = above_PG & below_PG & value_PG.isfinite()
        if name == "reasoning":
            allowed_PG |= value_PG.isnan()
        refused = (valid_PG & ~allowed_PG).nonzero()
        if len(refused):
            prompt, rollout = refused[0].tolist()
            raise ValueError(
                f"reward {name!r} of prompt {prompt}, rollout {rollout} is {float(value_PG[prompt, rollout])}: "
                f"outside its range {float(low_P[prompt])} to {float(high_P[prompt])}"
            )


def normalise(reward_PG: Tensor, valid_PG: Tensor, method: Method, magnitude_PG: Tensor | None = None) -> Normalised:
    """A = (R - mean) / (std + eps) over the valid rollouts of each group; 0 where R has no variance or is invalid.

    `magnitude_PG` is what max|R| is taken of, |R| by default: for a sum of centred rewards, the size of the terms
    that were centred, since theirs is the rounding error. `method` gives the std's divisor, K or K - 1, and eps.
    """
    magnitude_PG = reward_PG.abs() if magnitude_PG is None else magnitude_PG
    count_P = valid_PG.sum(dim=1)
    mean_P = reward_PG.where(valid_PG, 0).sum(dim=1) / count_P.clamp(min=1)
    centred_PG = (reward_PG - mean_P[:, None]).where(valid_PG, 0)
    spread_P = centred_PG.amax(dim=1) - centred_PG.amin(dim=1)  # the 0 of an invalid rollout lies between the two
    size_P = magnitude_PG.where(valid_PG, 0).amax(dim=1).clamp(min=1)
    varies_P = spread_P > VARIANCE_TOLERANCE * size_P
    centred_PG = centred_PG.where(varies_P[:, None], 0)
    divisor_P = _divisor(valid_PG, method)
    std_P = (centred_PG.square().sum(dim=1) / divisor_P).sqrt()
    return Normalised(centred_PG, std_P, varies_P, centred_PG / (std_P + method.eps)[:, None])


def variance_ratio(out: Normalised, mix: Normalised) -> Tensor:
    """r = std_out / std_mix; 1 where neither varies, NaN where only the outcome does (the judge cancels it). (P,)

    With s = std_rea / std_out and rho = corr(out, rea), r = 1 / sqrt(1 + 2 rho s + s^2): 0.71 for an independent
    judge of the outcome's scale, 0.5 for one that agrees, and above 1 for one that disagrees. Read literally, the
    ratio prefers a judge that contradicts the outcome.
    """
    ratio_P = out.std_P / mix.std_P.where(mix.varies_P, 1)
    undefined_P = torch.full_like(ratio_P, math.nan).where(out.varies_P, 1)
    return ratio_P.where(mix.varies_P, undefined_P)


def advantage_correlation(out: Normalised, mix: Normalised, valid_PG: Tensor, method: Method) -> Tensor:
    """c = mean of A_out A_mix = (1 + rho s) r, in [-1, 1]: does the mixture still reward what the outcome rewards?

    The mean has the divisor of the method's std, so that c is the correlation of out and mix. 0 where either has no
    variance. (P,)
    """
    return (out.advantages_PG * mix.advantages_PG).sum(dim=1) / _divisor(valid_PG, method)


def _divisor(valid_PG: Tensor, method: Method) -> Tensor:
    """K or, for the sample std, K - 1, K being the number of valid rollouts; at least 1."""
    return (valid_PG.sum(dim=1) - int(method.std == "sample")).clamp(min=1)
