"""Clip radii: how far a rollout's probability ratio may move before the surrogate stops paying for it.

The surrogate is min(rho A, clip(rho, 1 - low, 1 + high) A) with one radius per group; axis suffix _P: prompts.
With a single optimiser step per rollout batch rho is 1 and no radius does anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from awpo.methods import Method


def fixed(gate_P: Tensor, epsilon: float) -> Tensor:
    """The same radius for every group: epsilon_g = epsilon. (P,)

    PPO, arXiv 1707.06347; DAPO (arXiv 2503.14476) has a larger one above 1 than below.
    """
    return torch.full_like(gate_P, epsilon)


def shrinking(gate_P: Tensor, ratio_P: Tensor, *, epsilon: float, kappa: float, epsilon_min: float) -> Tensor:
    """AWPO's radius, smaller where the reasoning reward has a say and adds variance.

        epsilon_g = max(epsilon_min, epsilon (1 - kappa u_g)),    u_g = w_g max(0, 1 - r_g)

    A reconstruction of equation 24 of arXiv 2512.19126 from its prose, which asks for a tighter clip where mixed
    signals dominate and leaves the form, the slope `kappa` and the smallest radius open. Under the gate `ratio`
    u_g never passes 1 - ratio_min; under `low_outcome_variance` it reaches 1, and the radius `epsilon_min`.

    gate_P: w in [0, 1]; ratio_P: r >= 0, or NaN where undefined, which shrinks nothing. Returns (P,).
    """
    influence_P = gate_P * (1 - ratio_P.nan_to_num(nan=1.0)).clamp(min=0)
    return (epsilon * (1 - kappa * influence_P)).clamp(min=epsilon_min)


def clip_radii(method: Method, gate_P: Tensor, ratio_P: Tensor) -> tuple[Tensor, Tensor]:
    """The radii (low, high) of each group, (P,) each, by the method's clip rule."""
    if method.clip == "fixed":
        return fixed(gate_P, method.epsilon_low), fixed(gate_P, method.epsilon_high)
    radius_P = shrinking(
        gate_P, ratio_P, epsilon=method.epsilon_low, kappa=method.kappa, epsilon_min=method.epsilon_min
    )
    return radius_P, radius_P.clone()
