"""A run that is interrupted, at whatever optimiser step, ends as one that was not: weights, metrics, samples."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trl.trainer.utils import RepeatSampler

from awpo.artifacts import open_stage, read_manifest
from awpo.config_training import PolicyConfig
from awpo.data.store import read_instances, write_instances
from awpo.errors import UserError
from awpo.events import METRICS, Tail
from awpo.methods import get_method
from awpo.training import policy as module
from awpo.training.checkpoints import RESUME, last_whole_checkpoint
from awpo.training.policy import train_policy
from awpo.training.policy_trainer import PolicyTrainer
from awpo.training.rollout_buffer import EpochOrder, RolloutState, file_name
from awpo.training.scoring import SAMPLES

STEPS = 7
# 8 prompts, 4 in a rollout batch of two steps, each of two micro-batches: an epoch has four steps.
CONFIG = PolicyConfig(
    steps=STEPS,
    prompts_per_rollout=4,
    group_size=2,
    steps_per_rollout=2,
    micro_batch_size=2,
    learning_rate=1e-2,
    max_completion_length=10,
    save_every=1,
)


class Killed(RuntimeError):
    pass


@pytest.fixture(scope="module")
def few(instances: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few") / "data"
    with open_stage(folder, "decompose", {}, {}) as stage:
        write_instances(folder, read_instances(instances, {"train"})[:8])
        stage.finish()
    return folder


def train_and_die(
    step: int, model: Path, instances: Path, out: Path, config: PolicyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trains until `step` steps are done, with their checkpoint written, and the next one begins."""

    def on_step_begin(self: object, args: object, state: Any, control: object, **_: object) -> None:
        if state.global_step == step:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(module.LogPolicyToFiles, "on_step_begin", on_step_begin)
        with pytest.raises(Killed):
            train_policy(str(model), instances, out, config)


def result(out: Path) -> dict[str, Any]:
    """All that must not depend on interruptions: the weights' bits, and every number but times."""
    rows = [
        (row["step"], {name: value for name, value in row["metrics"].items() if "seconds" not in name})
        for row in Tail(out / METRICS)
    ]
    samples = [json.loads(line) for line in (out / SAMPLES).read_text().splitlines()]
    weights = {
        name: tensor.numpy().tobytes() for name, tensor in load_file(out / "checkpoint" / "model.safetensors").items()
    }
    return {"metrics": rows, "samples": samples, "weights": weights}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert [step for step, _ in found["metrics"]] == list(range(1, STEPS + 1))
    assert found["metrics"] == expected["metrics"]
    assert found["samples"] == expected["samples"]
    assert found["weights"] == expected["weights"]


