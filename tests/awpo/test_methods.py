import subprocess
import sys

import pytest
import torch

from awpo.advantages import estimate
from awpo.errors import UserError
from awpo.methods import METHODS, Method, get_method

# The names of the registry are an interface: presets, runs and reports refer to methods by them.
NAMES = [
    "base",
    "sft",
    "grpo",
    "sft_grpo",
    "dr_grpo",
    "dapo",
    "grpo_mixed",
    "gdpo",
    "dara",
    "gated_accumulation",
    "awpo",
    "awpo_no_difficulty",
    "awpo_no_gating",
    "awpo_fixed_clip",
    "awpo_soft",
    "awpo_low_variance",
    "awpo_correlation",
]


def test_registry_holds_every_name_once():
    assert list(METHODS) == NAMES
    assert all(get_method(name).name == name for name in NAMES)


def test_registry_is_read_only():
    with pytest.raises(TypeError):
        METHODS["mine"] = METHODS["awpo"]  # type: ignore[index]


def test_unknown_name_gives_the_nearest():
    with pytest.raises(UserError, match="'awpo_soft'"):
        get_method("awpo-sotf")
    with pytest.raises(UserError, match="known: base, sft"):
        get_method("?")


@pytest.mark.parametrize("name", NAMES)
def test_a_method_survives_json(name):
    method = METHODS[name]
    assert Method.read(method.to_json(), "here") == method


@pytest.mark.parametrize("name", NAMES)
def test_every_method_says_what_it_is(name):
    method = METHODS[name]
    assert method.summary
    assert "\n" not in method.summary
    assert method.sources or not method.trains
    assert method.reading.startswith("reconstruction") == name.startswith("awpo")


def test_which_train_and_which_need_a_judge():
    assert {name for name in NAMES if not METHODS[name].trains} == {"base", "sft"}
    outcome_only = {"base", "sft", "grpo", "sft_grpo", "dr_grpo", "dapo"}
    assert {name for name in NAMES if not METHODS[name].needs_judge} == outcome_only


def differences(name: str, other: str) -> dict[str, object]:
    one, two = METHODS[name].to_json(), METHODS[other].to_json()
    return {key: one[key] for key in one if one[key] != two[key] and key not in ("name", "summary", "sources")}


@pytest.mark.parametrize(
    ("name", "other", "expected"),
    [
        ("awpo_no_difficulty", "awpo", {"difficulty": "none"}),
        ("awpo_no_gating", "awpo", {"gate": "always"}),
        ("awpo_fixed_clip", "awpo", {"clip": "fixed"}),
        ("awpo_soft", "awpo", {"gate": "soft"}),
        ("awpo_low_variance", "awpo", {"gate": "low_outcome_variance"}),
        ("awpo_correlation", "awpo", {"gate": "correlation"}),
        ("sft_grpo", "grpo", {"stages": ["sft", "policy"]}),
        (
            "dapo",
            "grpo",
            {"epsilon_high": 0.28, "loss": "dapo", "dynamic_sampling_rounds": 3, "overlong_share": 0.2},
        ),
        ("dr_grpo", "grpo", {"estimator": "dr_grpo", "loss": "dr_grpo"}),
        ("dara", "gdpo", {"estimator": "dara"}),
    ],
)
def test_an_ablation_differs_in_what_its_name_says_only(name, other, expected):
    assert differences(name, other) == expected


def test_the_defaults_of_awpo():
    method = get_method("awpo")
    assert (method.gate, method.ratio_min, method.mix_coefficient) == ("ratio", 0.7, 1.0)
    assert (method.difficulty, method.difficulty_floor, method.renormalise) == ("parabola", 0.1, False)
    assert (method.clip, method.epsilon_low, method.kappa, method.epsilon_min) == ("shrinking", 0.2, 1.0, 0.05)
    assert (method.std, method.eps, method.loss, method.kl) == ("population", 1e-6, "grpo", 0.0)


def test_methods_are_immutable():
    with pytest.raises(ValueError, match="frozen"):
        get_method("awpo").ratio_min = 0.1


