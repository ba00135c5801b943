import math

import pytest
import torch

from awpo.clipping import clip_radii, shrinking
from awpo.methods import get_method


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_radius_shrinks_with_the_gate_and_the_added_variance():
    gate_P = double(1, 1, 0.5, 0, 1)
    ratio_P = double(1, 0.75, 0.5, 0.5, 0.0)
    radius_P = shrinking(gate_P, ratio_P, epsilon=0.2, kappa=1.0, epsilon_min=0.05)
    # u = 0, 0.25, 0.5 x 0.5, 0 (gate closed), 1 (down to the floor)
    assert radius_P.tolist() == pytest.approx([0.2, 0.15, 0.15, 0.2, 0.05])


def test_kappa_is_the_slope():
    radius_P = shrinking(double(1, 1), double(0.75, 0.75), epsilon=0.2, kappa=2.0, epsilon_min=0.05)
    assert radius_P.tolist() == pytest.approx([0.1, 0.1])


def test_a_ratio_above_one_never_widens():
    radius_P = shrinking(double(1), double(7.0), epsilon=0.2, kappa=1.0, epsilon_min=0.05)
    assert radius_P.tolist() == [0.2]


def test_an_undefined_ratio_shrinks_nothing():
    for gate in (0.0, 1.0):
        radius_P = shrinking(double(gate), double(math.nan), epsilon=0.2, kappa=1.0, epsilon_min=0.05)
        assert radius_P.tolist() == [0.2]


def test_under_the_ratio_gate_the_radius_stays_above_its_bound():
    ratio_P = torch.linspace(0.7, 1.5, 33, dtype=torch.float64)
    low_P, high_P = clip_radii(get_method("awpo"), torch.ones_like(ratio_P), ratio_P)
    assert low_P.min().item() == pytest.approx(0.2 * 0.7)
    assert torch.equal(low_P, high_P)


def test_each_group_has_its_own_radius_and_each_side_its_own_tensor():
    low_P, high_P = clip_radii(get_method("awpo_soft"), double(0.9, 0.5, 0.0), double(0.9, 0.5, math.nan))
    assert low_P.tolist() == high_P.tolist() == pytest.approx([0.2 * (1 - 0.09), 0.2 * (1 - 0.25), 0.2])
    low_P += 1  # a caller that changes one side leaves the other as it was
    assert high_P[2].item() == 0.2


def test_fixed_ignores_gate_and_ratio():
    low_P, high_P = clip_radii(get_method("awpo_fixed_clip"), double(1, 0), double(0.1, math.nan))
    assert low_P.tolist() == high_P.tolist() == [0.2, 0.2]


def test_dapo_clips_higher_above():
    low_P, high_P = clip_radii(get_method("dapo"), double(0), double(math.nan))
    assert (low_P.item(), high_P.item()) == (0.2, 0.28)