def test_a_run_interrupted_after_every_step_ends_as_one_that_was_not(
    tiny_model: Path, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run that dies after step 1, resumes, dies after step 2, and so on: a resumption at each step is exact, in
    the middle of a rollout batch, at its boundary, and in the second epoch.
    accelerate#2016, trl#5911: a resumed run repeats or skips data.
    """
    train_policy(str(tiny_model), few, tmp_path / "whole", CONFIG)
    generated: list[int] = []
    roll_out = PolicyTrainer._roll_out
    monkeypatch.setattr(
        PolicyTrainer,
        "_roll_out",
        lambda self, *rest: generated.append(self.state.global_step) or roll_out(self, *rest),
    )
    for step in range(1, STEPS):
        train_and_die(step, tiny_model, few, tmp_path / "cut", CONFIG, monkeypatch)
    train_policy(str(tiny_model), few, tmp_path / "cut", CONFIG)
    assert_same(result(tmp_path / "cut"), result(tmp_path / "whole"))
    # Rollouts are sampled where they would have been, and nowhere else.
    assert generated == [0, 2, 4, 6]


@pytest.mark.parametrize("method", ["awpo", "dapo"])
def test_checkpoints_need_not_lie_at_rollout_boundaries(
    method: str, tiny_model: Path, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint every three steps, a rollout batch every two; dapo samples anew for groups without variance."""
    config = CONFIG.model_copy(update={"save_every": 3, "method": method})
    train_policy(str(tiny_model), few, tmp_path / "whole", config)
    for step in (2, 5):  # before any checkpoint, then two steps after that of step 3
        train_and_die(step, tiny_model, few, tmp_path / "cut", config, monkeypatch)
    resumed_at = last_whole_checkpoint(tmp_path / "cut" / RESUME)
    assert resumed_at is not None
    assert resumed_at.name == "checkpoint-3"
    train_policy(str(tiny_model), few, tmp_path / "cut", config)
    assert_same(result(tmp_path / "cut"), result(tmp_path / "whole"))


def test_more_steps_and_another_save_every_go_on_exactly(
    tiny_model: Path, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rate of policy training does not depend on how many steps there will be."""
    train_policy(str(tiny_model), few, tmp_path / "whole", CONFIG)
    shorter = CONFIG.model_copy(update={"steps": 5, "save_every": 3})
    train_and_die(4, tiny_model, few, tmp_path / "cut", shorter, monkeypatch)
    train_policy(str(tiny_model), few, tmp_path / "cut", CONFIG)
    assert_same(result(tmp_path / "cut"), result(tmp_path / "whole"))
    said = [row["message"] for row in Tail(tmp_path / "cut" / "events.jsonl") if row["event"] == "note"]
    assert said == [f"goes on after step 3 of {STEPS} (steps was 5 and is {STEPS})"]
    manifest = read_manifest(tmp_path / "cut")
    assert manifest is not None
    assert manifest.inputs["method"] == get_method("awpo").in_force()


def start_worker(model: Path, instances: Path, out: Path, config: PolicyConfig) -> subprocess.Popen[bytes]:
    out.mkdir(exist_ok=True)
    job = {"model": str(model), "instances": str(instances), "out": str(out), "config": config.model_dump(mode="json")}
    (out / "job.json").write_text(json.dumps(job))
    return subprocess.Popen(
        [sys.executable, "-m", "awpo.training.policy", str(out / "job.json")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_worker_killed_by_the_system_ends_as_one_that_was_not(tiny_model: Path, few: Path, tmp_path: Path) -> None:
    """SIGKILL as soon as a step's metrics are in the file, wherever the process then is: in the middle of writing a
    checkpoint, perhaps.
    accelerate#2016, trl#5911: a resumed run repeats or skips data.
    """
    # Long completions, so that a step lasts longer than it takes to see it.
    config = CONFIG.model_copy(update={"max_completion_length": 40})
    train_policy(str(tiny_model), few, tmp_path / "whole", config)
    for step in (1, 5):
        process = start_worker(tiny_model, few, tmp_path / "cut", config)
        while process.poll() is None and step not in [row["step"] for row in Tail(tmp_path / "cut" / METRICS)]:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert start_worker(tiny_model, few, tmp_path / "cut", config).wait() == 0
    assert_same(result(tmp_path / "cut"), result(tmp_path / "whole"))


def state(processes: int = 1) -> RolloutState:
    rows = {"advantages": torch.arange(4.0), "completion_ids": torch.arange(8).view(4, 2), "none": None}
    parts = [{key: value if value is None else value[i : i + 2] for key, value in rows.items()} for i in (0, 2)]
    return RolloutState(5, parts, {"loss": [1.0]}, {"constant": {"outcome": 2}}, processes)


def test_rollouts_come_back_as_they_were_written(tmp_path: Path) -> None:
    written = state()
    written.write(tmp_path / "checkpoint-3", 0)
    read = RolloutState.read(tmp_path / "checkpoint-3", 0, 1)
    assert (read.micro_batches, read.metrics, read.memory) == (5, written.metrics, written.memory)
    for found, expected in zip(read.buffer, written.buffer, strict=True):
        assert found.keys() == expected.keys()
        assert found["none"] is None
        assert torch.equal(found["completion_ids"], expected["completion_ids"])
        assert torch.equal(found["advantages"], expected["advantages"])


def test_what_cannot_be_gone_on_from_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollouts_0\.pt is missing or damaged"):
        RolloutState.read(tmp_path, 0, 1)
    state(processes=2).write(tmp_path, 0)
    with pytest.raises(UserError, match="written by 2 processes and there are 1 now"):
        RolloutState.read(tmp_path, 0, 1)
    whole = (tmp_path / file_name(0)).read_bytes()
    (tmp_path / file_name(0)).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="damaged"):
        RolloutState.read(tmp_path, 0, 2)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"micro_batches": Path("/")}, tmp_path / file_name(0))
    with pytest.raises(UserError, match="damaged"):
        RolloutState.read(tmp_path, 0, 1)


def test_the_order_of_an_epoch_is_that_of_trl_and_needs_no_memory() -> None:
    given: dict[str, Any] = {"mini_repeat_count": 2, "batch_size": 3, "repeat_count": 2, "seed": 5}
    trl = RepeatSampler(range(10), **given)
    first, second, third = list(trl), list(trl), list(trl)
    assert first != second
    epoch = [0]
    ours = EpochOrder(range(10), **given, epoch=lambda: epoch[0])
    for number, expected in ((0, first), (1, second), (2, third), (1, second)):
        epoch[0] = number
        assert list(ours) == expected
