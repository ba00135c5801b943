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

from awpo.config import PolicyConfig
from awpo.events import EVENTS, METRICS, Tail
from awpo.training.policy import train_policy
from tests.awpo.test_processes import wait_until


def start_machine(rank: int, port: int, folder: Path) -> subprocess.Popen[str]:
    """One of two machines, which leads the work or helps in it, by a process of its own."""
    program = LEAD if rank == 0 else HELP
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
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
folder, launch = Path(sys.argv[1]), read_launch("cpu")
with leading(launch.machines):
    for name in ("first", "second"):
        job = json.loads((folder / "job.json").read_text()) | {"out": str(folder / name), "launch": launch.effect()}
        run_worker("awpo.training.policy", job, folder / name, launch=launch)
        print(name, "is done", flush=True)
"""
HELP = """
from awpo.launch import read_launch
from awpo.machine_help import help_machine_0
help_machine_0(read_launch("cpu"), 1, lambda text: print(text, flush=True))
"""
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
def test_two_machines_share_two_trainings(folder: Path, tiny_model: Path, instances: Path) -> None:
    """Each has one of the two processes; the second follows the first from one work to the next."""
    port = two_free_ports()
    machines = [start_machine(rank, port, folder) for rank in (1, 0)]
    told = [machine.communicate(timeout=300)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], told
    assert told[1].splitlines()[-2:] == ["first is done", "second is done"]
    assert told[0].startswith("machine 1 of 2 waits for work of machine 0 at 127.0.0.1\n")
    train_policy(str(tiny_model), instances, folder / "alone", CONFIG)
    alone, *shared = (
        [row["metrics"] for row in Tail(folder / name / METRICS)] for name in ("alone", "first", "second")
    )
    for found in shared:
        assert [row["gradient_norm"] for row in found] == pytest.approx(
            [row["gradient_norm"] for row in alone], rel=1e-5
        )
    assert sorted(row["rank"] for row in Tail(folder / "first" / EVENTS) if row["event"] == "memory") == [0, 1]


@pytest.mark.slow
def test_a_machine_that_is_lost_ends_the_work_of_the_other(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    job["config"]["steps"] = 100_000
    (folder / "job.json").write_text(json.dumps(job))
    port = two_free_ports()
    other, first = (start_machine(rank, port, folder) for rank in (1, 0))
    try:
        assert wait_until(lambda: (folder / "first" / METRICS).exists(), 120)
        other.kill()
        told, _ = first.communicate(timeout=120)
    finally:
        other.kill(), first.kill(), other.communicate()
    assert first.returncode == 1
    assert "StageFailed" in told
    assert wait_until(lambda: not any(str(folder / "first" / "job.json") in command for command in commands()))


def commands() -> Iterator[str]:
    """The command lines of all processes."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield file.read_bytes().decode(errors="replace")
