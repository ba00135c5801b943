"""The settings of every stage, and the only schema of them; those of training are in `awpo.config_training`.

The same models check YAML presets, build the forms of the Prefect UI and are logged to MLflow. An unknown key is
an error that names the nearest known one. Secrets are never fields: endpoints read their key from the environment
variable that `api_key_variable` names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from awpo.settings import MOST_THREADS, SEEDS, Settings, Switch
from awpo.types import Split


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
