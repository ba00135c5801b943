"""Completions do not depend on how prompts are remembered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import awpo.decoding
from awpo.decoding import Decoder, Row, uniform_numbers
from awpo.prompt_memory import CopiedPrompts, SharedPrompts, arrangement

LENGTHS = [40, 12, 1, 40, 7]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        max_position_embeddings=256,
    )
    return Qwen3ForCausalLM(config).eval()


def rows(lengths: list[int] = LENGTHS, samples: int = 3) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 60, (length,), generator=generator).tolist() for length in lengths]
    return [
        Row(number, ids, 24 - sample, uniform_numbers(f"{number}-{sample}", 24 - sample) if sample else None)
        for number, ids in enumerate(prompts)
        for sample in range(samples)
    ]


def completed(model: Any, kind: type, found: list[Row], patch: pytest.MonkeyPatch, batch: int = 64) -> list[Row]:
    patch.setattr(awpo.decoding, "arrangement", lambda _: kind)
    for _ in Decoder(model, [3, 5, 8]).complete(found, 0.8, batch):
        pass
    return found


@pytest.mark.parametrize("lengths", [LENGTHS, [1, 1], [9]])
@pytest.mark.parametrize("batch", [64, 4, 1])
def test_shared_and_copied_prompts_give_the_same(
    lengths: list[int], batch: int, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = completed(model, SharedPrompts, rows(lengths), monkeypatch, batch)
    copied = completed(model, CopiedPrompts, rows(lengths), monkeypatch, batch)
    assert [row.output for row in shared] == [row.output for row in copied]
    assert {row.finish for row in shared} <= {"stop", "length"}
    for one, other in zip(shared, copied, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=1e-5)


def test_logprobs_are_those_of_the_bare_model(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert arrangement(model) is SharedPrompts
    for row in completed(model, SharedPrompts, rows(), monkeypatch):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row.ids + row.output])).logits[0, len(row.ids) - 1 : -1]
        right = (logits / 0.8).log_softmax(-1).gather(-1, torch.tensor(row.output)[:, None])[:, 0]
        if row.uniform is None:
            assert row.logprobs == []
            assert row.output == logits.argmax(-1).tolist()
        else:
            torch.testing.assert_close(torch.tensor(row.logprobs), right, atol=1e-5, rtol=1e-5)


def test_room_is_made_for_each_prompt_once() -> None:
    waiting = sorted(rows([40, 12], samples=3), key=lambda row: -len(row.ids))
    assert SharedPrompts.positions(waiting) == 2 * 40 + 6 * 24
    assert CopiedPrompts.positions(waiting) == 6 * (40 + 24)
