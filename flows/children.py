"""Commands that run beside this process, under guard, and end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from awpo.processes import ends_with_this, last_lines

START_SECONDS = 300.0
# The guard gives its command 15 s; a worker ends its runs within that.
STOP_SECONDS = 25.0


class ServerFailed(RuntimeError):
    """A server did not come up; the message holds the last lines of its log."""


class Child:
    """A command under guard, its output in a log file."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path, folder: Path) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.guard", *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**environment, **ends_with_this()},
                cwd=folder,
                start_new_session=True,
            )

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Returns when `ready` says so; raises ServerFailed where it ends or takes too long."""
        start = time.monotonic()
        while not ready():
            if self.process.poll() is not None or time.monotonic() - start > START_SECONDS:
                last = "\n".join(last_lines(self.log, 12))
                raise ServerFailed(f"{self.name} did not come up; see {self.log}\n{last}")
            time.sleep(0.5)

    def stop(self) -> None:
        """Ends the command and all it started."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
