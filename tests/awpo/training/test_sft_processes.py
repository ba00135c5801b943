"""Fine-tuning on two processes is fine-tuning on one.

They are started with this file as their program (`python -m torch.distributed.run ... FILE JOB.json`).
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

from awpo.artifacts import read_manifest
from awpo.config_training import SftConfig
from awpo.errors import UserError
from awpo.events import METRICS, Tail
from awpo.training import sft as module
from awpo.training.checkpoints import process_state
from awpo.training.sft import train_sft, trainer_arguments

# 32 rows, 8 in a step: an epoch ends with a whole step.
CONFIG = SftConfig(steps=3, batch_size=8, micro_batch_size=2, learning_rate=1e-2, save_every=1)
GRADIENT = "gradient.pt"


def train(job: dict[str, str], out: Path) -> None:
    """Trains, and keeps the gradient of the first step beside the result."""
    gradients: list[torch.Tensor] = []

    def keep(self: Any, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        gradients.append(torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.LogToFiles, "on_pre_optimizer_step", keep)
        train_sft(job["model"], Path(job["instances"]), out, CONFIG)
    if process_state().is_main_process:
        torch.save(gradients[0], out.parent / GRADIENT)


@pytest.mark.slow
def test_two_processes_take_the_step_of_one(tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    job = {"model": str(tiny_model), "instances": str(instances), "out": str(tmp_path / "two")}
    (tmp_path / "job.json").write_text(json.dumps(job))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, __file__, str(tmp_path / "job.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    train(job, tmp_path / "one" / "sft")
    one, two = (torch.load(tmp_path / name / GRADIENT, weights_only=True) for name in ("one", "two"))
    assert one.norm() > 0.1
    assert (one - two).norm() / one.norm() < 1e-6
    rows = [
        [(row["step"], row["metrics"]) for row in Tail(tmp_path / name / "sft" / METRICS)] for name in ("one", "two")
    ]
    assert [step for step, _ in rows[1]] == [1, 2, 3], "a row of metrics for each step, by the first process alone"
    for (_, expected), (_, found) in zip(*rows, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    manifest = read_manifest(tmp_path / "two" / "sft")
    assert manifest is not None
    assert manifest.attempts == 1, "two processes are one attempt"


def test_rows_that_processes_cannot_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the 9 rows .* among 2 processes; make them a multiple of 2"):
        trainer_arguments(SftConfig(batch_size=9), tmp_path, 2)
    with pytest.raises(UserError, match=r"sft\.micro_batch_size = 4 must divide 12 / 2 = 6: choose one of 1, 2, 3, 6"):
        trainer_arguments(SftConfig(batch_size=12, micro_batch_size=4), tmp_path, 2)
    assert trainer_arguments(SftConfig(batch_size=12), tmp_path, 2).per_device_train_batch_size == 6


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    train(given, Path(given["out"]) / "sft")
    process_state().destroy_process_group()
