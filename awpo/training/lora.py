"""Adapters of low rank (LoRA) by peft: made from the settings, and merged into the model when training has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel
from torch.nn import Linear
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from awpo.config import AdapterConfig
from awpo.errors import UserError
from awpo.training.checkpoints import save_finished

ADAPTER = "adapter"


def peft_config(adapter: AdapterConfig | None) -> LoraConfig | None:
    """peft's settings, every default that matters set; None for full training."""
    if adapter is None:
        return None
    modules = adapter.target_modules
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        bias="none",
        use_rslora=False,
        init_lora_weights=True,
    )


def check_layers(model: PreTrainedModel, adapter: AdapterConfig | None) -> None:
    """Raises UserError where the model has no linear layer of a name that is to get an adapter."""
    if adapter is None or isinstance(adapter.target_modules, str):
        return
    known = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, Linear)}
    unknown = [name for name in adapter.target_modules if name.rpartition(".")[2] not in known]
    if unknown:
        raise UserError(
            f"lora.target_modules: the model has no linear layer {unknown[0]!r}; it has {', '.join(sorted(known))}"
        )


def save_trained(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, out: Path, card: dict[str, Any]
) -> None:
    """Saves `checkpoint/` in `out`, a whole model; of one with adapters, they are kept in `adapter/` and merged first.

    `model` is of no use for training afterwards.
    """
    if isinstance(model, PeftModel):
        model.save_pretrained(str(out / ADAPTER))
        model = model.merge_and_unload()
    save_finished(model, tokenizer, out / "checkpoint", card)
