"""Heavy stages run in processes of their own: started, listened to, ended as a group.

A worker is a module run on `JOB.json` (`awpo.worker`), in one process or in several that do the work together
(`awpo.launch`, `awpo.ranks`). It tells of itself through `events.jsonl` in its run folder (`awpo.events`); everything
it prints goes to `log.txt` there, of a second process to `log.rank-1.txt`, and so on. It ends when its parent ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from awpo import full_disk
from awpo.errors import UserError
from awpo.events import EVENTS, EventHandler, LineTail, RunLog, Tail
from awpo.failures import died_of, first_to_fail
from awpo.files import write_atomically
from awpo.launch import LaunchSettings
from awpo.machines import board

JOB = "job.json"
LOG = "log.txt"
PARENT = "AWPO_PARENT"
"""Variable with the number of the process that a worker ends with; by default, of the one that started it."""
POLL_SECONDS = 0.3
# Prefect kills 30 s after it asked a run to end; a worker must be gone well before.
GRACE_SECONDS = 12.0
KILLED_SECONDS = 5.0


class StageFailed(RuntimeError):
    """A worker ended without a result; the message holds the last lines that it printed."""


def run_worker(
    module: str,
    job: dict[str, Any],
    folder: Path,
    *,
    on_event: EventHandler | None = None,
    on_output: Callable[[list[str]], None] | None = None,
    threads: int = 1,
    launch: LaunchSettings | None = None,
    environment: Mapping[str, str] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> None:
    """Runs `module` on `job` and returns when it has succeeded.

    `folder` is the worker's run folder; `on_event` is called in this thread with each row of its events, `on_output`
    with the lines that its first process has printed since; `launch` says in how many processes it works (one by
    default), `threads` is the number of OpenMP threads of each (two processes with two threads each on two cores are
    10 to 50 times slower than with one each); `environment` is added to theirs; `cancelled` is asked at every poll.

    Raises UserError when the worker says that the person can mend it, StageFailed on any other bad end, and
    InterruptedError when cancelled. Whatever is raised, all processes of the worker have ended by then.
    """
    launch = launch or LaunchSettings()
    folder.mkdir(parents=True, exist_ok=True)
    job_file, log_file, events_file = folder / JOB, folder / LOG, folder / EVENTS
    write_atomically(job_file, json.dumps(job, indent=2, default=str) + "\n")
    # Only what this attempt says is relayed; what an earlier attempt said stays in the files.
    tail = Tail(events_file, events_file.stat().st_size if events_file.exists() else 0)
    lines = LineTail(log_file)
    errors: list[dict[str, Any]] = []
    codes: dict[int, int] = {}

    def listen() -> None:
        for row in tail:
            match row.get("event"):
                case "error":
                    errors.append(row)
                case "ranks":
                    codes.update({int(rank): code for rank, code in row["codes"].items()})
                case _ if on_event:
                    on_event(row)
        if on_output and (printed := lines.read()):
            on_output(printed)

    with open(log_file, "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            launch.command(module, job_file),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**launch.environment(threads), **(environment or {}), **ends_with_this()},
            start_new_session=True,
        )
    children: set[str] = set()
    others = board() if launch.machines > 1 else None
    try:
        if others:
            others.start(module, job_file)
        while process.poll() is None:
            children |= children_of(process.pid)
            listen()
            if cancelled and cancelled():
                raise InterruptedError(f"{module} was cancelled")
            if others and (problem := others.problem()):
                raise StageFailed(f"{problem}, and the others were ended; see its log in {folder}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
        listen()
    finally:
        end_group(process, children)
        if others:
            others.stop(GRACE_SECONDS if process.returncode == 0 else 0)
    if process.returncode != 0:
        raise _failure(module, process.returncode, codes, errors, folder, launch.total)


def _failure(
    module: str, code: int, codes: dict[int, int], errors: list[dict[str, Any]], folder: Path, processes: int
) -> Exception:
    """Why a worker ended with `code`: of several processes, what became of the first to fail (`awpo.failures`)."""
    if user := next((error for error in errors if error.get("kind") == "user"), None):
        return UserError(user["message"])
    if full_disk.EXIT_CODE in (code, *codes.values()):
        return full_disk.error_of(folder)
    first = first_to_fail(codes, errors) if processes > 1 else 0
    who, others = module, ""
    if processes > 1:
        who = f"the launcher of {module}" if first is None else f"rank {first} of {processes} of {module}"
        others = "" if first is None else ", and the others were ended"
        code = code if first is None else codes.get(first, code)
    log = folder / log_of_rank(first or 0)
    lines = last_lines(log, 15)
    told = next((error["message"] for error in errors if error.get("rank", 0) == (first or 0)), "")
    if told and told not in lines[-1:]:  # behind it stands what the launcher says
        lines.append(told)
    return StageFailed("\n".join([f"{who} {died_of(code) or f'ended with code {code}'}{others}; see {log}", *lines]))


def end_group(process: subprocess.Popen[Any], children: Iterable[str] = ()) -> None:
    """Ends a process started in a session of its own, and all its children: SIGTERM, then SIGKILL.

    `children` are identities (`process_identity`) of those that have sessions of their own.
    """
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    groups = {int(child.split(":")[1]) for child in children if not _is_another(child)}
    for group in groups:  # of a child that has ended, its own children may be there still
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    end = time.monotonic() + KILLED_SECONDS
    while _any_alive({process.pid, *groups}) and time.monotonic() < end:
        time.sleep(0.05)


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text file; none where it is missing."""
    if not path.exists():
        return []
    with open(path, encoding="utf-8", errors="replace") as file:
        return [line.rstrip() for line in deque(file, maxlen=count)]


