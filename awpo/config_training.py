"""The settings of SFT and of policy training (`awpo.config` has those of the other stages)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, PositiveInt, field_validator, model_validator

from awpo.config import JudgeConfig
from awpo.config_rollouts import RolloutSettings
from awpo.errors import UserError
from awpo.methods import get_method
from awpo.settings import MOST_THREADS, SEEDS, Settings, Switch


class AdapterConfig(Settings):
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): they are trained, the model's weights are not.

    The finished checkpoint is the whole model with its adapters merged; they themselves are kept beside it.
    """

    rank: int = Field(16, ge=1, le=1024, description="Rank of each adapter")
    alpha: int = Field(32, ge=1, description="Scale: an adapter's product is multiplied by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before each adapter, in training")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear", description="Names of the layers that get adapters; all-linear: every linear one but the head"
    )

    @field_validator("target_modules")
    @classmethod
    def _no_head(cls, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not names:
            raise ValueError("no layer would get an adapter, so nothing would be trained; give names, or all-linear")
        if "lm_head" in names:
            raise ValueError("'lm_head' can have no adapter: TRL computes log-probabilities from its weight alone")
        return names


def _common_last(schema: dict[str, Any]) -> None:
    """Puts what SFT and policy training have in common behind what is their own, as a form shows it."""
    properties = schema["properties"]
    for name in TrainingConfig.model_fields:
        properties[name] = properties.pop(name)


class TrainingConfig(Settings):
    """What SFT and policy training have in common."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"threads", "save_every"})

    lora: AdapterConfig | None = Field(None, description="Train adapters of low rank; none: train all weights")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Of forward and backward passes; trained weights are float32. auto: bfloat16 where the GPU has it",
    )
    gradient_checkpointing: Switch = Field(
        "auto", description="Recompute activations in the backward pass, for less memory. auto: on with a GPU"
    )
    threads: int = Field(0, ge=0, le=MOST_THREADS, description="Torch threads; 0 leaves it to the launcher")


class SftSettings(TrainingConfig):
    """Supervised fine-tuning on rationale + reference action; only the target step's tokens carry loss."""

    model_config = ConfigDict(json_schema_extra=_common_last)

    steps: int = Field(600, ge=1, description="Optimiser steps")
    batch_size: int = Field(32, ge=1, description="Instances per optimiser step, on all devices together")
    micro_batch_size: PositiveInt | None = Field(
        None, description="Instances per forward pass and device; none: a step's at once"
    )
    learning_rate: float = Field(3e-3, gt=0, le=1, description="Peak learning rate")
    warmup_share: float = Field(0.05, ge=0, lt=1, description="Share of the steps with a rising learning rate")
    weight_decay: float = Field(0.01, ge=0, le=1, description="AdamW's weight decay")
    max_length: int = Field(
        1024, ge=16, description="Longest prompt + target in tokens; longer instances are counted and left out"
    )
    wrong_decision_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of demonstrations whose decision is replaced by a wrong one (weak annotators)",
    )
    rationales: bool = Field(True, description="Train on rationale and action; false: on the action alone")
    save_every: int = Field(200, ge=1, description="Steps between checkpoints from which an interrupted run resumes")

    @model_validator(mode="after")
    def _micro_batches(self) -> Self:
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"the batch_size = {self.batch_size} instances of an optimiser step are no whole number of micro-"
                f"batches of {self.micro_batch_size}; choose a micro_batch_size of {divisors(self.batch_size)}"
            )
        return self

    def micro_batch_on(self, processes: int) -> int:
        """Instances of a forward pass where so many processes share a step."""
        part = max(1, self.batch_size // processes)
        return min(self.micro_batch_size or part, part)

    def with_seed(self, seed: int) -> SftConfig:
        """These settings as those of one fine-tuning."""
        return SftConfig(**{name: getattr(self, name) for name in SftSettings.model_fields}, seed=seed)


class SftConfig(SftSettings):
    """All of one fine-tuning. A pipeline has one seed for all its stages; `with_seed` puts it in."""

    seed: int = Field(0, ge=0, lt=SEEDS, description="Seed")


class PolicySettings(TrainingConfig):
    """Policy training, whatever the method and the seed."""

    model_config = ConfigDict(json_schema_extra=_common_last)
    ADDED: ClassVar[frozenset[str]] = frozenset({"rollouts", "stop_on_collapse"})
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = TrainingConfig.WITHOUT_EFFECT | {"stop_on_collapse"}

    steps: int = Field(40, ge=1, description="Optimiser steps")
    prompts_per_rollout: int = Field(32, ge=1, description="Prompts (groups) per rollout batch")
    group_size: int = Field(8, ge=2, description="Rollouts per prompt")
    steps_per_rollout: int = Field(4, ge=1, description="Optimiser steps per rollout batch; clipping needs more than 1")
    micro_batch_size: int = Field(
        64, ge=1, description="Rollouts per forward pass and device, at most all that it has of a step"
    )
    learning_rate: float = Field(1e-4, gt=0, le=1, description="Peak learning rate")
    temperature: float = Field(1.0, gt=0, le=2, description="Sampling temperature of rollouts")
    max_prompt_length: int = Field(
        1024, ge=16, description="Longest prompt, in tokens; longer ones are counted and left out"
    )
    max_completion_length: int = Field(160, ge=8, description="Longest completion, in tokens")
    reward_mode: Literal["strict", "compat"] = Field(
        "strict", description="Outcome reward: ours, or ToolRL's exact form"
    )
    judge: JudgeConfig = Field(default_factory=JudgeConfig, description="Who scores thoughts")
    rollouts: RolloutSettings = Field(default_factory=RolloutSettings, description="What samples rollouts")
    save_every: int = Field(
        20, ge=1, description="Optimiser steps between checkpoints from which an interrupted run resumes"
    )
    stop_on_collapse: bool = Field(
        False, description="End the run at a sign of collapse (docs/metrics.md), and keep its last checkpoint"
    )

    @field_validator("group_size", mode="before")
    @classmethod
    def _groups_vary(cls, value: Any) -> Any:
        if isinstance(value, int) and value < 2:
            raise ValueError(f"must be at least 2, not {value}: a lone rollout has no group to be better than")
        return value

    @model_validator(mode="after")
    def _whole_batches(self) -> Self:
        """The arithmetic of a rollout batch: whole micro-batches in whole optimiser steps."""
        prompts, group, steps = self.prompts_per_rollout, self.group_size, self.steps_per_rollout
        rollouts, micro = prompts * group, self.micro_batch_size
        if rollouts % steps:
            raise ValueError(
                f"prompts_per_rollout x group_size = {prompts} x {group} = {rollouts} rollouts can't be split into "
                f"steps_per_rollout = {steps} equal optimiser steps; choose {divisors(rollouts)}"
            )
        per_step = rollouts // steps
        if per_step % micro:
            raise ValueError(
                f"the {prompts} x {group} / {steps} = {per_step} rollouts of an optimiser step (prompts_per_rollout x "
                f"group_size / steps_per_rollout) are no whole number of micro-batches of {micro}; choose a "
                f"micro_batch_size of {divisors(per_step)}"
            )
        if self.steps < steps:
            raise ValueError(
                f"steps = {self.steps} is fewer than steps_per_rollout = {steps}: part of the only rollout batch would "
                f"never be trained on; give more steps, or a steps_per_rollout of at most {self.steps}"
            )
        return self

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts of an optimiser step, of all processes."""
        return self.prompts_per_rollout * self.group_size // self.steps_per_rollout

    def micro_batch_on(self, processes: int) -> int:
        """Rollouts of a forward pass where so many processes share a step."""
        return max(1, min(self.micro_batch_size, self.rollouts_per_step // processes))

    def with_method(self, method: str, seed: int) -> PolicyConfig:
        """These settings as those of one training; pydantic's ValidationError where the method can't have them."""
        shared = {name: getattr(self, name) for name in PolicySettings.model_fields}
        return PolicyConfig(**shared, method=method, seed=seed)


class PolicyConfig(PolicySettings):
    """All of one training by one of the methods of `awpo.methods`; `with_method` puts a pipeline's choices in."""

    method: str = Field("awpo", description="Name in the registry of methods")
    seed: int = Field(0, ge=0, lt=SEEDS, description="Seed")

    @field_validator("method")
    @classmethod
    def _trains_a_policy(cls, name: str) -> str:
        try:
            method = get_method(name)
        except UserError as error:
            raise ValueError(str(error)) from None
        if not method.trains:
            raise ValueError(f"{name!r} trains no policy; choose a method that does (see `awpo methods`)")
        return name

    def remarks(self) -> list[str]:
        """What is allowed and does less than one may think, a sentence each."""
        found = []
        if self.steps_per_rollout == 1:
            shrinking = get_method(self.method).clip == "shrinking"
            found.append(
                "clipping is never alive: with steps_per_rollout = 1 each rollout is used once, by the policy that "
                "drew it, so its importance ratio is 1 and clipping does nothing"
                + (f"; nor does the shrinking clip radius of {self.method!r}" if shrinking else "")
            )
        if rest := self.steps % self.steps_per_rollout:
            found.append(
                f"steps = {self.steps} is no multiple of steps_per_rollout = {self.steps_per_rollout}: of the last "
                f"rollout batch {rest} of {self.steps_per_rollout} parts are used"
            )
        return found

    @model_validator(mode="after")
    def _penalty_of_whole_tokens(self) -> Self:
        share = get_method(self.method).overlong_share
        if 0 < share * self.max_completion_length < 1:
            raise ValueError(
                f"the overlong penalty of {self.method!r} grows over the last {share:g} x max_completion_length = "
                f"{share * self.max_completion_length:g} tokens, which is less than one; give a max_completion_length "
                f"of at least {math.ceil(1 / share)}"
            )
        return self


def divisors(number: int) -> str:
    """The numbers that divide `number`, as text for a message; of many, the largest."""
    found = [str(value) for value in range(1, number + 1) if number % value == 0]
    return ", ".join(found) if len(found) <= 8 else f"..., {', '.join(found[-8:])}"