def test_the_papers_threshold_is_another_way_to_write_ratio_min():
    awpo = get_method("awpo")
    assert awpo.changed(eps_mix=2.0).ratio_min == pytest.approx(0.5)
    assert awpo.changed(eps_mix=1.25, rho="mix_over_out").ratio_min == pytest.approx(0.8)
    assert awpo.changed(eps_mix=0.6, rho="mix_over_sum").ratio_min == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio_mn": 0.5}, "did you mean 'ratio_min'"),
        ({"gate": "open"}, "gate"),
        ({"tau": -1}, "tau"),
        ({"eps_mix": 0}, "eps_mix"),
        ({"eps_mix": 1.5, "rho": "mix_over_sum"}, "rho"),
        ({"eps_mix": 1.5, "rho": "other"}, "rho"),
        ({"rho": "mix_over_out"}, "give eps_mix with it"),
        ({"eps_mix": 1.5, "ratio_min": 0.5}, "eps_mix and ratio_min both say from which variance ratio"),
        ({"gate": "correlation", "eps_mix": 1.5}, "nothing there reads eps_mix; what acts: estimator, .*gate, c_min"),
        ({"tau": 0.1, "c_min": 0.1}, "nothing there reads tau, c_min; what acts: .*ratio_min.*, eps_mix$"),
        ({"epsilon_high": 0.3}, "symmetric"),
        ({"epsilon_min": 0.3}, "symmetric"),
        ({"rewards": ["outcome"]}, "needs the reward 'reasoning'"),
        ({"estimator": None}, "policy stage"),
        ({"stages": ["sft"]}, "policy stage"),
        ({"gate": "never", "rewards": ["outcome"]}, "estimator 'awpo' needs the reward 'reasoning'"),
        ({"estimator": "grpo_mixed"}, "estimator 'grpo_mixed' has no difficulty weight"),
        (
            {"estimator": "gdpo", "difficulty": "none", "rewards": ["correct", "reasoning"], "overlong_share": 0.2},
            "overlong penalty is a part of the reward 'outcome'",
        ),
    ],
)
def test_a_wrong_change_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        get_method("awpo").changed(**changes)


def test_the_settings_in_force():
    common = {"std": "population", "eps": 1e-6, "loss": "grpo", "kl": 0.0}
    clip = {"clip": "fixed", "epsilon_low": 0.2, "epsilon_high": 0.2}
    assert get_method("grpo").in_force() == {"estimator": "grpo", "rewards": ["outcome"], **clip, **common}
    assert get_method("dapo").in_force() == {
        "estimator": "grpo", "rewards": ["outcome"], **clip, "epsilon_high": 0.28, **common, "loss": "dapo",
        "dynamic_sampling_rounds": 3, "overlong_share": 0.2,
    }  # fmt: skip
    assert get_method("awpo_correlation").in_force() == {
        "estimator": "awpo", "rewards": ["outcome", "reasoning"], "gate": "correlation", "c_min": 0.5,
        "mix_coefficient": 1.0, "difficulty": "parabola", "difficulty_floor": 0.1, "renormalise": False,
        "clip": "shrinking", "epsilon_low": 0.2, "epsilon_high": 0.2, "kappa": 1.0, "epsilon_min": 0.05, **common,
    }  # fmt: skip
    assert get_method("sft").in_force() == get_method("base").in_force() == {}


@pytest.mark.parametrize("name", [name for name in NAMES if METHODS[name].trains])
def test_a_setting_that_is_not_in_force_changes_nothing(name):
    rewards = {
        "format": torch.tensor([[1.0, 0, 1, 1], [1, 1, 1, 0]]),
        "correct": torch.tensor([[3.0, -2, 0, 0], [1, -1, 2, 0]]),
        "reasoning": torch.tensor([[0.1, 0.2, 0.9, 0.4], [3, 0, 1, 2]]),
    }
    bounds = {"r_min": torch.tensor([-3.0, -3]), "r_max": torch.tensor([4.0, 4])}
    method = METHODS[name]
    expected = estimate(method, rewards, **bounds)
    idle = {
        "ratio_min": 0.9, "tau": 0.9, "c_min": 0.99, "mix_coefficient": 0.3, "difficulty_floor": 0.5,
        "renormalise": True, "kappa": 0.5, "epsilon_min": 0.19, "eps": 0.1, "std": "sample",
    }  # fmt: skip
    for key in idle.keys() - method.in_force().keys():
        with pytest.raises(UserError, match=f"nothing there reads {key};"):
            method.changed(**{key: idle[key]})
        found = estimate(Method.read({**method.to_json(), key: idle[key]}, "here"), rewards, **bounds)
        for part in ("advantages", "clip_low", "clip_high"):
            assert torch.equal(getattr(found, part), getattr(expected, part)), key
    for key in {"eps", "std", "difficulty_floor"} & method.in_force().keys():  # and the test can tell
        assert not torch.equal(
            estimate(method.changed(**{key: idle[key]}), rewards, **bounds).advantages, expected.advantages
        )


def test_a_key_that_does_nothing_in_the_method_is_refused():
    with pytest.raises(UserError) as caught:
        get_method("grpo").changed(kappa=0.5)
    assert str(caught.value) == (
        "method 'grpo': nothing there reads kappa; what acts: estimator, rewards, clip, epsilon_low, epsilon_high, std, "
        "eps, loss, kl"
    )
    with pytest.raises(UserError, match="method 'sft': nothing there reads kl; what acts: nothing"):
        get_method("sft").changed(kl=0.1)
    # The key that makes another act may stand beside it; what is switched off can be said, and what a method is called.
    assert get_method("grpo").changed(clip="shrinking", kappa=0.5).kappa == 0.5
    assert get_method("dapo").changed(overlong_share=0.0, name="dapo_short").overlong_share == 0
    assert get_method("grpo").changed(dynamic_sampling_rounds=0) == get_method("grpo")


def test_listing_methods_does_not_load_torch():
    code = "import sys, awpo.methods; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
