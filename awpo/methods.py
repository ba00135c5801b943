"""The registry of methods: what is trained with, as data.

A `Method` names an estimator of advantages (`awpo.advantages`), its gate, difficulty weight and clip rule
(`awpo.clipping`), its loss and the rewards it reads. Adding a method is adding an entry here and, where the
mathematics is new, one pure function there. Nothing here imports torch, so that a form or a command line can list
the methods at once.

Every `awpo*` entry is a reconstruction: the display equations 20 to 24 of the AWPO paper (arXiv 2512.19126, v3)
were rebuilt from its prose. Each choice that the prose leaves open is a key with the other readings beside it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from awpo.errors import UserError
from awpo.settings import Settings

Estimator = Literal["grpo", "dr_grpo", "grpo_mixed", "gdpo", "dara", "gated_accumulation", "awpo"]
Reward = Literal["outcome", "format", "correct", "reasoning"]
Gate = Literal["ratio", "soft", "low_outcome_variance", "correlation", "always", "never"]
Difficulty = Literal["parabola", "gaussian", "band", "none"]
Stage = Literal["sft", "policy"]

DEEPSEEKMATH = "GRPO: Shao et al. 2024, arXiv 2402.03300"
TOOLRL = "ToolRL: Qian et al. 2025, arXiv 2504.13958"
AWPO_PAPER = "AWPO: Lin et al. 2025, arXiv 2512.19126 (v3), equations 20 to 24"

RECONSTRUCTION = (
    "reconstruction of equations 20 to 24 from the paper's prose; open choices: what the gate compares "
    "(`gate`: ratio, soft, low_outcome_variance, correlation), the form of the difficulty weight (`difficulty`: "
    "parabola, gaussian, band), how far the clip radius shrinks (`kappa`, `epsilon_min`), the scale of the judge"
)

# What a method is called and what is told of it; nothing computes with these.
TOLD = ("name", "summary", "sources", "reading", "stages")
# The paper's way to write `ratio_min`.
PAPER_KEYS = frozenset({"eps_mix", "rho"})


class Method(Settings):
    """One method of the registry; symbols are those of `awpo.advantages`."""

    name: str = Field(description="Name in the registry")
    summary: str = Field(description="What it does, in one line")
    sources: tuple[str, ...] = Field((), description="Where it was published")
    reading: str = Field("", description="Where the formula is a reconstruction: of what, and the alternatives")

    stages: tuple[Stage, ...] = Field(("policy",), description="Training stages, in order, that the name stands for")
    estimator: Estimator | None = Field(None, description="Function of `awpo.advantages`; none without a policy stage")
    rewards: tuple[Reward, ...] = Field(("outcome",), description="Rewards that the estimator reads")

    gate: Gate = Field("never", description="When the reasoning reward is let in")
    ratio_min: float = Field(0.7, ge=0, description="Gate `ratio`: open from this std_out / std_mix on")
    tau: float = Field(0.05, ge=0, le=1, description="Gate `low_outcome_variance`: largest std_out / (r_max - r_min)")
    c_min: float = Field(0.5, ge=-1, le=1, description="Gate `correlation`: open from this mean of A_out A_mix on")
    mix_coefficient: float = Field(1.0, ge=0, description="Lambda, the weight of the reasoning reward in R_mix")

    difficulty: Difficulty = Field("none", description="Form of the difficulty weight")
    difficulty_floor: float = Field(0.1, ge=0, le=1, description="Smallest difficulty weight")
    renormalise: bool = Field(False, description="Scale the difficulty weights to mean 1 over the batch")

    clip: Literal["fixed", "shrinking"] = Field("fixed", description="Rule of the clip radius, per group")
    epsilon_low: float = Field(0.2, gt=0, lt=1, description="Clip radius below 1; epsilon_0 of the shrinking rule")
    epsilon_high: float = Field(0.2, gt=0, description="Clip radius above 1; as epsilon_low in the shrinking rule")
    kappa: float = Field(1.0, ge=0, description="Shrinking rule: how strongly the radius follows w (1 - r)")
    epsilon_min: float = Field(0.05, gt=0, lt=1, description="Shrinking rule: smallest radius")

    std: Literal["population", "sample"] = Field("population", description="Divide by K or by K - 1")
    eps: float = Field(1e-6, gt=0, description="Added to a std before dividing by it")

    loss: Literal["grpo", "dr_grpo", "dapo"] = Field(
        "grpo",
        description="grpo: mean over rollouts of token means; dr_grpo: sum over rollouts x maximum length; "
        "dapo: mean over tokens",
    )
    kl: float = Field(0.0, ge=0, description="Coefficient of the KL penalty against the starting policy")
    dynamic_sampling_rounds: int = Field(0, ge=0, description="Rounds in which groups without variance are redrawn")
    overlong_share: float = Field(
        0.0, ge=0, lt=1, description="Last share of the maximum length over which a penalty grows to -1"
    )

    @property
    def trains(self) -> bool:
        """Whether a policy is trained; without, there are no advantages to estimate."""
        return "policy" in self.stages

    @property
    def needs_judge(self) -> bool:
        """Whether thoughts must be scored."""
        return "reasoning" in self.rewards

    def in_force(self) -> dict[str, Any]:
        """The settings that this method's training depends on, in the order of the fields; none without a policy.

        Left out are those that nothing reads under the others (the threshold of another gate, the floor of a
        difficulty weight that is not there, the slope of a clip radius that is fixed), and what is switched off.
        """
        off = {key for key in ("dynamic_sampling_rounds", "overlong_share") if not getattr(self, key)}
        values = self.to_json() if self.trains else {}
        return {key: value for key, value in values.items() if key not in self._idle() | off | set(TOLD)}

    def _idle(self) -> set[str]:
        """The settings that nothing reads, whatever their value, as the others stand."""
        awpo = self.estimator == "awpo"
        idle = {
            "ratio_min": self.gate != "ratio",
            "tau": self.gate != "low_outcome_variance",
            "c_min": self.gate != "correlation",
            "mix_coefficient": self.estimator not in ("awpo", "grpo_mixed", "gated_accumulation"),
            "difficulty_floor": self.difficulty == "none",
            "renormalise": self.difficulty == "none",
            "kappa": self.clip == "fixed",
            "epsilon_min": self.clip == "fixed",
            "eps": self.estimator == "dr_grpo",
            "std": self.estimator == "dr_grpo",
            "gate": not awpo,
            "difficulty": not awpo,
        }
        return {key for key, is_idle in idle.items() if is_idle}

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values; `Method.read` takes them back."""
        return self.model_dump(mode="json")

    def changed(self, **values: Any) -> Method:
        """A checked copy with other values, for a study of one key.

        Raises UserError for a value out of bounds, and for a key that does nothing in the method as it would be: a
        study of it would compare a method with itself.
        """
        where = f"method {self.name!r}"
        kept = {key: value for key, value in self.to_json().items() if not (key == "ratio_min" and "eps_mix" in values)}
        method = Method.read({**kept, **values}, where)
        asked = {"ratio_min" if key in PAPER_KEYS else key: key for key in values}
        idle = [name for key, name in asked.items() if key in method._idle() or not (method.trains or key in TOLD)]
        if idle:
            acting = ", ".join([*method.in_force(), *(["eps_mix"] if "ratio_min" in method.in_force() else [])])
            raise UserError(f"{where}: nothing there reads {', '.join(idle)}; what acts: {acting or 'nothing'}")
        return method

    @model_validator(mode="before")
    @classmethod
    def _paper_threshold(cls, values: Any) -> Any:
        """Accepts `eps_mix`, with `rho` its form, for `ratio_min`: the paper's way to write the same test.

        The paper opens its gate where rho_g <= eps_mix. Two forms of rho fit its text:
        `mix_over_out`, rho = std_mix / std_out, is r >= 1 / eps_mix;
        `mix_over_sum`, rho = std_mix / (std_out + std_mix), is r >= (1 - eps_mix) / eps_mix.
        """
        if not isinstance(values, Mapping) or not values.keys() & PAPER_KEYS:
            return values
        if "eps_mix" not in values:
            raise ValueError("rho says how eps_mix is meant; give eps_mix with it")
        if "ratio_min" in values:
            raise ValueError(
                "eps_mix and ratio_min both say from which variance ratio the gate opens; give one of them"
            )
        values = dict(values)
        eps_mix, rho = values.pop("eps_mix"), values.pop("rho", "mix_over_out")
        if not isinstance(eps_mix, int | float) or eps_mix <= 0:
            raise ValueError("eps_mix must be a number above 0")
        if rho == "mix_over_out":
            values["ratio_min"] = 1 / eps_mix
        elif rho == "mix_over_sum" and eps_mix <= 1:
            values["ratio_min"] = (1 - eps_mix) / eps_mix
        else:
            raise ValueError("rho is 'mix_over_out', or 'mix_over_sum' with eps_mix of at most 1")
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.trains != (self.estimator is not None):
            raise ValueError("a method has an estimator if and only if it has a policy stage")
        if self.clip == "shrinking" and not self.epsilon_min <= self.epsilon_low == self.epsilon_high:
            raise ValueError("the shrinking clip rule is symmetric: epsilon_min <= epsilon_low = epsilon_high")
        if self.gate != "never" and not self.needs_judge:
            raise ValueError(f"gate {self.gate!r} needs the reward 'reasoning'")
        if self.estimator in ("grpo_mixed", "gated_accumulation", "awpo") and not self.needs_judge:
            raise ValueError(f"estimator {self.estimator!r} needs the reward 'reasoning'")
        if self.difficulty != "none" and self.estimator != "awpo":
            raise ValueError(f"estimator {self.estimator!r} has no difficulty weight; set difficulty: none")
        if self.overlong_share and self.trains and "outcome" not in self.rewards:
            raise ValueError("the overlong penalty is a part of the reward 'outcome', which the method doesn't read")
        return self


