"""Two machines share trainings: two launchers on this host, each with one process, that meet at a port."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from awpo.config_training import PolicyConfig
from awpo.events import EVENTS, METRICS, Tail
from awpo.machines import Board
from awpo.training.policy import train_policy
from tests.awpo.test_processes import wait_until


def start_machine(rank: int, port: int, folder: Path, launch: str = "cpu", *works: str) -> subprocess.Popen[str]:
    """One of two machines, which leads the work or helps in it, by a process of its own."""
    program = LEAD if rank == 0 else HELP
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder), launch, *(works or STEPS)],
        env={
            **os.environ,
            "AWPO_MACHINES": "2",
            "AWPO_MACHINE_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


LEAD = """
import json, sys
from pathlib import Path
from awpo.launch import read_launch
from awpo.machines import leading
from awpo.processes import run_worker
folder, launch = Path(sys.argv[1]), read_launch(sys.argv[2])
with leading(launch.machines):
    for name in sys.argv[3:]:
        job = json.loads((folder / "job.json").read_text()) | {"out": str(folder / name), "launch": launch.effect()}
        job["config"]["steps"] = {"short": 2, "endless": 100000}[name]
        run_worker("awpo.training.policy", job, folder / name, launch=launch)
        print(name, "is done", flush=True)
"""
HELP = """
import sys
from awpo.launch import read_launch
from awpo.machine_help import help_machine_0
help_machine_0(read_launch(sys.argv[2]), 1, lambda text: print(text, flush=True))
"""
STEPS = ("short", "endless")
CONFIG = PolicyConfig(
    steps=2,
    prompts_per_rollout=4,
    group_size=4,
    steps_per_rollout=1,
    micro_batch_size=4,
    learning_rate=1e-3,
    max_completion_length=8,
    save_every=1,
)


def two_free_ports() -> int:
    """A port that is free, as is the one after it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("", port + 1))
                return port


@pytest.fixture
def folder(tiny_model: Path, instances: Path, tmp_path: Path) -> Path:
    job = {"model": str(tiny_model), "instances": str(instances), "config": CONFIG.model_dump(mode="json")}
    (tmp_path / "job.json").write_text(json.dumps(job))
    return tmp_path


@pytest.mark.slow
def test_two_machines_share_trainings_until_one_is_lost(folder: Path, tiny_model: Path, instances: Path) -> None:
    """Each has one of the two processes; the second follows the first from one work to the next, and is killed there."""
    port = two_free_ports()
    other, first = (start_machine(rank, port, folder) for rank in (1, 0))
    try:
        assert wait_until(lambda: (folder / "endless" / METRICS).exists() or first.poll() is not None, 300)
        other.kill()
        told, _ = first.communicate(timeout=120)
    finally:
        other.kill()
        first.kill()
        helped, _ = other.communicate()
    assert first.returncode == 1
    assert told.startswith("short is done\n")
    assert "StageFailed" in told
    assert helped.startswith("machine 1 of 2 waits for work of machine 0 at 127.0.0.1\n")
    assert wait_until(lambda: not any(str(folder / "endless" / "job.json") in command for command in commands()))
    train_policy(str(tiny_model), instances, folder / "alone", CONFIG)
    alone, shared = ([row["metrics"] for row in Tail(folder / name / METRICS)] for name in ("alone", "short"))
    assert [row["gradient_norm"] for row in shared] == pytest.approx([row["gradient_norm"] for row in alone], rel=1e-5)
    assert sorted(row["rank"] for row in Tail(folder / "short" / EVENTS) if row["event"] == "memory") == [0, 1]


@pytest.mark.study
@pytest.mark.parametrize("config", ["zero3", "fsdp2"])
def test_two_machines_share_weights_in_shards(config: str, folder: Path, tiny_model: Path, instances: Path) -> None:
    """By accelerate's launcher."""
    if config == "zero3":
        pytest.importorskip("deepspeed", reason="no DeepSpeed; make install-deepspeed")
    launch, port = folder / "launch.yaml", two_free_ports()
    launch.write_text(f"processes: 1\naccelerate: {config}\ndevice: cpu\n")
    machines = [start_machine(rank, port, folder, str(launch), "short") for rank in (1, 0)]
    told = [machine.communicate(timeout=300)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], told
    train_policy(str(tiny_model), instances, folder / "alone", CONFIG)
    alone, shared = ([row["metrics"] for row in Tail(folder / name / METRICS)] for name in ("alone", "short"))
    assert [row["gradient_norm"] for row in shared] == pytest.approx([row["gradient_norm"] for row in alone], rel=1e-5)
    one, two = (load_file(folder / name / "checkpoint" / "model.safetensors") for name in ("alone", "short"))
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


@pytest.mark.slow
def test_the_others_end_with_the_first_machine(folder: Path) -> None:
    port = two_free_ports()
    other = start_machine(1, port, folder)
    board = Board(2, port + 1)
    assert other.stdout is not None
    assert other.stdout.readline().startswith("machine 1 of 2 waits")
    board.close()
    assert other.wait(timeout=60) == 0


def commands() -> Iterator[str]:
    """The command lines of all processes."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield file.read_bytes().decode(errors="replace")