def ends_with_this() -> dict[str, str]:
    """The variable by which a process that this one starts knows whom it ends with, also if this one dies at once."""
    return {PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Lets this process and its group be killed when its parent ends: who started it, or who `PARENT` names."""
    parent = given_parent()

    def watch() -> None:
        wait_for_end_of(parent)
        os.killpg(os.getpgid(0), signal.SIGKILL)  # whoever it started goes too

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def given_parent() -> int:
    """The process that this one ends with: whom `PARENT` names, which is taken out of the environment, or its parent."""
    return int(os.environ.pop(PARENT, os.getppid()))


def wait_for_end_of(parent: int, unless: Callable[[], bool] = lambda: False) -> None:
    """Returns when this process is not, or no longer, a child of `parent`, or when `unless` says so.

    Linux tells of a process's end at once: of a launcher and its ranks, each of which waits for the one before, the
    last would else know seconds later. Elsewhere, and for `unless`, it looks again and again.
    """
    poller = select.poll()
    descriptor = -1
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.pidfd_open(parent)
        poller.register(descriptor, select.POLLIN)
    try:
        while os.getppid() == parent and not unless():
            poller.poll(POLL_SECONDS * 1000)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def rank() -> int:
    """The number of this process among those that share a piece of work; 0 where it is alone."""
    return int(os.environ.get("RANK", "0"))


def log_of_rank(number: int) -> str:
    """The name of the file in the run folder that a process prints into."""
    return LOG if number == 0 else f"log.rank-{number}.txt"


def worker_main(run: Callable[[dict[str, Any]], None]) -> None:
    """The main function of a worker module: reads the job, runs it, reports an error as an event.

    Exit code 0 on success, 2 where the person can mend what is wrong, 28 where the disk is too full to say so, 1 otherwise. Of several processes the first
    tells of the work; the others only of their end.
    """
    if len(sys.argv) != 2:
        sys.exit("usage: python -m awpo.worker MODULE JOB.json")
    job_file = Path(sys.argv[1])
    job = json.loads(job_file.read_text("utf-8"))
    log = RunLog(job_file.parent)
    try:
        run(job)
    except UserError as error:
        _tell_and_leave(log, "user", str(error), f"error: {error}", 2)
    except Exception as error:  # noqa: BLE001 -- whatever ends a worker is told to its parent
        _tell_and_leave(log, "crash", f"{type(error).__name__}: {error}", traceback.format_exc(), 1)
    log.event("memory", rank=rank(), **peak_memory())


def _tell_and_leave(log: RunLog, kind: str, message: str, printed: str, code: int) -> NoReturn:
    """Ends this process with `code`, or with that of a full disk where there is no room left to say why."""
    try:
        log.event("error", kind=kind, rank=rank(), message=message)
    except OSError as error:
        code = full_disk.EXIT_CODE if full_disk.full_disk(error, log.folder) else code
    with contextlib.suppress(OSError):
        print(printed, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # what does not fit would be tried again at the exit, which then has another code
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
    sys.exit(code)


def peak_memory() -> dict[str, int]:
    """The most memory that this process has had: resident `bytes`, and `gpu_bytes` of tensors where it has a GPU."""
    found = {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)}
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available() and torch.cuda.is_initialized():
        found["gpu_bytes"] = int(torch.cuda.max_memory_allocated())
    return found


def process_identity() -> str:
    """Host, process id and start of this process: enough to tell later whether it still lives."""
    return _identity(os.getpid())


def children_of(process: int) -> set[str]:
    """The identities of a process's children, as `process_identity`; none where the system does not tell."""
    found: set[str] = set()
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= {_identity(int(number)) for number in file.read_text("utf-8").split()}
    return found


def _is_another(identity: str) -> bool:
    """Whether the number of that process of this host belongs to another one now."""
    _, number, started = identity.split(":")
    return _started(int(number)) not in ("", started)


def _any_alive(groups: set[int]) -> bool:
    """Whether a process of these groups still works, as far as the system tells."""
    numbers = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return any(stat[0] != "Z" and int(stat[2]) in groups for number in numbers if len(stat := _stat(number)) > 2)


def _identity(process: int) -> str:
    return f"{socket.gethostname()}:{process}:{_started(process)}"


def _started(process: int) -> str:
    return next(iter(_stat(process)[19:]), "")


def _stat(process: int) -> list[str]:
    """State, parent, ..., as /proc tells them; empty where it does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return []


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
    return bool(started) and (_started(int(number)) != started or _stat(int(number))[:1] == ["Z"])
