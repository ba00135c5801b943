"""The job for Slurm, run by stand-ins for srun and scontrol that start the tasks as Slurm does, on one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "infra" / "slurm" / "train.sbatch"
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 90
shift
tasks=()
for ((number = 0; number < SLURM_JOB_NUM_NODES; number++)); do
    SLURM_NODEID=$number SLURM_PROCID=$number "$@" &
    tasks+=($!)
done
status=0
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit $status
"""
# A list longer than a pipe's buffer: who reads only its first line ends the writer by a signal.
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames node[007-008]" ] || exit 91
echo node007
for ((number = 8; number < 20000; number++)); do echo "node$number"; done
"""
AWPO = f"""#!{sys.executable}
import json, os, sys
names = ("AWPO_MACHINES", "AWPO_MACHINE_RANK", "MASTER_ADDR", "MASTER_PORT")
told = {{"arguments": sys.argv[1:], **{{name: os.environ[name] for name in names}}}}
with open(os.path.join(os.environ["TOLD"], os.environ["AWPO_MACHINE_RANK"]), "w") as file:
    json.dump(told, file)
sys.exit(3 if sys.argv[-1] == "fails" and os.environ["AWPO_MACHINE_RANK"] == "1" else 0)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("awpo", AWPO)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "AWPO": str(tmp_path / "awpo"),
        "TOLD": str(tmp_path),
        "SLURM_JOB_ID": "54321",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[007-008]",
    }


def submit(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_each_node_is_told_its_number_and_the_first_nodes_address(environment: dict[str, str], tmp_path: Path) -> None:
    given = ["--preset", "quick", "--launch", "zero3-8", "--out", "runs/two words"]
    done = submit(environment, *given)
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / str(number)).read_text()) for number in (0, 1)]
    assert [one["AWPO_MACHINE_RANK"] for one in told] == ["0", "1"]
    for one in told:
        assert one["arguments"] == ["train", *given]
        assert one["AWPO_MACHINES"] == "2"
        assert one["MASTER_ADDR"] == "node007"
        assert 1024 < int(one["MASTER_PORT"]) < 65536


def test_a_node_that_fails_fails_the_job(environment: dict[str, str]) -> None:
    assert submit(environment, "--out", "fails").returncode == 3


def test_a_job_without_arguments_or_without_slurm_says_so(environment: dict[str, str]) -> None:
    done = submit(environment)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "give the arguments of awpo train" in done.stderr
    del environment["SLURM_JOB_ID"]
    done = submit(environment, "--out", "x")
    assert done.returncode == 2
    assert "start it by sbatch" in done.stderr
