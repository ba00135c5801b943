"""The settings of every stage, and the only schema of them.

The same models check YAML presets, build the forms of the Prefect UI and are logged to MLflow. An unknown key is
an error that names the nearest known one. Secrets are never fields: endpoints read their key from the environment
variable that `api_key_variable` names.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, PositiveInt, field_validator, model_validator

from awpo.config_rollouts import RolloutSettings
from awpo.errors import UserError
from awpo.methods import get_method
from awpo.settings import Settings
from awpo.types import Split

MOST_THREADS = 1024
SEEDS = 2**32  # numpy takes none beyond


class EndpointConfig(Settings):
    """An OpenAI-compatible chat endpoint."""

    # Where and how patiently a model is asked, and for how much: a run that a limit ended goes on under a higher one.
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {"base_url", "api_key_variable", "concurrency", "timeout_seconds", "attempts", "requests_per_minute"}
        | {"tokens_per_minute", "input_price", "output_price", "spending_limit", "token_limit", "cache"}
    )

    base_url: str = Field(description="Base URL, ending in /v1")
    model: str = Field(description="Model name to ask for")
    api_key_variable: str = Field("OPENAI_API_KEY", description="Environment variable that holds the key")
    concurrency: int = Field(8, ge=1, le=512, description="Requests in flight at once")
    timeout_seconds: float = Field(120.0, gt=0, description="Time limit of one request, in seconds")
    attempts: int = Field(5, ge=1, le=20, description="Tries per request, with growing pauses")
    temperature: float = Field(0.0, ge=0, le=2, description="Sampling temperature")
    max_tokens: int = Field(1024, ge=1, description="Longest answer, in tokens")
    options: dict[str, Any] = Field(default_factory=dict, description="Further fields of every request")
    requests_per_minute: PositiveInt | None = Field(None, description="Requests in any minute, all processes together")
    tokens_per_minute: PositiveInt | None = Field(None, description="Tokens in any minute, all processes together")
    input_price: float | None = Field(None, ge=0, description="Price of a million prompt tokens, in your currency")
    output_price: float | None = Field(None, ge=0, description="Price of a million answered tokens")
    spending_limit: float | None = Field(None, gt=0, description="Most that a run spends, all processes and attempts")
    token_limit: PositiveInt | None = Field(
        None, description="Most tokens that a run spends, all processes and attempts"
    )
    cache: str = Field(
        "auto",
        description="SQLite file of answers, so that none is paid for twice; auto: one for all runs, under AWPO_RUNS, "
        "where the endpoint is on another machine; off: none",
    )

    @model_validator(mode="after")
    def _prices_for_a_limit(self) -> Self:
        if (self.input_price is None) != (self.output_price is None):
            raise ValueError("input_price and output_price go together: give both or neither")
        if self.spending_limit is not None and self.input_price is None:
            raise ValueError("spending_limit needs input_price and output_price; or give a token_limit")
        return self


class CorpusConfig(Settings):
    """The embedded corpus of multi-step tool-use dialogues."""

    seed: int = Field(0, ge=0, lt=SEEDS, description="Seed; the same seed gives the same bytes")
    train_dialogues: int = Field(4000, ge=1, description="Dialogues of the training split")
    validation_dialogues: int = Field(120, ge=1, description="Dialogues of the validation split")
    test_dialogues: int = Field(120, ge=1, description="Dialogues of each test split (phrasings, tools)")


class RationaleConfig(Settings):
    """Who writes the reference rationales."""

    writer: Literal["offline", "endpoint"] = Field(
        "offline", description="offline: templates; endpoint: a strong model"
    )
    endpoint: EndpointConfig | None = Field(None, description="The endpoint, where the writer is one")
    keep_existing: bool = Field(True, description="Keep a rationale that the source already has")
    rewrites: int = Field(2, ge=0, le=5, description="Further tries, with the reason, where an answer does not pass")
    language: Literal["english", "dialogue"] = Field(
        "english", description="Language of the rationales; dialogue: that of the user's last message"
    )
    deadline_seconds: float | None = Field(
        None, gt=0, description="Time limit of all requests together; none: no limit"
    )

    @model_validator(mode="after")
    def _endpoint_given(self) -> Self:
        if self.writer == "endpoint" and self.endpoint is None:
            raise ValueError("writer 'endpoint' needs 'endpoint' with base_url and model")
        if self.writer != "endpoint" and self.endpoint is not None:
            raise ValueError(f"writer {self.writer!r} would never ask {self.endpoint.model!r}; set writer: endpoint")
        return self


class JudgeConfig(Settings):
    """Who scores the thoughts of rollouts."""

    kind: Literal["rubric", "endpoint", "correlated"] = Field(
        "rubric",
        description="rubric: offline rules; endpoint: a strong model; correlated: drawn with a set correlation to the "
        "outcome, for studies of judges",
    )
    correlation: float | None = Field(
        None, ge=-1, le=1, description="Correlation of the scores with the outcome reward, where kind is correlated"
    )
    endpoint: EndpointConfig | None = Field(None, description="The endpoint, where the judge is one")
    scale: float = Field(3.0, gt=0, description="Reasoning reward of a perfect thought; docs/method.md")
    two_pass: bool = Field(False, description="Show the reference rationale only after a low first score")
    samples: int = Field(1, ge=1, le=16, description="Answers of the model per thought, averaged")
    failure_limit: float = Field(0.5, gt=0, le=1, description="Share of failed judgements past which the run stops")
    deadline_seconds: float = Field(300.0, gt=0, description="Time limit of all judgements of one batch, in seconds")

    @model_validator(mode="after")
    def _endpoint_given(self) -> Self:
        if self.kind == "endpoint" and self.endpoint is None:
            raise ValueError("kind 'endpoint' needs 'endpoint' with base_url and model")
        if (self.kind == "correlated") != (self.correlation is not None):
            raise ValueError("'correlation' and kind 'correlated' go together: give both or neither")
        if self.kind != "endpoint" and self.endpoint is not None:
            raise ValueError(f"kind {self.kind!r} would never ask {self.endpoint.model!r}; set kind: endpoint")
        if self.samples > 1 and self.endpoint is None:
            raise ValueError(f"samples = {self.samples} asks a model several times, and kind {self.kind!r} asks none")
        if self.samples > 1 and self.endpoint is not None and self.endpoint.temperature == 0:
            raise ValueError(
                f"samples = {self.samples} at temperature 0 are the same answer {self.samples} times; set "
                "endpoint.temperature, or samples: 1"
            )
        if self.kind != "endpoint" and self.two_pass:
            raise ValueError(f"two_pass asks a model twice, and kind {self.kind!r} asks none; set kind: endpoint")
        return self

    @property
    def label(self) -> str:
        """A short name that tells judges apart: who scores, and the scale."""
        names = {"rubric": "rubric", "endpoint": self.endpoint.model if self.endpoint else "endpoint"}
        return f"{names.get(self.kind) or f'correlated {self.correlation or 0:+g}'} x{self.scale:g}"


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


def _switch(value: Any) -> Any:
    """YAML reads a bare `on` as true and `off` as false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]


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


