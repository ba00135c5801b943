"""Weights in shards (ZeRO-3, FSDP2): how processes meet, and how weights become whole for rollouts and for saving.

How the processes share the model is said by accelerate's launcher in the environment (`LaunchSettings`). The same
presets work on CPUs, where processes speak through gloo: accelerate, told to use a CPU, would ignore DeepSpeed and FSDP
without a word, so it is told nothing and finds its state prepared (`process_state`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl.models.utils import add_hooks, remove_hooks

DEEPSPEED, FSDP = "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"
"""Set to "true" by accelerate's launcher."""


def launched_with(flag: str) -> bool:
    """Whether accelerate's launcher started this process with `DEEPSPEED` or `FSDP`."""
    return os.environ.get(flag, "").lower() == "true"


def shared_on_cpus() -> bool:
    """Whether DeepSpeed or FSDP share the model among processes that have no GPU."""
    return (launched_with(DEEPSPEED) or launched_with(FSDP)) and not torch.cuda.is_available()


def process_state() -> PartialState:
    """The processes of this run, one or those that a launcher started; on CPUs they speak through gloo."""
    if not shared_on_cpus():
        return PartialState(cpu=not torch.cuda.is_available())
    first = not PartialState._shared_state
    state = PartialState(backend="gloo")
    if first and launched_with(FSDP):
        # accelerate looks at its FSDP settings where it finds several GPUs alone.
        state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return state


def device_choice() -> dict[str, Any]:
    """The arguments of transformers' trainers by which they find GPUs, a CPU, or what `process_state` prepared."""
    if shared_on_cpus():
        return {"use_cpu": False, "accelerator_config": {"use_configured_state": True}}
    return {"use_cpu": not torch.cuda.is_available()}


def with_own_optimizer(arguments: Any) -> Any:
    """The arguments of a trainer, by which DeepSpeed keeps the trainer's optimiser.

    Where states are in the memory of CPUs, accelerate would put another AdamW in its place, of which it sets learning
    rate and weight decay alone: the betas would be lost without a word.
    """
    if plugin := getattr(arguments, "deepspeed_plugin", None):
        plugin.hf_ds_config.config["zero_force_ds_cpu_optimizer"] = False
    return arguments


def in_shards(accelerator: Accelerator) -> bool:
    """Whether each process holds a part of the weights alone; every process must then make the same forward passes."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return int(accelerator.deepspeed_config["zero_optimization"]["stage"]) == 3
    return bool(accelerator.distributed_type == DistributedType.FSDP)


@contextmanager
def whole_weights(accelerator: Accelerator, wrapped: Any) -> Iterator[Any]:
    """The model without its wrapper and with all weights in every process, for as many forward passes as each likes.

    `wrapped` is the model as accelerate prepared it. All processes must enter and leave together.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        parts = [module for module in wrapped.modules() if isinstance(module, FSDPModule)]
        # Else the first forward pass would put the weights back into shards, and the next one gather them anew.
        again = accelerator.state.fsdp_plugin.reshard_after_forward
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield accelerator.unwrap_model(wrapped)
        finally:
            for part in parts:
                part.reshard()
                part.set_reshard_after_forward(bool(again), recurse=False)
    elif in_shards(accelerator):
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(list(wrapped.parameters())):
            remove_hooks(wrapped)  # they would gather the weights of each layer, in all processes
            try:
                yield accelerator.unwrap_model(wrapped)
            finally:
                add_hooks(wrapped)
    else:
        yield accelerator.unwrap_model(wrapped)


def gathered_state(accelerator: Accelerator, wrapped: nn.Module) -> dict[str, Tensor]:
    """All weights of a model in shards, on the CPU, by name; empty but in the main process.

    All processes must ask. Of ZeRO-3 they are of the type in which the passes run.
    """
    state = accelerator.get_state_dict(wrapped)
    return dict(state) if accelerator.is_main_process and state else {}


@contextmanager
def apart_from_shards() -> Iterator[None]:
    """Models that are loaded here are whole and this process's own; the others need take no part.

    transformers would put them into shards as well. Nothing is trained in shards afterwards.
    """
    unset_hf_deepspeed_config()
    flag = os.environ.pop(FSDP, None)
    try:
        yield
    finally:
        if flag is not None:
            os.environ[FSDP] = flag
