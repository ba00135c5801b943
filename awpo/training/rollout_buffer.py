"""What a checkpoint must hold beside weights, optimiser and random numbers, so that a run resumes at any step.

TRL samples a rollout batch once and uses it for several optimiser steps; its checkpoints leave out the batch and the
position in it, and its sampler begins every resumed run with the order of the first epoch (a difference of 5e-3 in the
weights was seen). Each process writes a file of its own into the checkpoint, before that is marked as whole; nothing
but tensors and plain values is in it, so that it is read without unpickling objects.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from trl.trainer.utils import RepeatSampler

from awpo.errors import UserError
from awpo.training.dynamic_sampling import RolloutBatch


@dataclass
class RolloutState:
    """Where one process stands in its rollouts.

    `micro_batches` were trained on since the run's start; `buffer` holds the rollout batch cut into micro-batches,
    used ones included, and is empty where the next step samples a new one; `metrics` are the numbers not yet logged;
    `memory` is what warnings remember of earlier batches. `processes` is how many there were.
    """

    micro_batches: int
    buffer: list[RolloutBatch]
    metrics: dict[str, list[float]]
    memory: dict[str, Any]
    processes: int

    def write(self, checkpoint: Path, process: int) -> None:
        """Writes the file of process number `process`; a checkpoint's folder may not be there yet."""
        checkpoint.mkdir(parents=True, exist_ok=True)
        torch.save(asdict(self), checkpoint / file_name(process))

    @classmethod
    def read(cls, checkpoint: Path, process: int, processes: int) -> RolloutState:
        """What this process wrote. Raises UserError where it cannot be gone on from."""
        file = checkpoint / file_name(process)
        try:
            state = cls(**torch.load(file, map_location="cpu", weights_only=True))
        except (OSError, RuntimeError, TypeError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(
                f"cannot resume from {checkpoint}: {file.name} is missing or damaged ({type(error).__name__}); delete "
                f"that checkpoint to resume from the one before"
            ) from None
        if state.processes != processes:
            raise UserError(
                f"cannot resume from {checkpoint}: it was written by {state.processes} processes and there are "
                f"{processes} now; start as many, or train into another folder"
            )
        return state


def file_name(process: int) -> str:
    return f"rollouts_{process}.pt"


class EpochOrder(RepeatSampler):  # type: ignore[misc]  # trl has no types
    """TRL's sampler, whose order depends on seed and epoch alone: a resumed run finds the order that it left.

    TRL's own draws each epoch's order from a generator that lives as long as the process. `epoch` is asked whenever
    an iteration begins; without an interruption the order is the same as TRL's.
    """

    def __init__(self, *arguments: Any, epoch: Callable[[], int], seed: int, **named: Any) -> None:
        super().__init__(*arguments, seed=seed, shuffle=True, **named)
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed)
        for _ in range(self.epoch()):
            torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()
