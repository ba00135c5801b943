"""How a batch is cut into micro-batches and shared among processes changes nothing.

Two processes are started with this file as their program (`python -m torch.distributed.run ... FILE JOB.json`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from awpo.config_training import PolicyConfig
from awpo.data.store import read_instances
from awpo.events import METRICS, RunLog, Tail
from awpo.methods import get_method
from awpo.training import policy as module
from awpo.training.policy import process_state, prompt_rows, train_policy, trainer_arguments
from awpo.training.policy_trainer import PolicyTrainer
from awpo.training.scoring import SAMPLES, Scorer

LOSSES = ("grpo", "dr_grpo", "dapo")
MAXIMUM = 24
# One rollout batch of 32 rows, two optimiser steps of 16 rows.
ROWS, STEP_ROWS, GROUP = 32, 16, 4
# In one step per rollout batch all rows are in it, in whatever order; 6 of 12 rollouts to each process split a group.
SHARED = PolicyConfig(
    steps=3,
    prompts_per_rollout=3,
    group_size=4,
    steps_per_rollout=1,
    micro_batch_size=6,
    learning_rate=1e-2,
    max_completion_length=10,
    save_every=1,
)
CUT = SHARED.model_copy(update={"steps": 4, "prompts_per_rollout": 4, "steps_per_rollout": 2, "micro_batch_size": 2})


def fixed_batch(vocabulary: int, pad_id: int) -> dict[str, Any]:
    """A rollout batch of unequal lengths in TRL's form, with advantages, radii and old log-probabilities."""
    generator = torch.Generator().manual_seed(11)

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    prompts, completions = drawn(3, 30, ROWS), drawn(1, MAXIMUM + 1, ROWS)
    prompt_mask = (torch.arange(30) >= 30 - prompts[:, None]).long()
    completion_mask = (torch.arange(MAXIMUM) < completions[:, None]).long()
    return {
        "prompt_ids": drawn(0, vocabulary, ROWS, 30).where(prompt_mask.bool(), pad_id),
        "prompt_mask": prompt_mask,
        "completion_ids": drawn(0, vocabulary, ROWS, MAXIMUM).where(completion_mask.bool(), pad_id),
        "completion_mask": completion_mask,
        "advantages": torch.randn(ROWS, generator=generator),
        "clip_low": torch.rand(ROWS, generator=generator) * 0.2,
        "clip_high": torch.rand(ROWS, generator=generator) * 0.2,
        # A random model gives every token about 1 / vocabulary: half of the ratios lie beyond the radius.
        "old_per_token_logps": 0.2 * torch.randn(ROWS, MAXIMUM, generator=generator)
        - torch.log(torch.tensor(float(vocabulary))),
        "num_items_in_batch": completion_mask.sum(),
    }


def share(batch: dict[str, Any], process: int, processes: int) -> dict[str, Any]:
    """The rows of one process, such that every process has its part of each optimiser step's rows, in order."""
    size = STEP_ROWS // processes
    starts = [first + process * size for first in range(0, ROWS, STEP_ROWS)]
    rows = torch.cat([torch.arange(start, start + size) for start in starts])
    return {key: value[rows] if value.dim() else value for key, value in batch.items()}


class StopBeforeStep(TrainerCallback):
    """Keeps the gradient that the first optimiser step would take, and ends there."""

    gradient: torch.Tensor

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.gradient = torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True


def make_trainer(name: str, loss: str, micro: int, model: Path, instances: Path, out: Path) -> PolicyTrainer:
    config = PolicyConfig(
        prompts_per_rollout=ROWS // GROUP,
        group_size=GROUP,
        steps_per_rollout=ROWS // STEP_ROWS,
        micro_batch_size=micro,
        max_completion_length=MAXIMUM,
    )
    method = get_method(name).changed(loss=loss)
    tokenizer = AutoTokenizer.from_pretrained(model)
    chosen = read_instances(instances, {"train"})
    arguments = trainer_arguments(config, method, out, process_state().num_processes)
    arguments.max_grad_norm, arguments.save_strategy = 0.0, "no"
    return PolicyTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=tokenizer,
        args=arguments,
        train_dataset=prompt_rows(tokenizer, chosen, 2000)[0],
        method=method,
        scorer=Scorer(method, config, None),
        instances=chosen,
        log=RunLog(out),
    )


