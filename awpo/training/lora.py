"""Adapters of low rank (LoRA) by peft: made from the settings, and merged into the model when training has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import Linear
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from awpo.config_training import AdapterConfig
from awpo.errors import UserError
from awpo.training.checkpoints import load_policy, save_finished
from awpo.training.sharding import apart_from_shards, gathered_state, in_shards

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


@contextmanager
def trained_model(
    trainer: Any, location: str, adapter: AdapterConfig | None
) -> Iterator[PreTrainedModel | PeftModel | None]:
    """The trained model, whole, to be saved by `save_trained`; None but in the main process.

    `trainer` has trained, from the model at `location`. All processes must ask. Where weights are in shards, they are
    gathered into a model of the main process's own, of the type that they have.
    """
    accelerator = trainer.accelerator
    if not in_shards(accelerator):
        yield accelerator.unwrap_model(trainer.model) if accelerator.is_main_process else None
        return
    state = gathered_state(accelerator, trainer.model_wrapped)
    with apart_from_shards():
        if not accelerator.is_main_process:
            yield None
            return
        model, _ = load_policy(location)
        whole = get_peft_model(model, config) if (config := peft_config(adapter)) else model
        whole.to(next(iter(state.values())).dtype)
        whole.load_state_dict(state)
        yield whole


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
