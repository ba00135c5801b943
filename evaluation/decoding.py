"""The pieces of generation below the loop: loading a checkpoint, keys and values in place, the next token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from awpo.errors import UserError


def load(folder: Path, dtype: Any) -> tuple[Any, Any]:
    """Tokenizer and model; UserError for whatever is missing or broken, none of which the library fills in."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no model (no config.json); give a folder saved by a training stage")
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} holds no tokenizer (no tokenizer.json); save it beside the model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"cannot load the model in {folder}: {str(error).splitlines()[0]}") from None
    if report["missing_keys"]:
        name = sorted(report["missing_keys"])[0]
        raise UserError(f"{folder} lacks {len(report['missing_keys'])} weights of its model ({name}, ..); save it anew")
    return tokenizer, model


class BufferLayer(DynamicLayer):
    """Keys and values of one attention layer in buffers made once, (rows, heads, capacity, head size).

    `length` positions of them are filled. A library layer concatenates at every step, which copies everything.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().__init__()
        self.buffers, self.length, self.is_initialized = (keys, values), length, True
        self._show()

    def _show(self) -> None:
        self.keys, self.values = (buffer[:, :, : self.length] for buffer in self.buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[2]
        self.buffers[0][:, :, self.length : end] = key_states
        self.buffers[1][:, :, self.length : end] = value_states
        self.length = end
        self._show()
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def batch_select_indices(self, indices: Tensor) -> None:
        self.buffers = (self.buffers[0].index_select(0, indices), self.buffers[1].index_select(0, indices))
        self._show()


def growing_cache() -> Cache:
    """A cache of the library's own layers, for a prefill."""
    return Cache(layer_class_to_replicate=DynamicLayer)


def choose(logits: Tensor, uniform: Tensor, sampled: Tensor, temperature: float) -> Tensor:
    """The next tokens (rows, 1) for logits (rows, vocabulary) and uniform numbers in [0, 1) (rows, 1).

    Inversion: the first token at which the distribution function passes the uniform number. In double
    precision, since the sum over a large vocabulary would round away the rarest tokens.
    """
    best = logits.argmax(-1, keepdim=True)
    if temperature <= 0 or not bool(sampled.any()):
        return best
    function = (logits.double() / temperature).softmax(-1).cumsum(-1)
    drawn = torch.searchsorted(function, uniform * function[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    return torch.where(sampled[:, None], drawn, best)