def _awpo(name: str, summary: str, **changes: Any) -> Method:
    """AWPO as this project reads it, or one change from it."""
    values: dict[str, Any] = {
        "estimator": "awpo",
        "rewards": ("outcome", "reasoning"),
        "gate": "ratio",
        "difficulty": "parabola",
        "clip": "shrinking",
        "sources": (AWPO_PAPER,),
        "reading": RECONSTRUCTION,
    }
    return Method(name=name, summary=summary, **{**values, **changes})


_DECOUPLED: dict[str, Any] = {"rewards": ("format", "correct", "reasoning"), "gate": "always"}
_MIXED: dict[str, Any] = {"rewards": ("outcome", "reasoning"), "gate": "always"}

_ENTRIES = (
    Method(name="base", summary="The model as it comes, without training", stages=(), rewards=()),
    Method(
        name="sft",
        summary="Supervised fine-tuning on rationales and reference actions, no policy training",
        stages=("sft",),
        rewards=(),
    ),
    Method(
        name="grpo",
        summary="Outcome reward only, normalised in its group (ToolRL)",
        estimator="grpo",
        sources=(DEEPSEEKMATH, TOOLRL),
    ),
    Method(
        name="sft_grpo",
        summary="The pair of stages sft, then grpo",
        stages=("sft", "policy"),
        estimator="grpo",
        sources=(DEEPSEEKMATH, TOOLRL),
    ),
    Method(
        name="dr_grpo",
        summary="Outcome reward centred but not divided by its std; loss over the maximum length",
        estimator="dr_grpo",
        loss="dr_grpo",
        sources=("Dr. GRPO: Liu et al. 2025, arXiv 2503.20783",),
    ),
    Method(
        name="dapo",
        summary="GRPO with a higher upper clip, dynamic sampling, token-mean loss and an overlong penalty",
        estimator="grpo",
        epsilon_high=0.28,
        loss="dapo",
        dynamic_sampling_rounds=3,
        overlong_share=0.2,
        sources=("DAPO: Yu et al. 2025, arXiv 2503.14476",),
    ),
    Method(
        name="grpo_mixed",
        summary="Outcome plus reasoning reward, normalised together: the naive mixture",
        estimator="grpo_mixed",
        sources=(DEEPSEEKMATH, AWPO_PAPER),
        **_MIXED,
    ),
    Method(
        name="gdpo",
        summary="Each reward normalised in its group, summed, then normalised over the batch",
        estimator="gdpo",
        sources=("GDPO: Liu et al. 2026, arXiv 2601.05242",),
        **_DECOUPLED,
    ),
    Method(
        name="dara",
        summary="GDPO with the positive advantages of rarely informative rewards weighted up",
        estimator="dara",
        sources=("Density-Aware Reward Aggregation: 2026, arXiv 2610.00574",),
        **_DECOUPLED,
    ),
    Method(
        name="gated_accumulation",
        summary="Reasoning reward added only to rollouts whose outcome reaches the middle of its range",
        estimator="gated_accumulation",
        sources=("Gated Reward Accumulation: Sun et al. 2025, arXiv 2508.10548; the middle as threshold is ours",),
        **_MIXED,
    ),
    _awpo("awpo", "Reasoning reward let in by a variance ratio, difficulty weight, shrinking clip radius"),
    _awpo("awpo_no_difficulty", "AWPO without the difficulty weight", difficulty="none"),
    _awpo("awpo_no_gating", "AWPO with the gate always open", gate="always"),
    _awpo("awpo_fixed_clip", "AWPO with a fixed clip radius", clip="fixed"),
    _awpo("awpo_soft", "AWPO with the variance ratio itself as the gate's weight", gate="soft"),
    _awpo(
        "awpo_low_variance",
        "AWPO with the gate open where the outcome hardly varies (the introduction's words)",
        gate="low_outcome_variance",
    ),
    _awpo(
        "awpo_correlation",
        "AWPO with the gate open where outcome and mixed advantages agree (ours)",
        gate="correlation",
    ),
)

METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _ENTRIES})


def get_method(name: str) -> Method:
    """The method of that name. Raises UserError naming the nearest one where there is none."""
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(METHODS)}"
    raise UserError(f"no method {name!r}; {hint}")
