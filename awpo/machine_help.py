"""What a machine does that helps machine 0 (`awpo.machines`): it starts its processes of each work, until there is none.

The folder of results must be the same on all machines, by whatever file system they share.
"""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from awpo.errors import UserError
from awpo.launch import LaunchSettings
from awpo.machines import meeting_point
from awpo.processes import POLL_SECONDS, StageFailed, children_of, end_group, ends_with_this
from awpo.serving.vllm import launch_for

# How long machine 0 may take to begin: it may prepare data first, but the board is there before that.
PATIENCE_SECONDS = 600.0
MODULES = "awpo.training."


def help_machine_0(launch: LaunchSettings, threads: int, say: Callable[[str], None]) -> None:
    """Takes part in the work of machine 0 until that ends, each with `threads` threads for each process.

    Raises UserError where machine 0 isn't found, StageFailed where it is gone before its work has ended.
    """
    here = meeting_point(launch.machines)
    connection = _connected(here.address, here.port + 1)
    messages: Queue[dict[str, Any]] = Queue()
    threading.Thread(target=_read, args=(connection, messages), name="machine-0", daemon=True).start()
    with connection:
        _send(connection, {"rank": here.rank})
        say(f"machine {here.rank} of {launch.machines} waits for work of machine 0 at {here.address}")
        while True:
            message = messages.get()
            if "end" in message:
                return
            if "gone" in message:
                raise StageFailed(f"machine 0 ({here.address}) is gone before its work has ended")
            if "module" in message:
                say(f"{message['module']}: {message['job']}")
                code = _work(launch, message, here.rank, threads, messages)
                _send(connection, {"number": message["number"], "code": code})


def _work(
    launch: LaunchSettings, work: dict[str, Any], rank: int, threads: int, messages: Queue[dict[str, Any]]
) -> int:
    """Runs this machine's processes; returns how they ended. What machine 0 says meanwhile ends them."""
    if not work["module"].startswith(MODULES):
        raise UserError(f"machine 0 asks for {work['module']}, which is no training; start the same version on all")
    job_file = Path(work["job"])
    if not job_file.exists():
        raise UserError(f"{job_file} is not here; the folder of results must be one that all machines share")
    config = json.loads(job_file.read_text("utf-8")).get("config", {})
    launch = launch_for(config.get("rollouts", {}).get("engine", "trainer"), launch)
    with open(job_file.parent / f"log.machine-{rank}.txt", "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            launch.command(work["module"], job_file),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**launch.environment(threads), **ends_with_this()},
            start_new_session=True,
        )
    children: set[str] = set()
    try:
        while process.poll() is None:
            children |= children_of(process.pid)
            try:
                message = messages.get(timeout=POLL_SECONDS)
            except Empty:
                continue
            if "stop" not in message:  # the end, or that machine 0 is gone: to be read again
                messages.put(message)
            break
    finally:
        end_group(process, children)
    return process.returncode


def _connected(address: str, port: int) -> socket.socket:
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection((address, port), timeout=POLL_SECONDS * 10)
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"machine 0 does not answer at {address}, port {port} ({error}); is it started, and is MASTER_ADDR its name?"
                ) from None
            time.sleep(POLL_SECONDS)


def _read(connection: socket.socket, messages: Queue[dict[str, Any]]) -> None:
    try:
        connection.settimeout(None)
        with connection.makefile() as lines:
            for line in lines:
                messages.put(json.loads(line))
    except (OSError, ValueError):
        pass
    messages.put({"gone": True})


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")
