"""What a policy training will take before it is launched: memory, whether it fits, tokens, hours.

Memory is `awpo.training.memory`'s. Hours follow from stated assumptions (`Throughput`) and are no measurement.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from awpo.config_training import PolicyConfig
from awpo.errors import UserError
from awpo.launch import LaunchSettings, launch_presets, read_launch
from awpo.methods import Method
from awpo.training.memory import GIB, Memory, Sharding, memory_of, passes_of, vllm_requests
from awpo.training.model_shapes import ModelShape

# Of each GPU stays free: PyTorch's allocator can't use what lies between its blocks.
RESERVE = 0.05
# GPUs of one machine, where more are asked for than that.
PER_MACHINE = 8
# The AWPO paper tells mean responses of about 400 tokens (arXiv 2512.19126, section 4.3).
EXPECTED_COMPLETION = 400


@dataclass(frozen=True)
class Throughput:
    """What a GPU does in a second, and which share of that a training gets: assumptions, every one."""

    tflops: float
    """Dense bfloat16 operations of one GPU, in 1e12 a second, by its maker."""
    bandwidth: float
    """Memory bandwidth of one GPU, in 1e12 bytes a second, by its maker."""
    mfu: float = 0.35
    """Share of `tflops` that forward and backward passes reach (model FLOPs utilisation)."""
    decoding: float | None = None
    """Share of `bandwidth` that decoding reaches; None: 0.4 by vLLM, 0.1 by transformers' generate."""

    def decoding_share(self, engine: str) -> float:
        return self.decoding if self.decoding is not None else 0.1 if engine == "trainer" else 0.4


GPUS: Mapping[str, Throughput] = MappingProxyType(
    {
        "a100": Throughput(tflops=312, bandwidth=2.0),
        "h100": Throughput(tflops=989, bandwidth=3.35),
        "h200": Throughput(tflops=989, bandwidth=4.8),
    }
)
"""GPUs by name, with the numbers of their makers' data sheets (SXM, dense)."""


@dataclass(frozen=True)
class Gpus:
    """`count` GPUs of `gib` GiB each."""

    count: int
    gib: float

    @classmethod
    def read(cls, text: str) -> Gpus:
        """GPUs as in 8x80; UserError for anything else."""
        found = re.fullmatch(r"\s*([1-9]\d{0,5})\s*[xX]\s*([1-9]\d*(?:\.\d+)?)\s*", text)
        if not found:
            raise UserError(f"GPUs are given as number x GiB of each, such as 8x80, not {text!r}")
        return cls(int(found[1]), float(found[2]))

    @property
    def bytes_of_each(self) -> int:
        return round(self.gib * GIB)

    def __str__(self) -> str:
        return f"{self.count}x{self.gib:g}"


@dataclass(frozen=True)
class Amount:
    """Of a whole training: tokens, with rollouts of a given length."""

    prompt: float
    completion: float
    generated: float
    trained: float


