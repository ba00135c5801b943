"""The settings of who samples the rollouts of policy training (docs/training.md, "Rollouts by vLLM")."""

from __future__ import annotations

from typing import ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from awpo.settings import Settings


class RolloutSettings(Settings):
    """What samples rollouts. A result depends on it: no two engines round alike, so none is chosen by the machine."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {"url", "largest_difference", "gpu_memory_utilization", "tensor_parallel", "sleep"}
    )
    OF_COLOCATION: ClassVar[tuple[str, ...]] = ("gpu_memory_utilization", "tensor_parallel", "sleep")
    OF_VLLM: ClassVar[tuple[str, ...]] = ("correction", "correction_limit", "largest_difference")

    engine: Literal["trainer", "vllm_server", "vllm_colocate"] = Field(
        "trainer",
        description="trainer: the training processes; vllm_server: a vLLM server, which on a CPU is started for the "
        "run; vllm_colocate: vLLM in the training processes, on their GPUs",
    )
    url: str | None = Field(
        None, description="Base URL of a vLLM server that runs already; none: one is started, on a CPU"
    )
    correction: Literal["sequence_mask", "sequence_truncate", "token_mask", "token_truncate"] = Field(
        "sequence_mask",
        description="Weights of rollouts by trained / sampling probability: of whole rollouts or of tokens; what "
        "passes the limit is masked, or cut to it",
    )
    correction_limit: float = Field(3.0, ge=1, description="Largest such weight")
    largest_difference: float | None = Field(
        None,
        gt=0,
        description="Mean difference of log-probabilities past which vLLM has stale weights and the run ends; none: "
        "0.001 where both compute in float32, else 0.1",
    )
    gpu_memory_utilization: float = Field(
        0.3, gt=0, le=1, description="Share of each GPU's memory for vLLM, where it is colocated"
    )
    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs that share a vLLM, where it is colocated")
    sleep: bool = Field(True, description="Free vLLM's GPU memory during optimiser steps, where it is colocated")

    @field_validator("url")
    @classmethod
    def _base(cls, url: str | None) -> str | None:
        """Without the /v1 that clients of OpenAI's format want: vLLM's other addresses stand beside it."""
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server; give one such as http://127.0.0.1:8000")
        return url.rstrip("/").removesuffix("/v1")

    @model_validator(mode="after")
    def _asked_for(self) -> Self:
        if self.url is not None and self.engine != "vllm_server":
            raise ValueError(f"engine {self.engine!r} would never ask {self.url}; set engine: vllm_server")
        fields = type(self).model_fields
        changed = [name for name in fields if getattr(self, name) != fields[name].default]
        for names, engines in (
            (self.OF_COLOCATION, ("vllm_colocate",)),
            (self.OF_VLLM, ("vllm_server", "vllm_colocate")),
        ):
            idle = [name for name in names if name in changed]
            if idle and self.engine not in engines:
                raise ValueError(
                    f"{idle[0]} is read by engine {' and '.join(engines)} alone, and this is {self.engine!r}; leave it "
                    "out, or set engine"
                )
        return self