class EvaluationConfig(Settings):
    """What a checkpoint is evaluated on."""

    # Where the data lie: what they are is a result's input.
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"threads", "benchmark_data"})

    benchmarks: tuple[Literal["held_out", "bfcl_v3", "bfcl_v4", "api_bank", "mmlu_pro"], ...] = Field(
        ("held_out", "bfcl_v3"), description="Benchmarks to run"
    )
    splits: tuple[Split, ...] = Field(("test_phrasings", "test_tools"), description="Splits of the instances to run")
    instances_per_split: int = Field(200, ge=1, description="At most this many instances per split, chosen by seed")
    samples: int = Field(8, ge=1, description="Samples per instance at `temperature`, beside the greedy answer")
    temperature: float = Field(1.0, gt=0, le=2, description="Sampling temperature; that of training")
    max_completion_length: int = Field(160, ge=8, description="Longest completion, in tokens")
    prompt_format: Literal["native", "rlla"] = Field(
        "native",
        description="native: tools as the model's template or the server takes them; rlla: ToolRL's text prompt",
    )
    thinking: Switch = Field("auto", description="Thinking before the answer; auto: as the model's template has it")
    engine: Literal["in_process", "transformers", "vllm", "auto"] = Field(
        "in_process",
        description="What computes a checkpoint's answers: this process, or a server started for it; auto: vllm where "
        "it is installed, else this process",
    )
    bfcl_items_per_category: PositiveInt | None = Field(
        30, description="At most this many items per BFCL category, chosen by seed; none: all"
    )
    bfcl_turns: Literal["all", "one", "several"] = Field(
        "all",
        description="BFCL's categories of one turn, of several (slow on a CPU), or all; totals say what they lack",
    )
    api_bank_items_per_level: PositiveInt | None = Field(
        30, description="At most this many items per API-Bank level, chosen by seed; none: all"
    )
    mmlu_pro_items_per_category: PositiveInt | None = Field(
        30, description="At most this many questions per MMLU-Pro category, chosen by seed; none: all"
    )
    mmlu_pro_completion_length: int = Field(
        2048, ge=8, description="Longest answer to a question of MMLU-Pro, in tokens; the official script's"
    )
    benchmark_data: Path | None = Field(
        None, description="Folder of benchmark files, where they are not in the usual places; docs/benchmarks.md"
    )
    batch_size: int = Field(64, ge=1, description="Completions generated at once")
    threads: int = Field(0, ge=0, le=MOST_THREADS, description="Torch threads; 0 leaves it to the launcher")
    seed: int = Field(0, ge=0, lt=SEEDS, description="Seed of the slices and of sampling")

    @model_validator(mode="after")
    def _something_to_run(self) -> Self:
        if not self.benchmarks:
            raise ValueError("benchmarks is empty, so nothing would be evaluated; give held_out or another one")
        if "held_out" in self.benchmarks and not self.splits:
            raise ValueError("benchmark 'held_out' needs at least one of splits")
        for name, values in (("benchmarks", self.benchmarks), ("splits", self.splits)):
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise ValueError(f"{name} has {', '.join(twice)} more than once")
        return self


def divisors(number: int) -> str:
    """The numbers that divide `number`, as text for a message; of many, the largest."""
    found = [str(value) for value in range(1, number + 1) if number % value == 0]
    return ", ".join(found) if len(found) <= 8 else f"..., {', '.join(found[-8:])}"
