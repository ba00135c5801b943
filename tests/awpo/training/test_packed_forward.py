"""Log-probabilities and gradients of packed rows against TRL's own pass over the padded batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl.trainer.utils import add_fused_lm_head

from awpo.model_attention import arguments, why_not_packed
from awpo.prefix_attention import Layout, tree_attention
from awpo.training.packed_forward import idle_apart, log_probabilities, packed_rows, take_packed_rows

# Prompt lengths, and the completion lengths of each: groups of several sizes, one prompt of one token.
GROUPS = [(30, [5, 9, 1, 12]), (1, [3, 3]), (47, [12]), (8, [2, 7, 7])]
SIZES = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 512,
}


def qwen3(**more: Any) -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True, **more))


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def with_adapters() -> Any:
    torch.manual_seed(0)
    return get_peft_model(
        headed(qwen3()), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )


def recomputing() -> Any:
    model = qwen3()
    model.gradient_checkpointing_enable()
    return model.train()


def headed(model: Any) -> Any:
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    return model


def batch(groups: list[tuple[int, list[int]]] = GROUPS) -> tuple[Tensor, Tensor, int]:
    """Ids and mask (B, P + C), and C. The rows of a group are not beside one another."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, 90, (length,), generator=generator) for length, _ in groups]
    rows = [(prompts[group], length) for group, (_, lengths) in enumerate(groups) for length in lengths]
    rows = rows[::2] + rows[1::2]
    most, width = max(len(prompt) for prompt, _ in rows), max(length for _, length in rows)
    ids, mask = torch.zeros(len(rows), most + width, dtype=torch.long), torch.zeros(len(rows), most + width)
    for row, (prompt, length) in enumerate(rows):
        ids[row, most - len(prompt) : most] = prompt
        ids[row, most : most + length] = torch.randint(1, 90, (length,), generator=generator)
        mask[row, most - len(prompt) : most + length] = 1
    return ids, mask.long(), width


def padded(model: Any, ids: Tensor, mask: Tensor, width: int) -> tuple[Tensor, Tensor]:
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-width] = -100
    output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    return output.log_probs[:, -width:], output.entropy[:, -width:]