def gradient_of_step(
    loss: str, micro: int, batch: dict[str, Any], model: Path, instances: Path, out: Path
) -> torch.Tensor:
    """Through the whole trainer: its buffer, its accumulation, its processes."""
    trainer, stop = make_trainer("awpo", loss, micro, model, instances, out), StopBeforeStep()
    trainer.add_callback(stop)
    mine = share(batch, trainer.accelerator.process_index, trainer.accelerator.num_processes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "_generate_and_score_completions", lambda inputs: mine)
        patch.setattr("awpo.training.packed_trainer.shuffled", lambda rows, _: rows)
        trainer.train()
    return stop.gradient


def gradient_by_hand(loss: str, batch: dict[str, Any], model: Path) -> torch.Tensor:
    """The gradient of the loss as its paper writes it, row by row, of the rows of the first step."""
    policy = AutoModelForCausalLM.from_pretrained(model).double()
    terms, tokens = [], 0
    for row in range(STEP_ROWS):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        completion = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
        count = len(completion)
        logits = policy(input_ids=torch.cat([prompt, completion])[None]).logits[0, -count - 1 : -1]
        now = logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0]
        ratio = (now - batch["old_per_token_logps"][row, :count]).exp()
        cut = ratio.clamp(1 - batch["clip_low"][row].item(), 1 + batch["clip_high"][row].item())
        advantage = batch["advantages"][row].item()
        total = -torch.minimum(ratio * advantage, cut * advantage).sum()
        terms.append(total / count if loss == "grpo" else total)
        tokens += count
    # dapo: tokens of an optimiser step, as the mean over the steps of a rollout batch.
    mean_tokens = batch["completion_mask"].sum().item() / (ROWS // STEP_ROWS)
    divisor = {"grpo": STEP_ROWS, "dr_grpo": STEP_ROWS * MAXIMUM, "dapo": mean_tokens}[loss]
    (sum(terms) / divisor).backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def batch(tiny_model: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    return fixed_batch(len(tokenizer), tokenizer.pad_token_id)


@pytest.fixture(scope="module")
def two_processes(tiny_model: Path, instances: Path, batch: dict[str, Any], tmp_path_factory: Any) -> Path:
    """The folder in which two processes left what `main` does."""
    out = tmp_path_factory.mktemp("two")
    torch.save(batch, out / "batch.pt")
    (out / "job.json").write_text(json.dumps({"model": str(tiny_model), "instances": str(instances), "out": str(out)}))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, __file__, str(out / "job.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.parametrize("loss", LOSSES)
def test_a_group_without_variance_counts_in_the_denominator_and_pushes_nothing(
    loss: str, tiny_model: Path, instances: Path, batch: dict[str, Any], tmp_path: Path
) -> None:
    """Its rows are those of the batch, whatever else is done with them (trl#6365, trl#7068); the method's key
    `dynamic_sampling_rounds` draws others in their place."""
    flat = {**batch, "advantages": batch["advantages"].clone()}
    flat["advantages"][:GROUP] = 0
    expected = gradient_by_hand(loss, flat, tiny_model)
    for micro in (16, 2):
        found = gradient_of_step(loss, micro, flat, tiny_model, instances, tmp_path / str(micro))
        assert relative(found, expected) < 1e-6
    assert get_method("grpo").dynamic_sampling_rounds == 0 < get_method("dapo").dynamic_sampling_rounds


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_does_not_depend_on_the_micro_batch(
    loss: str, tiny_model: Path, instances: Path, batch: dict[str, Any], tmp_path: Path
) -> None:
    """trl#5619, trl#6024, ms-swift#10116: the normaliser depends on the micro-batch."""
    expected = gradient_by_hand(loss, batch, tiny_model)
    for micro in (16, 8, 4, 2):
        found = gradient_of_step(loss, micro, batch, tiny_model, instances, tmp_path)
        assert relative(found, expected) < 1e-6, micro


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_does_not_depend_on_the_number_of_processes(
    loss: str, two_processes: Path, batch: dict[str, Any], tiny_model: Path
) -> None:
    """trl#5619, trl#6024, ms-swift#10116: the normaliser depends on the micro-batch."""
    expected = gradient_by_hand(loss, batch, tiny_model)
    found = torch.load(two_processes / "gradients.pt", weights_only=True)
    for micro in (8, 2):
        assert relative(found[f"{loss}-{micro}"], expected) < 1e-6, micro


def rows_of(out: Path) -> list[tuple[int, dict[str, float]]]:
    return [
        (row["step"], {name: value for name, value in row["metrics"].items() if "seconds" not in name})
        for row in Tail(out / METRICS)
    ]


@pytest.mark.slow
def test_two_processes_train_as_one(two_processes: Path, tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    """The same rollouts, advantages over whole groups though a group is split, one row of metrics for each step."""
    train_policy(str(tiny_model), instances, tmp_path / "one", SHARED.model_copy(update={"micro_batch_size": 12}))
    one, two = rows_of(tmp_path / "one"), rows_of(two_processes / "shared")
    assert [step for step, _ in two] == [1, 2, 3]
    for (_, expected), (_, found) in zip(one, two, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert any(row["gradient_norm"] > 0.01 for _, row in two)
    weights = [
        load_file(out / "checkpoint" / "model.safetensors") for out in (tmp_path / "one", two_processes / "shared")
    ]
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], atol=1e-4), name


@pytest.mark.slow
def test_two_processes_resume_where_they_were(two_processes: Path) -> None:
    """In the middle of a rollout batch each has its own rollouts back."""
    assert rows_of(two_processes / "cut") == rows_of(two_processes / "whole")
    assert (two_processes / "cut" / SAMPLES).read_text() == (two_processes / "whole" / SAMPLES).read_text()
    whole, cut = (two_processes / name / "checkpoint" / "model.safetensors" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()


def test_a_replaced_group_counts_with_its_own_tokens(
    batch: dict[str, Any], tiny_model: Path, instances: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After dynamic sampling dapo's divisor is the tokens of the rows that are trained on."""
    trainer = make_trainer("dapo", "dapo", 4, tiny_model, instances, tmp_path)
    # Outcomes differ in every group, but for the second of those that are drawn first.
    columns = {name: torch.zeros(ROWS) for name in ("format", "overlong", "reasoning")}
    columns |= {
        "correct": torch.arange(ROWS) % 4.0,
        "r_min": torch.full((ROWS,), -3.0),
        "r_max": torch.full((ROWS,), 4.0),
    }
    drawn = {key: value.flip(0) if value.dim() else value for key, value in batch.items()}
    drawn |= {**columns, "row": torch.arange(ROWS) + ROWS, "teaches": torch.ones(ROWS, dtype=torch.bool)}
    first = {**batch, **columns, "row": torch.arange(ROWS), "correct": columns["correct"].clone()}
    first["correct"][4:8] = 0
    trainer._credit(first, GROUP)
    monkeypatch.setattr(trainer, "_roll_out", lambda *_: drawn)
    store = trainer._metrics["train"]
    for name in ("num_tokens", "completions/mean_length", "completions/clipped_ratio"):
        store[name] = [1]
    filled = trainer._fill_empty_groups(first, GROUP, 1)
    # The second group's rows are now the first of those drawn, which are the last of the batch.
    assert filled["row"][4:8].tolist() == [32, 33, 34, 35]
    counts = [int(mask.sum()) for mask in batch["completion_mask"]]
    expected = sum(counts) - sum(counts[4:8]) + sum(counts[28:32])
    assert expected != sum(counts)
    assert filled["num_items_in_batch"] == expected == filled["completion_mask"].sum()
    assert store["completions/mean_length"] == [pytest.approx(expected / ROWS)]


class Killed(RuntimeError):
    pass


def train_and_die(step: int, *arguments: Any) -> None:
    def on_step_begin(self: object, args: object, state: Any, control: object, **_: object) -> None:
        if state.global_step == step:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.LogPolicyToFiles, "on_step_begin", on_step_begin)
        with pytest.raises(Killed):
            train_policy(*arguments)


def main(job: dict[str, str]) -> None:
    model, instances, out = Path(job["model"]), Path(job["instances"]), Path(job["out"])
    fixed = torch.load(out / "batch.pt", weights_only=True)
    gradients = {
        f"{loss}-{micro}": gradient_of_step(loss, micro, fixed, model, instances, out / "gradient")
        for loss in LOSSES
        for micro in (8, 2)
    }
    if process_state().is_main_process:
        torch.save(gradients, out / "gradients.pt")
    train_policy(str(model), instances, out / "shared", SHARED)
    train_policy(str(model), instances, out / "whole", CUT)
    train_and_die(3, str(model), instances, out / "cut", CUT)
    process_state().wait_for_everyone()
    train_policy(str(model), instances, out / "cut", CUT)
    process_state().destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
