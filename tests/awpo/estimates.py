"""Advantages of rewards that are written down, for the tests of `awpo.advantages`."""

import math

import pytest
import torch

from awpo.advantages import Estimate, estimate
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