@dataclass(frozen=True)
class Plan:
    """One training on some GPUs. Every number is computed from these fields."""

    shape: ModelShape
    config: PolicyConfig
    method: Method
    launch: LaunchSettings
    sharding: Sharding
    """What `launch` says, read once (`sharding_of`)."""
    gpus: Gpus
    throughput: Throughput

    @cached_property
    def memory(self) -> Memory:
        config = self.config.model_copy(update={"micro_batch_size": self.micro_batch})
        return memory_of(self.shape, config, self.sharding, self.gpus.bytes_of_each, reference=self.method.kl > 0)

    @property
    def micro_batch(self) -> int:
        """Rollouts per pass of a process."""
        return self.config.micro_batch_on(self.processes)

    @property
    def processes(self) -> int:
        return self.sharding.processes

    @property
    def usable(self) -> int:
        """Bytes of each GPU that may be planned with."""
        return round(self.gpus.bytes_of_each * (1 - RESERVE))

    @cached_property
    def obstacles(self) -> list[str]:
        """Why it can't be, a sentence each; empty where it can."""
        config, found = self.config, []
        if self.launch.device == "cpu":
            found.append("the launch is of CPUs (device: cpu) and uses no GPU")
        if self.processes > self.gpus.count:
            found.append(f"the launch starts {self.processes} processes, a GPU each, and there are {self.gpus.count}")
        per_step = config.rollouts_per_step
        if per_step % self.processes or (per_step // self.processes) % self.micro_batch:
            found.append(
                f"the {per_step} rollouts of an optimiser step can't be split into micro-batches of "
                f"{self.micro_batch} on {self.processes} processes"
            )
        if self.method.dynamic_sampling_rounds and config.prompts_per_rollout % self.processes:
            found.append(f"{config.prompts_per_rollout} prompts can't be shared out among {self.processes} processes")
        if config.rollouts.engine == "vllm_colocate":
            found += self._of_vllm()
        for moment, parts in self.memory.moments.items():
            if parts.total > self.usable:
                found.append(
                    f"{moment}: {parts.total / GIB:.1f} GiB of each GPU's {self.gpus.gib:g} GiB, of which "
                    f"{self.usable / GIB:.1f} can be planned with"
                )
        return found

    def _of_vllm(self) -> list[str]:
        settings, found = self.config.rollouts, []
        if self.processes % settings.tensor_parallel:
            found.append(
                f"rollouts.tensor_parallel = {settings.tensor_parallel} doesn't divide {self.processes} processes"
            )
        if self.shape.heads % settings.tensor_parallel:
            found.append(
                f"rollouts.tensor_parallel = {settings.tensor_parallel} doesn't divide {self.shape.heads} heads"
            )
        if self.requests < 1:
            found.append(
                f"vLLM's share of {settings.gpu_memory_utilization:g} has no room for the weights and one rollout's cache"
            )
        return found

    @property
    def fits(self) -> bool:
        return not self.obstacles

    @property
    def requests(self) -> float:
        """Whole rollouts that a colocated vLLM holds at once, on the GPUs that share it."""
        return vllm_requests(self.shape, self.config, self.gpus.bytes_of_each)

    @property
    def rollout_batches(self) -> float:
        return self.config.steps / self.config.steps_per_rollout

    @property
    def rollouts(self) -> float:
        """Rollouts of the training, without those that dynamic sampling draws anew."""
        return self.rollout_batches * self.config.prompts_per_rollout * self.config.group_size

    def amount(self, prompt: float, completion: float, drawn: float = 1) -> Amount:
        """Tokens where each rollout has so many; `drawn` is how often a group is drawn."""
        return Amount(prompt, completion, self.rollouts * completion * drawn, self.rollouts * (prompt + completion))

    @property
    def most(self) -> Amount:
        """As long as prompts and completions may be, with every round of dynamic sampling."""
        config = self.config
        rounds = 1 + self.method.dynamic_sampling_rounds
        return self.amount(config.max_prompt_length, config.max_completion_length, rounds)

    @property
    def expected(self) -> Amount:
        """Prompts of half their limit, completions of 400 tokens or half their limit, nothing drawn again."""
        config = self.config
        return self.amount(config.max_prompt_length / 2, min(EXPECTED_COMPLETION, config.max_completion_length / 2))

    def hours(self, amount: Amount) -> dict[str, float]:
        """Hours of sampling and of updates; without the judge, loading, saving and evaluation."""
        seconds = self._seconds_of_sampling(amount), self._seconds_of_updates(amount)
        return dict(zip(("rollouts", "updates"), (each / 3600 for each in seconds), strict=True))

    def _seconds_of_updates(self, amount: Amount) -> float:
        """Forward 1, backward 2, recomputing 1, and a forward pass each for old and reference log-probabilities.

        The head works on completions alone; its backward pass computes the logits anew.
        """
        config, shape = self.config, self.shape
        again = config.gradient_checkpointing != "off"
        forward_only = (config.steps_per_rollout > 1) + (self.method.kl > 0)
        # Of a frozen matrix the backward pass has its input's gradient alone.
        backward = 1 if config.lora else 2
        layers = shape.forward_operations((amount.prompt + amount.completion) / 2, head=False)
        operations = amount.trained * layers * (1 + again + backward + forward_only)
        operations += self.rollouts * amount.completion * 2 * shape.head_parameters * (2 + backward + forward_only)
        return operations / (self.processes * self.throughput.tflops * 1e12 * self.throughput.mfu)

    def _seconds_of_sampling(self, amount: Amount) -> float:
        """Each decoded token reads all weights and its row's cache; rows that run at once share the weights.

        vLLM refills its places and computes a group's prompt once; transformers' generate goes on until the longest
        row ends, here at the limit. A server's GPUs are taken to be as many as the training's.
        """
        config, shape, engine = self.config, self.shape, self.config.rollouts.engine
        passes = passes_of(config, self.sharding)
        tensor_parallel = config.rollouts.tensor_parallel
        engines = self.processes / tensor_parallel
        rows = config.prompts_per_rollout * config.group_size / engines
        at_once = min(rows, max(1.0, self.requests)) if engine == "vllm_colocate" else rows
        own = engine == "trainer"
        weights = shape.parameters * (8 if own and passes == "autocast" else 2)
        cache = shape.cache_bytes(*((4, 2) if own and passes == "autocast" else (2, 2)))
        read = weights + at_once * (amount.prompt + amount.completion / 2) * cache
        speed = tensor_parallel * self.throughput.bandwidth * 1e12 * self.throughput.decoding_share(engine)
        drawn = amount.generated / self.rollouts / amount.completion
        tokens = config.max_completion_length if own else amount.completion * rows / at_once
        decoding = self.rollout_batches * drawn * tokens * read / speed
        prompts = self.rollouts * drawn * amount.prompt / (1 if own else config.group_size)
        prefill = prompts * shape.forward_operations(amount.prompt / 2, head=False)
        return decoding + prefill / (self.processes * self.throughput.tflops * 1e12 * self.throughput.mfu)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; sizes in bytes."""
        config = self.config
        moments = {name: {**asdict(parts), "total": parts.total} for name, parts in self.memory.moments.items()}
        found: dict[str, Any] = {
            "fits": self.fits,
            "obstacles": self.obstacles,
            "parameters": self.shape.parameters,
            "gpus": {"count": self.gpus.count, "bytes": self.gpus.bytes_of_each, "usable": self.usable},
            "launch": self.launch.model_dump(include={"processes", "machines", "accelerate"}),
            "micro_batch_size": self.micro_batch,
            "rollout_engine": config.rollouts.engine,
            "memory": {"moments": moments, "peak": self.memory.peak, "host": self.memory.host},
            "optimiser_steps": config.steps,
            "rollout_batches": self.rollout_batches,
            "rollouts": self.rollouts,
            "tokens": {"most": asdict(self.most), "expected": asdict(self.expected)},
            "hours": {"most": self.hours(self.most), "expected": self.hours(self.expected)},
            "assumptions": {
                **asdict(self.throughput),
                "decoding": self.throughput.decoding_share(config.rollouts.engine),
                "reserve": RESERVE,
            },
        }
        if config.rollouts.engine == "vllm_colocate":
            found["vllm"] = {
                **config.rollouts.model_dump(include={"gpu_memory_utilization", "tensor_parallel", "sleep"}),
                "rollouts_at_once": self.requests,
            }
        return found

    def changes(self, asked: Plan) -> list[str]:
        """What differs from `asked`, as settings that a person can set."""
        found = []
        if self.gpus.count != asked.gpus.count:
            found.append(f"--gpus {self.gpus}")
        if self.launch != asked.launch:
            found.append(f"launch: {launch_name(self.launch)}")
        if self.config.micro_batch_size != asked.config.micro_batch_size:
            found.append(f"policy.micro_batch_size: {self.config.micro_batch_size}")
        before = asked.config.rollouts
        for name in ("engine", "gpu_memory_utilization", "tensor_parallel"):
            value = getattr(self.config.rollouts, name)
            if value != getattr(before, name):
                found.append(f"policy.rollouts.{name}: {value}")
        return found


def launch_name(launch: LaunchSettings) -> str:
    """The preset of that launch, or what a file of it would hold."""
    for name in launch_presets():
        if read_launch(name) == launch:
            return name
    values = launch.model_dump(include={"processes", "machines", "accelerate"}, exclude_defaults=True)
    return f"a file with processes: {launch.processes}" + "".join(
        f", {key}: {value}" for key, value in values.items() if key != "processes"
    )


def spread(launch: LaunchSettings, count: int) -> LaunchSettings:
    """That launch on `count` GPUs, of machines with as many each, eight at most."""
    each = next(size for size in range(min(count, PER_MACHINE), 0, -1) if count % size == 0)
    return launch.model_copy(update={"processes": each, "machines": count // each})
