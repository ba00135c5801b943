"""Faults that trainers are known for, of which no other test here speaks (tests/test_known_pains.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import awpo.training.policy_trainer
from awpo.config_training import PolicyConfig
from awpo.data.store import read_instances
from awpo.events import EVENTS, METRICS, RunLog, Tail
from awpo.methods import get_method
from awpo.training.checkpoints import save_finished
from awpo.training.policy import prompt_rows, train_policy, trainer_arguments
from awpo.training.policy_trainer import PolicyTrainer
from awpo.training.scoring import Scorer


def test_what_is_not_saved_as_it_was_trained_is_no_result(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO-3 saves empty tensors where the weights are not gathered (DeepSpeed#3841)."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    save_finished(model, tokenizer, tmp_path / "whole", {})
    saves = type(model).save_pretrained

    def with_empty_ones(self: Any, folder: Path, **options: Any) -> None:
        state = {
            name: torch.empty(0) if name.endswith("up_proj.weight") else held
            for name, held in self.state_dict().items()
        }
        saves(self, folder, state_dict=state, **options)

    monkeypatch.setattr(type(model), "save_pretrained", with_empty_ones)
    with pytest.raises(RuntimeError, match=r"up_proj|mismatch|size"):
        save_finished(model, tokenizer, tmp_path / "empty", {})


def test_dynamic_sampling_ends_with_a_warning_and_the_batch_as_it_is(
    tiny_model: Path, instances: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no prompt gives a group that varies, rounds could be drawn for ever (DAPO#22), or the batch shrink to
    nothing (AReaL#450)."""
    monkeypatch.setattr(
        awpo.training.policy_trainer, "varying_groups", lambda batch, size: torch.zeros(len(batch["row"]) // size) > 0
    )
    config = PolicyConfig(
        method="dapo",
        steps=1,
        prompts_per_rollout=4,
        group_size=4,
        steps_per_rollout=1,
        micro_batch_size=16,
        max_completion_length=8,
        save_every=1,
    )
    train_policy(str(tiny_model), instances, tmp_path / "out", config)
    (row,) = (row["metrics"] for row in Tail(tmp_path / "out" / METRICS))
    assert row["dynamic_sampling/rounds"] == get_method("dapo").dynamic_sampling_rounds > 0
    assert row["dynamic_sampling/empty_share"] == 1
    assert row["samples/total"] == 16
    said = [event.get("message", "") for event in Tail(tmp_path / "out" / EVENTS)]
    assert any("100% of the groups have no variance after" in line for line in said)


def test_the_tokens_that_were_drawn_are_trained_on(tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    """Decoding and tokenising again drifts (trl#5224, rllm#272): here the bytes of an untrained model, which are no
    UTF-8, would become other tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    chosen, method = read_instances(instances, {"train"}), get_method("grpo")
    config = PolicyConfig(
        method="grpo",
        steps=1,
        prompts_per_rollout=4,
        group_size=4,
        steps_per_rollout=1,
        micro_batch_size=16,
        max_completion_length=12,
    )
    trainer = PolicyTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model),
        processing_class=tokenizer,
        args=trainer_arguments(config, method, tmp_path, 1),
        train_dataset=prompt_rows(tokenizer, chosen, 2000)[0],
        method=method,
        scorer=Scorer(method, config, None),
        instances=chosen,
        log=RunLog(tmp_path),
    )
    asked: list[list[int]] = []
    drawn: list[list[int]] = []
    sample = trainer._sample

    def recorded(prompt_ids: list[list[int]]) -> list[list[int]]:
        asked.extend(prompt_ids)
        drawn.extend(sample(prompt_ids))
        return drawn

    trainer._sample = recorded  # type: ignore[method-assign]
    rows = [dict(trainer.train_dataset[index // 4]) for index in range(16)]
    batch = trainer._generate_and_score_completions(rows)
    for kind, expected in (("prompt", asked), ("completion", drawn)):
        found = [
            ids[mask.bool()].tolist() for ids, mask in zip(batch[f"{kind}_ids"], batch[f"{kind}_mask"], strict=True)
        ]
        assert found == expected
    again = [tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] for ids in drawn]
    assert sum(one != other for one, other in zip(again, drawn, strict=True)) > 8
