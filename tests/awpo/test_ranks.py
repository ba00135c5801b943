"""Several processes as one worker, through torchrun: their events, logs, errors and ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from awpo.errors import UserError
from awpo.launch import LaunchSettings, read_launch
from awpo.processes import StageFailed, run_worker
from tests.awpo.test_processes import alive, wait_until

TWO = LaunchSettings(processes=2)
WORKER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from awpo.errors import UserError
from awpo.events import RunLog
from awpo.processes import rank, worker_main


def others(folder):
    while len(list(folder.glob("pid-*"))) < int(os.environ.get("WORLD_SIZE", 1)):
        time.sleep(0.05)


def run(job):
    folder, me = Path(job["folder"]), rank()
    print(f"rank {me} of {os.environ.get('WORLD_SIZE', 1)} at {os.environ['OMP_NUM_THREADS']} threads", flush=True)
    if me == 0:
        RunLog(folder).progress(1, 1, "steps")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / f"pid-{me}").write_text(f"{os.getpid()} {child.pid}")
    others(folder)
    end = job["end"]
    if end == "well":
        child.kill()
        child.wait()
        return
    if me == 1 and end == "user":
        raise UserError("the file is missing; give another")
    if me == 1 and end == "crash":
        raise RuntimeError("boom")
    if me == 1 and end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "lone":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / f"deaf-{me}").touch()
    time.sleep(600)


worker_main(run)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "example_ranks.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return "example_ranks"


def pids(folder: Path) -> list[int]:
    return [int(pid) for file in sorted(folder.glob("pid-*")) for pid in file.read_text().split()]


def all_gone(folder: Path) -> bool:
    return len(pids(folder)) == 4 and not any(alive(pid) for pid in pids(folder))


def test_two_processes_do_one_work(worker: str, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    job = {"folder": str(tmp_path), "end": "well"}
    run_worker(worker, job, tmp_path, on_event=events.append, threads=3, launch=TWO)
    assert [row["event"] for row in events].count("progress") == 1
    assert sorted(row["rank"] for row in events if row["event"] == "memory") == [0, 1]
    first, second = (tmp_path / name for name in ("log.txt", "log.rank-1.txt"))
    assert "rank 0 of 2 at 3 threads" in first.read_text()
    assert "rank 1" not in first.read_text()
    assert second.read_text() == "rank 1 of 2 at 3 threads\n"


def test_what_a_person_can_mend_arrives_from_any_process(worker: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^the file is missing; give another$"):
        run_worker(worker, {"folder": str(tmp_path), "end": "user"}, tmp_path, launch=TWO)
    assert all_gone(tmp_path)


@pytest.mark.parametrize(
    ("end", "first", "last"),
    [
        ("crash", r"^rank 1 of 2 of example_ranks ended with code 1, and the others were ended; see .*log\.rank-1\.txt$", "RuntimeError: boom"),
        ("killed", r"^rank 1 of 2 of example_ranks was killed by SIGKILL, likely out of memory, and the others", "rank 1 of 2"),
    ],
)  # fmt: skip
def test_the_end_of_one_is_told_and_ends_the_others(
    worker: str, tmp_path: Path, end: str, first: str, last: str
) -> None:
    with pytest.raises(StageFailed) as caught:
        run_worker(worker, {"folder": str(tmp_path), "end": end}, tmp_path, launch=TWO)
    lines = str(caught.value).splitlines()
    assert re.match(first, lines[0])
    assert lines[-1].startswith(last)
    assert all_gone(tmp_path)


def test_accelerate_starts_the_worker_and_its_end_is_told(worker: str, tmp_path: Path) -> None:
    """With the one process that it starts on a CPU; a preset with GPUs differs in its config alone."""
    launch = LaunchSettings(accelerate="cpu")
    run_worker(worker, {"folder": str(tmp_path), "end": "well"}, tmp_path, launch=launch)
    assert "rank 0 of 1 at 1 threads" in (tmp_path / "log.txt").read_text()
    with pytest.raises(StageFailed, match=r"^example_ranks was killed by SIGKILL, likely out of memory; see "):
        run_worker(worker, {"folder": str(tmp_path), "end": "lone"}, tmp_path, launch=launch)
    assert not any(alive(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize("machines", [1, 2])
def test_missing_gpus_are_told_before_a_process_is_started(
    worker: str, machines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWPO_MACHINES", str(machines))
    monkeypatch.setenv("AWPO_MACHINE_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"^the launch preset takes 8 GPUs of a machine, and this one has 0; choose a"):
        run_worker(worker, {"folder": str(tmp_path), "end": "well"}, tmp_path, launch=read_launch("zero3-8"))
    assert pids(tmp_path) == []


@pytest.mark.slow
def test_cancelling_ends_even_processes_that_do_not_listen(worker: str, tmp_path: Path) -> None:
    def cancelled() -> bool:
        return len(list(tmp_path.glob("deaf-*"))) == 2

    with pytest.raises(InterruptedError):
        run_worker(worker, {"folder": str(tmp_path), "end": "deaf"}, tmp_path, launch=TWO, cancelled=cancelled)
    assert all_gone(tmp_path)


@pytest.mark.parametrize("whose", ["parent", "launcher"])
def test_all_die_with_the_parent_or_the_launcher(worker: str, tmp_path: Path, whose: str) -> None:
    parent = textwrap.dedent(f"""
        from pathlib import Path
        from awpo.launch import LaunchSettings
        from awpo.processes import run_worker
        folder = Path({str(tmp_path)!r})
        run_worker({worker!r}, {{"folder": str(folder), "end": "sleep"}}, folder, launch=LaunchSettings(processes=2))
    """)
    process = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: len(pids(tmp_path)) == 4)
    launcher = int(Path(f"/proc/{pids(tmp_path)[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(process.pid if whose == "parent" else launcher, signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert wait_until(lambda: all_gone(tmp_path) and not alive(launcher))
    if whose == "launcher":
        assert "the launcher of example_ranks was killed by SIGKILL, likely out of memory; see" in told


def test_a_parent_that_dies_before_the_worker_runs_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch takes seconds: whoever died meanwhile is known by number."""
    (tmp_path / "slow_worker.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "awpo.worker", "slow_worker", str(tmp_path / "job.json")],
        env={**os.environ, "AWPO_PARENT": ended.stdout.decode().strip()},
        start_new_session=True,
    )
    start = time.monotonic()
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert time.monotonic() - start < 60
