"""Heavy stages run in processes of their own: started, listened to, ended as a group.

A worker is a module run as `python -m MODULE JOB.json`. It tells of itself through `events.jsonl` in its run
folder (`awpo.events`); everything it prints goes to `log.txt` there. It ends when its parent ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from awpo.artifacts import write_atomically
from awpo.errors import UserError
from awpo.events import EVENTS, EventHandler, RunLog, Tail

JOB = "job.json"
LOG = "log.txt"
POLL_SECONDS = 0.3
# Prefect kills 30 s after it asked a run to end; a worker must be gone well before.
GRACE_SECONDS = 12.0


class StageFailed(RuntimeError):
    """A worker ended without a result; the message holds the last lines that it printed."""


def run_worker(
    module: str,
    job: dict[str, Any],
    folder: Path,
    *,
    on_event: EventHandler | None = None,
    threads: int = 1,
    cancelled: Callable[[], bool] | None = None,
) -> None:
    """Runs `module` on `job` and returns when it has succeeded.

    `folder` is the worker's run folder; `on_event` is called in this thread with each row of its events;
    `threads` is its number of OpenMP threads (two processes with two threads each on two cores are 10 to 50
    times slower than with one each); `cancelled` is asked at every poll.

    Raises UserError when the worker says that the person can mend it, StageFailed on any other bad end, and
    InterruptedError when cancelled. Whatever is raised, the worker's whole process group has ended by then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job_file, log_file, events_file = folder / JOB, folder / LOG, folder / EVENTS
    write_atomically(job_file, json.dumps(job, indent=2, default=str) + "\n")
    # Only what this attempt says is relayed; an earlier attempt's events stay in the file.
    tail = Tail(events_file, events_file.stat().st_size if events_file.exists() else 0)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that wait by spinning take the core that the others need: with anything else running on two cores, a
    # step of 0.3 s took 4.7 s.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    errors: list[dict[str, Any]] = []

    def listen() -> None:
        for row in tail:
            if row.get("event") == "error":
                errors.append(row)
            elif on_event:
                on_event(row)

    with open(log_file, "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(job_file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            listen()
            if cancelled and cancelled():
                raise InterruptedError(f"{module} was cancelled")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
        listen()
    finally:
        end_group(process)
    if errors and errors[-1].get("kind") == "user":
        raise UserError(errors[-1]["message"])
    if process.returncode != 0:
        last = "\n".join(last_lines(log_file, 15))
        raise StageFailed(f"{module} ended with code {process.returncode}; see {log_file}\n{last}")


def end_group(process: subprocess.Popen[Any]) -> None:
    """Ends a process started in a session of its own, and all its children: SIGTERM, then SIGKILL."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text file; none where it is missing."""
    if not path.exists():
        return []
    with open(path, encoding="utf-8", errors="replace") as file:
        return [line.rstrip() for line in deque(file, maxlen=count)]


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(os.getpgid(0), signal.SIGKILL)  # whoever it started goes too

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def worker_main(run: Callable[[dict[str, Any]], None]) -> None:
    """The main function of a worker module: reads the job, runs it, reports an error as an event.

    Exit code 0 on success, 2 where the person can mend what is wrong, 1 otherwise.
    """
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {sys.modules['__main__'].__spec__.name} JOB.json")  # type: ignore[union-attr]
    _end_with_parent()
    job_file = Path(sys.argv[1])
    job = json.loads(job_file.read_text("utf-8"))
    try:
        run(job)
    except UserError as error:
        RunLog(job_file.parent).event("error", kind="user", message=str(error))
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:  # noqa: BLE001 -- whatever ends a worker is told to its parent
        RunLog(job_file.parent).event("error", kind="crash", message=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        sys.exit(1)


def process_identity() -> str:
    """Host, process id and start of this process: enough to tell later whether it still lives."""
    return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"


def _started(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def is_gone(identity: str) -> bool:
    """Whether that process of this host has ended; False where it cannot be told."""
    host, _, rest = identity.partition(":")
    number, _, started = rest.partition(":")
    if host != socket.gethostname() or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return bool(started) and _started(int(number)) != started
