import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from awpo.errors import UserError
from awpo.processes import StageFailed, is_gone, process_identity, run_worker

WORKER = """
import os, subprocess, sys, time
from pathlib import Path
from awpo.errors import UserError
from awpo.events import RunLog
from awpo.processes import worker_main

def run(job):
    folder = Path(job["folder"])
    log = RunLog(folder)
    print("hello from the worker", os.environ["OMP_NUM_THREADS"])
    for i in range(3):
        log.progress(i + 1, 3, "steps")
    match job["end"]:
        case "user": raise UserError("the file is missing; give another")
        case "crash": raise RuntimeError("boom")
        case "sleep":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            (folder / "pids").write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)

worker_main(run)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "example_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return "example_worker"


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, seconds: float = 60.0) -> bool:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_events_are_relayed_and_output_is_kept(worker: str, tmp_path: Path) -> None:
    events: list[dict] = []
    run_worker(worker, {"folder": str(tmp_path), "end": "well"}, tmp_path, on_event=events.append, threads=1)
    assert [row["done"] for row in events if row["event"] == "progress"] == [1, 2, 3]
    [memory] = [row for row in events if row["event"] == "memory"]
    assert memory["rank"] == 0
    assert memory["bytes"] > 5_000_000, "an interpreter has more than that"
    assert "hello from the worker 1" in (tmp_path / "log.txt").read_text()


def test_a_second_run_does_not_relay_the_events_of_the_first(worker: str, tmp_path: Path) -> None:
    for _ in range(2):
        events: list[dict] = []
        lines: list[str] = []
        job = {"folder": str(tmp_path), "end": "well"}
        run_worker(worker, job, tmp_path, on_event=events.append, on_output=lines.extend)
    assert [row["event"] for row in events] == ["progress"] * 3 + ["memory"]
    assert lines == ["hello from the worker 1"]


def test_what_a_person_can_mend_arrives_as_such(worker: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^the file is missing; give another$"):
        run_worker(worker, {"folder": str(tmp_path), "end": "user"}, tmp_path)


def test_a_crash_shows_the_last_lines(worker: str, tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="RuntimeError: boom"):
        run_worker(worker, {"folder": str(tmp_path), "end": "crash"}, tmp_path)


def test_cancelling_ends_the_whole_group(worker: str, tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        run_worker(
            worker, {"folder": str(tmp_path), "end": "sleep"}, tmp_path, cancelled=lambda: (tmp_path / "pids").exists()
        )
    for pid in (tmp_path / "pids").read_text().split():
        assert wait_until(lambda pid=pid: not alive(int(pid)))


def test_a_worker_dies_with_its_parent(worker: str, tmp_path: Path) -> None:
    parent = textwrap.dedent(f"""
        from pathlib import Path
        from awpo.processes import run_worker
        folder = Path({str(tmp_path)!r})
        run_worker({worker!r}, {{"folder": str(folder), "end": "sleep"}}, folder)
    """)
    process = subprocess.Popen([sys.executable, "-c", parent])
    assert wait_until((tmp_path / "pids").exists)
    assert wait_until(lambda: len((tmp_path / "pids").read_text().split()) == 2)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(alive(pid) for pid in pids)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


def test_a_worker_whose_parent_dies_before_it_has_begun_ends_too(worker: str, tmp_path: Path) -> None:
    """The worker's interpreter takes a moment to start, and finds another parent then."""
    parent = textwrap.dedent(f"""
        import os, signal, subprocess
        from pathlib import Path
        from awpo.processes import run_worker

        class Last(subprocess.Popen):
            def __init__(self, *given, **named):
                super().__init__(*given, **named)
                (folder / "started").write_text(str(self.pid))
                os.kill(os.getpid(), signal.SIGKILL)

        folder, subprocess.Popen = Path({str(tmp_path)!r}), Last
        run_worker({worker!r}, {{"folder": str(folder), "end": "sleep"}}, folder)
    """)
    assert subprocess.run([sys.executable, "-c", parent], check=False).returncode == -signal.SIGKILL
    started = int((tmp_path / "started").read_text())
    try:
        assert wait_until(lambda: not alive(started))
    finally:
        if alive(started):
            os.killpg(started, signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux tells of a process's end")
def test_the_end_of_a_parent_is_told_and_not_looked_for(tmp_path: Path) -> None:
    """Looking would take an hour here."""
    child = (
        "import time; from pathlib import Path; from awpo import processes\n"
        "processes.POLL_SECONDS = 3600\n"
        "processes.end_with_parent()\n"
        f"Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(600)\n"
    )
    code = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
    parent = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(p.pid, flush=True); p.wait()", child], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert wait_until((tmp_path / "ready").exists)
    parent.kill()
    parent.wait()
    try:
        assert wait_until(lambda: not alive(pid))
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_process_is_gone_when_it_has_ended_and_not_before() -> None:
    script = "from awpo.processes import process_identity; print(process_identity())"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert is_gone(ended)
    assert not is_gone(process_identity())
    host, number, started = process_identity().split(":")
    assert is_gone(f"{host}:{number}:{int(started) - 1}")  # another one had this number before
    assert not any(map(is_gone, ("nonsense", f"another-{host}:{number}:1")))


def test_what_cannot_be_printed_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """Python ends with 120 where a stream's last lines do not fit on the disk."""
    (tmp_path / "job.json").write_text("{}")
    code = """
        from awpo.errors import UserError
        from awpo.processes import worker_main

        def run(job):
            print("on the way")
            raise UserError("mend it")

        worker_main(run)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "job.json")]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=full, env=buffered, check=False)
    assert done.returncode == 2
