"""Training in two processes as one tracked run: what a person sees of it however it ends.

Real processes through torchrun, a real store. One run is never disturbed; the other loses a process, is stopped, and
still ends with the same bytes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.entities import Run

from awpo.artifacts import open_stage
from awpo.config_rollouts import RolloutSettings
from awpo.config_training import PolicyConfig
from awpo.data.store import write_instances
from awpo.errors import UserError
from awpo.events import METRICS, Tail
from awpo.processes import StageFailed
from tasks.cancellation import stops_its_tasks
from tasks.tracking import RunFile
from tasks.tracking_store import Tracking
from tasks.training import train_policy
from tests.awpo.test_processes import alive, wait_until
from tests.awpo.training.conftest import CITIES, make_instance

STEPS = 6
# Long completions, so that a step lasts longer than it takes to see it.
CONFIG = PolicyConfig(
    steps=STEPS,
    prompts_per_rollout=4,
    group_size=2,
    steps_per_rollout=2,
    micro_batch_size=2,
    learning_rate=1e-2,
    max_completion_length=40,
    save_every=1,
)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few") / "data"
    with open_stage(folder, "decompose", {}, {}) as stage:
        write_instances(folder, [make_instance(city, 0) for city in CITIES])
        stage.finish()
    return folder


def ranks_of(out: Path) -> dict[int, int]:
    """The process numbers of those that train into `out`, by rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode().split("\0")
            environment = dict(
                part.partition("=")[::2] for part in (process / "environ").read_bytes().decode().split("\0")
            )
        except (OSError, UnicodeDecodeError):
            continue
        if str(out / "job.json") in command and "RANK" in environment and alive(int(process.name)):
            found[int(environment["RANK"])] = int(process.name)
    return found


def steps_of(out: Path) -> list[int]:
    return [row["step"] for row in Tail(out / METRICS)]


class Trained(threading.Thread):
    """A training in a thread, as a flow's task is; `error` is how it ended, if badly."""

    def __init__(self, train: Callable[[], object]) -> None:
        super().__init__()
        self.train, self.error = train, None
        self.start()

    def run(self) -> None:
        try:
            self.train()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error: BaseException | None = error


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would train")
def test_training_with_a_vllm_of_its_own_runs_with_vllms_python(
    tiny_model: Path, few: Path, tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ntouch {tmp_path}/used\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("AWPO_VLLM_PYTHON", str(python))
    config = CONFIG.model_copy(update={"rollouts": RolloutSettings(engine="vllm_colocate")})
    with pytest.raises(UserError, match="vllm_colocate needs GPUs"):
        train_policy.fn(str(tiny_model), "tiny", "base", few, tmp_path / "out", config, tracking)
    assert (tmp_path / "used").exists()


@pytest.mark.slow
def test_two_processes_are_one_run_however_it_goes(
    tiny_model: Path, few: Path, tracking: Tracking, tmp_path: Path
) -> None:
    def train(out: Path, launch: str = "cpu-2") -> Path:
        found: Path = train_policy.fn(
            str(tiny_model), "tiny", "base", few, out, CONFIG, tracking, threads=1, launch=launch
        )
        return found

    def told(out: Path) -> Run:
        file = RunFile.read(out)
        assert file
        return tracking.client().get_run(file.run_id)

    def artifacts(run: Run) -> set[str]:
        return {item.path for item in tracking.client().list_artifacts(run.info.run_id, "logs")}

    # Undisturbed.
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(whole)
    run = told(whole)
    assert run.info.status == "FINISHED"
    assert {key: run.data.tags[key] for key in ("awpo.launch", "awpo.processes")} == {
        "awpo.launch": "cpu-2",
        "awpo.processes": "2",
    }
    assert artifacts(run) == {"logs/log.txt", "logs/log.rank-1.txt"}
    peaks = {name: value for name, value in run.data.metrics.items() if name.startswith("memory/")}
    assert peaks.keys() == {"memory/rank-0/peak_gib", "memory/rank-1/peak_gib"}
    assert all(0.05 < value < 16 for value in peaks.values())

    # A process is killed.
    training = Trained(lambda: train(cut))
    assert wait_until(lambda: 2 in steps_of(cut), 300)
    processes = ranks_of(cut)
    assert processes.keys() == {0, 1}
    os.kill(processes[1], signal.SIGKILL)
    training.join(60)
    assert not training.is_alive(), "the others would wait for ever"
    assert isinstance(training.error, StageFailed)
    assert "rank 1 of 2 of awpo.training.policy was killed by SIGKILL, likely out of memory" in str(training.error)
    assert not any(map(alive, processes.values()))
    first = told(cut)
    assert first.info.status == "FAILED"
    assert "rank 1 of 2" in first.data.tags["awpo.error"]
    assert artifacts(first) == {"logs/log.txt", "logs/log.rank-1.txt"}

    # One process can't go on with it, and the run of two is not forgotten by that.
    with pytest.raises(UserError, match="unfinished training by 2 processes, which 1 process cannot go on with"):
        train(cut, "cpu")

    # The flow is stopped.
    def flow() -> Any:
        nonlocal training
        with stops_its_tasks():
            before = max(steps_of(cut))
            training = Trained(lambda: train(cut))
            assert wait_until(lambda: max(steps_of(cut), default=0) > before, 300)
            processes.update(ranks_of(cut))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        flow()
    training.join(60)
    assert not training.is_alive()
    assert isinstance(training.error, InterruptedError)
    assert not any(map(alive, processes.values()))
    assert told(cut).info.status == "KILLED"

    # It goes on in the same run and ends as the other.
    with stops_its_tasks():
        train(cut)
    last = told(cut)
    assert last.info.run_id == first.info.run_id
    assert last.info.status == "FINISHED"
    assert steps_of(cut) == steps_of(whole) == list(range(1, STEPS + 1))
    history = tracking.client().get_metric_history(last.info.run_id, "loss")
    assert [metric.step for metric in history] == list(range(1, STEPS + 1))
    assert "goes on after step" in (cut / "events.jsonl").read_text()
    weights = [(out / "checkpoint" / "model.safetensors").read_bytes() for out in (whole, cut)]
    assert weights[0] == weights[1]


def test_a_preset_that_is_not_there_is_told_before_a_run_is_made(
    tiny_model: Path, few: Path, tracking: Tracking, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="did you mean 'cpu-2'"):
        train_policy.fn(str(tiny_model), "tiny", "base", few, tmp_path / "out", CONFIG, tracking, launch="cpu2")
    assert RunFile.read(tmp_path / "out") is None