def gradients(model: Any, values: Tensor, weights: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (values * weights).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


def base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@pytest.mark.parametrize("most_tokens", [None, 60, 1])
@pytest.mark.parametrize(
    "make", [lambda: headed(qwen3()), lambda: headed(llama()), with_adapters, lambda: headed(recomputing())]
)
def test_values_and_gradients_are_those_of_the_padded_batch(make: Callable[[], Any], most_tokens: int | None) -> None:
    model, (ids, mask, width) = make(), batch()
    kept = mask[:, -width:].bool()
    weights = torch.randn(kept.shape, generator=torch.Generator().manual_seed(4)) * kept
    expected, entropy = padded(model, ids, mask, width)
    right = gradients(model, expected, weights)
    assert why_not_packed(base(model)) is None
    take_packed_rows(base(model))
    found, uncertainty = log_probabilities(model, ids, mask, width, most_tokens)
    assert uncertainty is not None
    torch.testing.assert_close(found[kept], expected[kept], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(uncertainty[kept], entropy[kept], atol=1e-5, rtol=1e-5)
    assert not found[~kept].any()
    for name, gradient in gradients(model, found, weights).items():
        assert (gradient - right[name]).norm() <= 1e-4 * right[name].norm(), name
    assert max(gradient.norm() for gradient in right.values()) > 1
    # and what is not packed is computed as before
    again, _ = padded(model, ids, mask, width)
    assert torch.equal(again, expected)


def test_each_prompt_is_there_once_and_no_padding() -> None:
    ids, mask, width = batch()
    (packed,) = packed_rows(ids, mask, width, None)
    prompts = sum(length - 1 for length, _ in GROUPS)
    completions = sum(length for _, lengths in GROUPS for length in lengths)
    assert packed.input_ids.shape == packed.position_ids.shape == (1, prompts + completions)
    assert packed.labels.shape == (1, completions)
    assert torch.equal(packed.labels[0], ids[:, -width:][packed.rows, packed.columns])
    cut = list(packed_rows(ids, mask, width, 60))
    assert len(cut) == 4
    assert sorted(torch.cat([one.rows for one in cut]).tolist()) == sorted(packed.rows.tolist())


def test_an_empty_completion_is_computed_all_the_same() -> None:
    ids, mask, width = batch([(4, [3, 3])])
    mask[0, -width:] = 0
    model = headed(qwen3())
    take_packed_rows(model)
    found, _ = log_probabilities(model, ids, mask, width, None)
    assert found.isfinite().all()
    torch.testing.assert_close(found[1], padded(model, ids, mask, width)[0][1])


def test_rows_without_an_advantage_have_values_and_no_gradients() -> None:
    model, (ids, mask, width) = headed(qwen3()), batch()
    take_packed_rows(model)

    def compute(rows: Tensor) -> tuple[Tensor, Tensor | None]:
        return log_probabilities(model, ids[rows], mask[rows], width, None)

    everything, _ = compute(torch.arange(len(ids)))
    idle = torch.arange(len(ids)) % 3 == 0
    values, entropies = idle_apart(compute, len(ids), idle)
    torch.testing.assert_close(values, everything, atol=1e-6, rtol=1e-5)
    assert entropies is not None
    weights = torch.randn(values.shape) * ~idle[:, None]
    right = gradients(model, everything, weights)
    for name, gradient in gradients(model, values, weights).items():
        assert (gradient - right[name]).norm() <= 1e-5 * right[name].norm(), name
    # where all rest, a backward pass is still there
    values, _ = idle_apart(compute, len(ids), torch.ones(len(ids), dtype=torch.bool))
    assert not any(gradient.any() for gradient in gradients(model, values, torch.zeros_like(values)).values())


def test_models_that_attend_otherwise_are_named(tmp_path: Path) -> None:
    sliding = qwen3(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert "sliding_attention" in str(why_not_packed(sliding))
    eager = qwen3()
    eager.config._attn_implementation = "eager"
    assert "of its own" in str(why_not_packed(eager))
    dropping = qwen3(attention_dropout=0.1)
    assert "dropout" in str(why_not_packed(dropping))


@pytest.mark.parametrize("window", [None, 8])
def test_a_window_is_seen_where_no_layer_is_of_a_kind(window: int | None) -> None:
    """Mistral, Mixtral, Phi-3 and others have one window for all layers."""
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window))
    reason = why_not_packed(model)
    assert reason == (None if window is None else "the model's attention has a sliding window")
    take_packed_rows(model)
    one = packed_rows(torch.tensor([[3, 4, 5, 6]]), torch.ones(1, 4, dtype=torch.long), 2, None)
    packed = next(one)
    with nullcontext() if window is None else pytest.raises(NotImplementedError, match="sliding_window"):
        model(**arguments(packed.layout, packed.input_ids, packed.position_ids))


def test_a_checkpoint_says_nothing_of_it(tmp_path: Path) -> None:
    model = qwen3()
    take_packed_rows(model)
    model.save_pretrained(tmp_path)
    assert "awpo_packed" not in (tmp_path / "config.json").read_text("utf-8")
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_the_mask_for_other_devices_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's way, by PyTorch's attention and a mask, on a CPU: values and gradients through a whole model."""
    model, (ids, mask, width) = headed(qwen3()), batch()
    kept = mask[:, -width:].bool()
    take_packed_rows(model)
    right, _ = log_probabilities(model, ids, mask, width, None)
    expected = gradients(model, right, kept)
    monkeypatch.setattr(Layout, "attend", lambda layout, _, *tensors: tree_attention(*tensors[:3], layout, tensors[3]))
    found, _ = log_probabilities(model, ids, mask, width, None)
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients(model, found, kept).items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
