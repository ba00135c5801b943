"""How a model of transformers is told to attend by a layout of tokens of ours, instead of by a mask.

The attention of transformers is looked up by a name in the model's config. The one registered here is PyTorch's own, but
where the forward pass is given `packed`, an object that knows where each token belongs: its method
`attend(layer, queries, keys, values, scale)` takes (rows, heads, tokens, head size) and returns the same shape. Every
layer gets it, also when activations are recomputed in a backward pass.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "awpo_packed"


class Packed(Protocol):
    """What says where each token of a forward pass belongs."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor: ...


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, packed: Packed | None = None, **named: Any
) -> tuple[Tensor, Any]:
    """Returns (rows, tokens, heads, head size), as transformers wants it."""
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, mask, **named)
    if unknown := [
        name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if named.get(name) is not None
    ]:
        raise NotImplementedError(f"attention by a layout knows no {', '.join(unknown)}")
    return packed.attend(module.layer_idx, query, key, value, named["scaling"]).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def why_not_packed(model: Any) -> str | None:
    """Why `model`, a causal language model of transformers, can't attend by a layout; None where it can."""
    config = model.config.get_text_config(decoder=True)
    if not model._supports_attention_backend or config._attn_implementation not in ("sdpa", ATTENTION):
        return f"a model of type {config.model_type} computes its attention in a way of its own"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"}):
        return f"the model has layers of {', '.join(others)}"
    if getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None):
        return "the model's attention has a sliding window"
    if getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_logit_softcapping", None):
        return "the model's attention has dropout or a soft cap"
    return None


def attend_by_layout(model: Any) -> None:
    """Makes `model` take `packed`; without it, it computes what it did before."""
    model.config._attn_implementation = ATTENTION


def arguments(packed: Packed, input_ids: Tensor, position_ids: Tensor) -> dict[str, Any]:
    """The arguments of a forward pass by a layout; both tensors are (rows, tokens)."""
    # A mask of four axes is one that is made already; nobody reads it.
    mask = input_ids.new_zeros(1, 1, 1, 1)
    return {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": mask, "packed": packed}
