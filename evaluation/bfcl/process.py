"""The official checker's process, from the outside: started without our environment, asked with a time limit."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from awpo.errors import UserError
from evaluation.bfcl.data import INSTALL, BfclItem

# The slowest reference answer takes milliseconds; starting imports the package.
ITEM_SECONDS = 10.0
START_SECONDS = 60.0
LONGEST_ANSWER = 1 << 16
_PIPE_PIECE = select.PIPE_BUF  # what a pipe that can be written to takes without blocking
# What of our environment the process sees; no key or token is among it.
PASSED = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
# Its answer is known: asked at the start, it tells whether the package could be imported.
_READY: dict[str, Any] = {"category": "irrelevance", "functions": [], "answer": None, "calls": []}


class CheckerProcess:
    """Asks the official checker about items; restarts it when an item kills it or takes too long.

    Use as a context manager. `failures` counts the items on which the checker gave no verdict of its own (it
    raised, died or ran out of time): these are not valid, and their `error_type` begins with "checker:".
    """

    def __init__(self, item_seconds: float = ITEM_SECONDS) -> None:
        self.item_seconds = item_seconds
        self.failures = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="bfcl-")
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._folder.cleanup()

    def check(self, item: BfclItem, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """The verdict {"valid", "error_type", "error"} on `calls`, the model's [{name: {argument: value}}].

        Raises UserError where the checker cannot be started at all.
        """
        if self._process is None:
            self._start()
        job = {"category": item.category, "functions": item.functions, "answer": item.answer, "calls": calls}
        verdict = self._ask(job, self.item_seconds)
        if isinstance(verdict, str):
            self._stop()
            verdict = {"valid": False, "error_type": f"checker:{verdict}", "error": ""}
        self.failures += verdict["error_type"].startswith("checker:")
        return verdict

    def _start(self) -> None:
        home = self._folder.name
        environment = {name: os.environ[name] for name in PASSED if name in os.environ}
        environment |= {
            "HOME": home,
            "TMPDIR": home,
            "BFCL_PROJECT_ROOT": home,  # the package makes folders there when imported
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        }
        log = Path(home, "log.txt")
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "evaluation.bfcl.checker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                cwd=home,
                env=environment,
            )
        ready = self._ask(_READY, START_SECONDS)
        if isinstance(ready, str) or not ready.get("valid"):
            self._stop()
            lines = log.read_text("utf-8", "replace").strip().splitlines()
            reason = lines[-1] if lines else str(ready)
            raise UserError(f"the official BFCL checker cannot be started ({reason}); reinstall it: {INSTALL}")

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        self._process, self._rest = None, b""

    def _ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any] | str:
        """The answer to one job, or in a word why there is none."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return "not_started"
        deadline = time.monotonic() + seconds
        unsent = memoryview(json.dumps(job).encode() + b"\n")
        while unsent:  # a process that does not read must not block us: the pipe holds 64 KiB
            if not select.select([], [process.stdin], [], max(0.0, deadline - time.monotonic()))[1]:
                return "time_limit"
            try:
                unsent = unsent[os.write(process.stdin.fileno(), unsent[:_PIPE_PIECE]) :]
            except OSError:
                return "ended"
        while b"\n" not in self._rest:
            if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return "time_limit"
            piece = os.read(process.stdout.fileno(), LONGEST_ANSWER)
            if not piece:
                return "ended"
            self._rest += piece
            if len(self._rest) > LONGEST_ANSWER:
                return "answer_too_long"
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            return dict(json.loads(line))
        except ValueError:
            return "no_json"
