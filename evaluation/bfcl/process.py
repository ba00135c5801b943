"""The official checkers' process, from the outside: started without our environment, asked with a time limit."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from awpo.errors import UserError
from evaluation.bfcl.data import INSTALL, BfclItem

# The slowest reference takes a tenth of a second; starting imports the package.
ITEM_SECONDS = 10.0
START_SECONDS = 60.0
LONGEST_ANSWER = 1 << 24
_PIPE_PIECE = select.PIPE_BUF  # what a pipe that can be written to takes without blocking
_READ_PIECE = 1 << 16
# What of our environment the process sees; no key or token is among it.
PASSED = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")

Calls = Sequence[dict[str, Any]]
Steps = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the official checker says; `error_type` is its own word, or "checker:.." where it gave no verdict."""

    valid: bool
    error_type: str = ""
    error: str = ""

    @property
    def reason(self) -> str:
        return f"{self.error_type} {self.error}".strip()


class NoAnswer(Exception):
    """The process gave no answer to a job, for the reason in a word; it has been ended."""


class CheckerProcess:
    """Asks the official checkers about items; restarts them when an item kills them or takes too long.

    Use as a context manager. `failures` counts the verdicts that the checkers did not give by themselves (they
    raised, died or ran out of time): these are not valid. `isolation` says what the process has given up, "" before
    it was started.
    """

    def __init__(self, item_seconds: float = ITEM_SECONDS) -> None:
        self.item_seconds = item_seconds
        self.failures = 0
        self.isolation = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="bfcl-")
        self._rest = b""
        # Objects live in the process by the conversation's name: none may meet those of another run.
        self._run = f"run{uuid.uuid4().hex}"
        self._known: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._folder.cleanup()

    def check(self, item: BfclItem, calls: Calls) -> Verdict:
        """The verdict on the calls of a single-turn item, the model's [{name: {argument: value}}].

        Raises UserError where the checker cannot be started at all.
        """
        job = {"do": "check", "category": item.category, "language": item.language}
        return self._verdict(job | {"functions": item.functions, "answer": item.answer, "calls": calls})

    def check_conversation(self, item: BfclItem, turns: Sequence[Steps]) -> Verdict:
        """The verdict on a multi-turn item: for each turn its steps, for each step the calls as Python text.

        All calls are executed anew, on objects of their own; those of the conversation are dropped. Raises UserError
        as `check` does.
        """
        self._known.discard(item.id)
        job = {"do": "check_conversation", "conversation": self._run, "item": _setting(item)}
        return self._verdict(job | {"answer": item.answer, "turns": turns})

    def execute(self, item: BfclItem, calls: Sequence[str], earlier: Iterable[Sequence[str]] = ()) -> list[str]:
        """The results of calls, as Python text, after the `earlier` steps of the same item's conversation.

        The objects that calls act on live on in the process between steps; where it had to be started anew, the
        earlier steps are executed again first. Raises NoAnswer where the process gave no results, UserError where it
        cannot be started.
        """
        self._start()
        replay = [] if item.id in self._known else list(earlier)
        job = {"do": "execute", "conversation": self._run, "item": _setting(item), "calls": calls, "replay": replay}
        try:
            answer = self._ask(job, self.item_seconds)
            if "results" not in answer:
                raise self._lost(answer["error_type"])
        except NoAnswer:
            self.failures += 1
            raise
        self._known.add(item.id)
        return list(answer["results"])

    def _verdict(self, job: dict[str, Any]) -> Verdict:
        self._start()
        try:
            verdict = Verdict(**self._ask(job, self.item_seconds))
        except NoAnswer as error:
            verdict = Verdict(False, str(error))
        self.failures += verdict.error_type.startswith("checker:")
        return verdict

    def _start(self) -> None:
        if self._process is not None:
            return
        home = self._folder.name
        environment = {name: os.environ[name] for name in PASSED if name in os.environ}
        environment |= {
            "HOME": home,
            "TMPDIR": home,
            "BFCL_PROJECT_ROOT": home,  # the package makes folders there when imported
            "LANG": "C.UTF-8",
            "TZ": "UTC",  # some results are times of day
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
        try:
            self.isolation = self._receive(time.monotonic() + START_SECONDS)["isolation"]
        except NoAnswer as error:
            lines = log.read_text("utf-8", "replace").strip().splitlines()
            reason = lines[-1] if lines else str(error)
            raise UserError(
                f"the official BFCL checker cannot be started ({reason}); reinstall it: {INSTALL}"
            ) from None

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        self._process, self._rest = None, b""
        self._known.clear()

    def _ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to one job. Raises NoAnswer, after which the process is gone."""
        process, deadline = self._process, time.monotonic() + seconds
        assert process is not None
        assert process.stdin is not None
        unsent = memoryview(json.dumps(job).encode() + b"\n")
        while unsent:  # a process that does not read must not block us: the pipe holds 64 KiB
            if not select.select([], [process.stdin], [], max(0.0, deadline - time.monotonic()))[1]:
                raise self._lost("time_limit")
            try:
                unsent = unsent[os.write(process.stdin.fileno(), unsent[:_PIPE_PIECE]) :]
            except OSError:
                raise self._lost("ended") from None
        return self._receive(deadline)

    def _receive(self, deadline: float) -> dict[str, Any]:
        """One line of the process. Raises NoAnswer, after which the process is gone."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        pieces = [self._rest]
        size = len(self._rest)
        while b"\n" not in pieces[-1]:
            if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self._lost("time_limit")
            piece = os.read(process.stdout.fileno(), _READ_PIECE)
            if not piece:
                raise self._lost("ended")
            pieces.append(piece)
            size += len(piece)
            if size > LONGEST_ANSWER:
                raise self._lost("answer_too_long")
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        try:
            return dict(json.loads(line))
        except ValueError:
            raise self._lost("no_json") from None

    def _lost(self, why: str) -> NoAnswer:
        self._stop()
        return NoAnswer(why if why.startswith("checker:") else f"checker:{why}")


def _setting(item: BfclItem) -> dict[str, Any]:
    return {
        "id": item.id,
        "category": item.category,
        "initial_config": item.initial_config,
        "involved_classes": item.involved_classes,
    }
