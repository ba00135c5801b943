"""Packed rows within the trainer: what it takes from the rollout, what it leaves out, and when it goes back to TRL's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from awpo.config_training import PolicyConfig
from awpo.data.store import read_instances
from awpo.events import EVENTS, RunLog
from awpo.methods import get_method
from awpo.prefix_attention import Layout
from awpo.training.policy import prompt_rows, trainer_arguments
from awpo.training.policy_trainer import PolicyTrainer
from awpo.training.scoring import Scorer

GROUP = 4
CONFIG = PolicyConfig(
    prompts_per_rollout=4,
    group_size=GROUP,
    steps_per_rollout=2,
    micro_batch_size=8,
    max_completion_length=24,
    max_prompt_length=2000,
    steps=2,
)


@pytest.fixture
def trainer(tiny_model: Path, instances: Path, tmp_path: Path) -> PolicyTrainer:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    chosen = read_instances(instances, {"train"})
    method = get_method("awpo")
    made = PolicyTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model),
        processing_class=tokenizer,
        args=trainer_arguments(CONFIG, method, tmp_path, 1),
        train_dataset=prompt_rows(tokenizer, chosen, 2000)[0],
        method=method,
        scorer=Scorer(method, CONFIG, None),
        instances=chosen,
        log=RunLog(tmp_path),
    )
    made.model.train()
    return made


def micro_batches(trainer: PolicyTrainer) -> list[dict[str, Any]]:
    trainer._prepare_inputs([dict(trainer.train_dataset[i // GROUP]) for i in range(16)])
    return list(trainer._buffered_inputs)


def passed(trainer: PolicyTrainer, batch: dict[str, Any]) -> torch.Tensor:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    values, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, batch["completion_ids"].shape[1])
    return values * batch["completion_mask"]


def warnings(folder: Path) -> str:
    file = folder / EVENTS
    return file.read_text("utf-8") if file.exists() else ""


def test_micro_batches_hold_whole_groups(trainer: PolicyTrainer) -> None:
    for batch in micro_batches(trainer):
        for group in batch["prompt_ids"].split(GROUP):
            assert bool((group == group[0]).all())


def test_old_log_probabilities_are_those_of_the_rollout(
    trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass is made for them, and they are what a pass would have found."""
    passes: list[bool] = []
    monkeypatch.setattr(
        "awpo.training.packed_trainer.log_probabilities", lambda *_: passes.append(True) or pytest.fail("a pass")
    )
    batches = micro_batches(trainer)
    monkeypatch.undo()
    assert not passes
    for batch in batches:
        kept = batch["completion_mask"].bool()
        with torch.no_grad():
            expected = passed(trainer, batch)
        torch.testing.assert_close(batch["old_per_token_logps"][kept], expected[kept], atol=1e-5, rtol=1e-5)


def test_gradients_are_the_same_where_idle_rows_have_none(
    trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.current_gradient_accumulation_steps = 1
    batch = micro_batches(trainer)[0]
    batch["advantages"] = torch.tensor([0.0, 0, 0, 0, 1, -1, 0.5, 0])
    rows: list[int] = []
    found = []
    for idle in (True, False):
        trainer.model.zero_grad()
        if not idle:
            monkeypatch.setattr(
                "awpo.training.packed_trainer.idle_apart", lambda compute, count, _: compute(torch.arange(count))
            )
        trainer._compute_loss(trainer.model, batch).backward()
        found.append(torch.cat([one.grad.flatten() for one in trainer.model.parameters()]))
        rows.append(int(trainer._idle is None))
    assert rows == [1, 1]  # it is of one loss alone
    assert (found[0] - found[1]).norm() <= 1e-5 * found[1].norm() > 0
    entropies = trainer._metrics["train"]["entropy"]
    assert entropies[0] == pytest.approx(entropies[1], rel=1e-6)  # of all rows, also those without a gradient


def test_a_device_that_agrees_goes_on_in_packed_rows(trainer: PolicyTrainer, tmp_path: Path) -> None:
    batch = micro_batches(trainer)[0]
    expected = passed(trainer, batch)
    trainer._compares = True
    torch.testing.assert_close(passed(trainer, batch), expected)
    assert trainer._packs
    assert not trainer._compares
    assert "computed again for every rollout" not in warnings(tmp_path)


@pytest.mark.parametrize("trouble", ["wrong", "unknown"])
def test_a_device_that_does_not_goes_back_to_the_plain_pass(
    trouble: str, trainer: PolicyTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = micro_batches(trainer)[0]
    expected = passed(trainer, batch)
    attend = Layout.attend

    def wrong(layout: Layout, layer: int, queries: Any, keys: Any, values: Any, scale: float) -> Any:
        if trouble == "unknown":
            raise NotImplementedError("no kernel for this device")
        return attend(layout, layer, queries, keys, values, scale * 1.2)

    monkeypatch.setattr(Layout, "attend", wrong)
    trainer._compares = True
    torch.testing.assert_close(passed(trainer, batch), expected, atol=1e-5, rtol=1e-5)
    assert not trainer._packs
    told = warnings(tmp_path)
    assert "computed again for every rollout" in told
    assert ("no kernel for this device" in told) == (trouble == "unknown")
