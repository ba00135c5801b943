"""The weights that are trained, written for who samples with them: whole, adapters added, the head with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor


def write_weights(model: Any, folder: Path) -> None:
    """Writes a whole model as a checkpoint, adapters added to the weights that they stand at; `model` stays as it is.

    A head that is the embedding is written as well: vLLM on a CPU keeps a copy of it in another layout, which a reload
    without it leaves as it was (seen with 0.31 and 0.32: its log says "ParallelLMHead: Failed to load weights").
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    weights = merged_weights(model)
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if head is not None and head.weight is embedding.weight:
        [name] = [name for name, module in base.named_modules() if module is head]
        weights[f"{name}.weight"] = embedding.weight.detach().clone()
    base.save_pretrained(folder, state_dict=weights)


def merged_weights(model: Any) -> dict[str, Tensor]:
    """The weights of a model by its own names, with the products of its adapters, if any, added to copies of them.

    peft's own merge changes them in place, and undoing it leaves other roundings: a resumed run would differ. Not by
    `state_dict`, which of a model that FSDP2 has gathered gives the parts again.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    found: dict[str, Tensor] = {}
    for path, module in base.named_modules():
        start = f"{path}." if path else ""
        if isinstance(module, BaseTunerLayer):
            layer: Any = module
            products = [layer.get_delta_weight(adapter) for adapter in layer.active_adapters]
            weight = layer.base_layer.weight.detach()
            found[f"{start}weight"] = weight + sum(products, torch.zeros_like(weight)).detach()
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[start + name] = buffer
    adapters = f".{model.prefix}" if isinstance(model, PeftModel) else None
    for name, weight in base.named_parameters():
        if adapters is None or adapters not in f".{name}":
            found.setdefault(name.replace(".base_layer.", "."), weight.detach())
    return found
