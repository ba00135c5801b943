"""Runs a command and ends it, with all it started, when whoever asked for it is gone: `python -m flows.guard COMMAND...`.

A server that outlives a killed `awpo serve` would hold its port and the database. The guard leads a process group of
its own (its parent starts it in a new session), watches its parent, and passes SIGTERM on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import FrameType

from awpo.processes import given_parent, wait_for_end_of

POLL_SECONDS = 0.3
GRACE_SECONDS = 15.0


def guard(command: list[str]) -> int:
    """Runs `command` until it ends, the parent is gone or SIGTERM arrives; returns its exit code."""
    parent = given_parent()
    stop = False

    def ask_to_stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    wait_for_end_of(parent, unless=lambda: stop or child.poll() is not None)
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    return child.returncode


def main() -> None:
    """Ends the whole group afterwards: what the command started and left behind goes too."""
    code = guard(sys.argv[1:])
    if os.getpgid(0) == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        time.sleep(POLL_SECONDS)
    sys.exit(max(code, 0))


if __name__ == "__main__":
    main()
