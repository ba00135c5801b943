"""What the machine decides: precision, gradient checkpointing, how a step is cut into micro-batches of processes."""

from __future__ import annotations

from typing import Any

import torch

from awpo.config_training import TrainingConfig, divisors
from awpo.errors import UserError
from awpo.training.sharding import device_choice


def uses_bfloat16(config: TrainingConfig) -> bool:
    """Whether forward and backward passes run in bfloat16; UserError where that is asked for and there is none."""
    there = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    if config.precision == "bfloat16" and not there:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
        raise UserError(f"precision: bfloat16 needs a GPU that has it, and this is {device}; set auto or float32")
    return there and config.precision != "float32"


def dtype_of_weights(config: TrainingConfig) -> torch.dtype | str:
    """In which a model is loaded: trained weights are float32, else small updates would be rounded away (half a
    step of bfloat16 at 0.02 is 6e-5, and AdamW moves a weight by about the learning rate). Below adapters, which are
    float32 themselves, weights stay as they come where the passes run in bfloat16.
    """
    return "auto" if config.lora and uses_bfloat16(config) else torch.float32


def recomputes_activations(config: TrainingConfig) -> bool:
    """Whether gradient checkpointing is on."""
    return (
        torch.cuda.is_available() if config.gradient_checkpointing == "auto" else config.gradient_checkpointing == "on"
    )


def device_arguments(config: TrainingConfig) -> dict[str, Any]:
    """The arguments of TRL's trainers that depend on the machine."""
    gpu = torch.cuda.is_available()
    return {
        "bf16": uses_bfloat16(config),
        "gradient_checkpointing": recomputes_activations(config),
        "dataloader_pin_memory": gpu,
        **device_choice(),
    }


def accumulation_steps(rows: int, micro_batch: int, processes: int, key: str) -> int:
    """Forward passes of each process for an optimiser step of `rows` rows; UserError where they are no whole number.

    `key` is the setting that is named in the message.
    """
    if rows % processes:
        raise UserError(
            f"the {rows} rows of an optimiser step can't be shared out evenly among {processes} processes; make them a "
            f"multiple of {processes}, or start another number of processes"
        )
    if (rows // processes) % micro_batch:
        raise UserError(
            f"the {rows} rows of an optimiser step can't be split into micro-batches of {micro_batch} on {processes} "
            f"processes; {key} = {micro_batch} must divide {rows} / {processes} = {rows // processes}: choose one of "
            f"{divisors(rows // processes)}"
        )
    return rows // processes // micro_batch
