"""The official checkers' process, from the outside: started without our environment, asked with a time limit."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from awpo.errors import UserError
from evaluation.bfcl.data import BfclItem
from evaluation.bfcl.package import find_package, how_to_install
from evaluation.bfcl.versions import V3, Version

# The slowest reference takes a tenth of a second; starting imports the package.
ITEM_SECONDS = 10.0
START_SECONDS = 60.0
LONGEST_ANSWER = 1 << 24
_READ_PIECE = 1 << 16
# What of our environment the process sees; no key or token is among it.
PASSED = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
# Our code comes behind the packages of the interpreter, which may be those of another environment than ours.
_RUN = "import sys; sys.path.append(sys.argv[1]); from evaluation.bfcl.checker import main; main()"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the official checker says; `error_type` is its own word, or "checker:.." where it gave no verdict."""

    valid: bool
    error_type: str = ""
    error: str = ""

    @property
    def reason(self) -> str:
        return f"{self.error_type} {self.error}".strip()


@dataclass(frozen=True, slots=True)
class Memory:
    """What a conversation's memory holds: `context` is shown to the model, `snapshot` all of it, as JSON."""

    context: str
    snapshot: str


class NoAnswer(Exception):
    """The process gave no answer to a job, for the reason in a word; it has been ended."""


class CheckerProcess:
    """Asks the official checkers about items of one version; restarts them when an item kills them or takes too long.

    Use as a context manager. `failures` counts the verdicts that the checkers did not give by themselves (they
    raised, died or ran out of time): these are not valid. `isolation` says what the process has given up, "" before
    it was started.
    """

    def __init__(self, item_seconds: float = ITEM_SECONDS, version: Version = V3) -> None:
        self.version = version
        self.item_seconds = item_seconds
        self.failures = 0
        self.isolation = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="bfcl-")
        self._received = bytearray()
        # Objects live in the process by the conversation's name: none may meet those of another run.
        self._run = f"run{uuid.uuid4().hex}"
        self._known: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._folder.cleanup()

    def check(self, asked: Sequence[tuple[BfclItem, Any]]) -> list[Verdict]:
        """The verdict on each item and what was called.

        That is, for an item of one turn, [{name: {argument: value}}]; for one of several turns a list of turns, of
        steps, of calls as Python text. The latter are all executed anew, on objects of their own, and those of the
        item's conversation are dropped. For an agentic item it is the last words, None where there were none. Raises UserError where the checkers cannot be started at all.
        """
        jobs = [_job(_question(item, self._run), calls) for item, calls in asked]
        self._known -= {item.id for item, _ in asked}
        found: list[Verdict] = []
        while len(found) < len(jobs):
            self._start()
            try:
                found.extend(Verdict(**answer) for answer in self._answers(jobs[len(found) :]))
            except NoAnswer as error:  # the first item without an answer is at fault; the rest is asked again
                found.append(Verdict(False, str(error)))
        self.failures += sum(verdict.error_type.startswith("checker:") for verdict in found)
        return found

    def execute(self, item: BfclItem, calls: Sequence[str], earlier: Iterable[Sequence[str]] = ()) -> list[str]:
        """The results of calls, as Python text, after the `earlier` steps of the same item's conversation.

        The objects that calls act on live on in the process between steps; where it had to be started anew, the
        earlier steps are executed again first. Raises NoAnswer where the process gave no results, UserError where it
        cannot be started.
        """
        return list(self._converse("execute", item, earlier, [calls])["results"])

    def remember(self, item: BfclItem, earlier: Iterable[Sequence[str]] = ()) -> Memory:
        """What the memory of an item's conversation holds after its `earlier` steps. Raises as `execute` does.

        The conversation's objects are dropped: what comes after starts from the item's snapshot.
        """
        memory = Memory(**self._converse("remember", item, earlier, []))
        self._known.discard(item.id)
        return memory

    def _converse(
        self, do: str, item: BfclItem, earlier: Iterable[Sequence[str]], calls: list[Sequence[str]]
    ) -> dict[str, Any]:
        self._start()
        replay = [] if item.id in self._known else list(earlier)
        job = {"do": do, "conversation": self._run, "item": _setting(item)}
        try:
            answer = next(self._answers([_job(job, [*replay, *calls])]))
            if "error_type" in answer:
                raise self._lost(answer["error_type"])
        except NoAnswer:
            self.failures += 1
            raise
        self._known.add(item.id)
        return answer

    def _start(self) -> None:
        if self._process is not None:
            return
        python, home = find_package(self.version).python, self._folder.name
        environment = {name: os.environ[name] for name in PASSED if name in os.environ}
        environment |= {
            "HOME": home,
            "TMPDIR": home,
            "BFCL_PROJECT_ROOT": home,  # the package makes folders there when imported
            "LANG": "C.UTF-8",
            "TZ": "UTC",  # some results are times of day
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPENBLAS_NUM_THREADS": "1",  # a process with threads cannot leave the network
        }
        log = Path(home, "log.txt")
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                [python, "-c", _RUN, str(Path(__file__).resolve().parents[2])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                cwd=home,
                env=environment,
            )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            told = next(self._answers([b""], START_SECONDS))
        except NoAnswer as error:
            lines = log.read_text("utf-8", "replace").strip().splitlines()
            reason = lines[-1] if lines else str(error)
            raise UserError(
                f"the official BFCL checker cannot be started ({reason}); reinstall it: {how_to_install(self.version)}"
            ) from None
        self.isolation = told["isolation"]
        if told["release"] != self.version.release:
            raise UserError(
                f"{python} imports bfcl-eval {told['release']}, {self.version.name} needs {self.version.release}: "
                + how_to_install(self.version)
            )

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        self._process = None
        self._received.clear()
        self._known.clear()

    def _answers(self, jobs: Sequence[bytes], seconds: float | None = None) -> Iterator[dict[str, Any]]:
        """The answers to jobs, one after the other; jobs are sent as fast as the process reads them.

        Each has its time from the answer before it. Raises NoAnswer, after which the process is gone.
        """
        unsent = memoryview(b"".join(jobs))
        for _ in jobs:
            deadline = time.monotonic() + (seconds or self.item_seconds)
            searched = 0
            while (end := self._received.find(b"\n", searched)) < 0:
                searched = len(self._received)
                if searched > LONGEST_ANSWER:
                    raise self._lost("answer_too_long")
                unsent = self._exchange(unsent, max(0.0, deadline - time.monotonic()))
            line = self._received[:end]
            del self._received[: end + 1]
            try:
                answer = dict(json.loads(line))
            except (ValueError, TypeError, RecursionError):
                raise self._lost("no_json") from None
            yield answer

    def _exchange(self, unsent: memoryview, seconds: float) -> memoryview:
        """Sends and receives what goes without waiting longer than `seconds`; returns what is still unsent."""
        assert self._process is not None
        jobs, answers = self._process.stdin, self._process.stdout
        assert jobs is not None
        assert answers is not None
        readable, writable, _ = select.select([answers], [jobs] if unsent else [], [], seconds)
        if not readable and not writable:
            raise self._lost("time_limit")
        if readable:
            piece = os.read(answers.fileno(), _READ_PIECE)
            if not piece:
                raise self._lost("ended")
            self._received += piece
        if writable:
            try:
                unsent = unsent[os.write(jobs.fileno(), unsent) :]
            except OSError:
                raise self._lost("ended") from None
        return unsent

    def _lost(self, why: str) -> NoAnswer:
        self._stop()
        return NoAnswer(why if why.startswith("checker:") else f"checker:{why}")


def _job(job: dict[str, Any], calls: Any) -> bytes:
    """A job about calls as a line.

    What a model called is JSON within JSON: the fast encoder of the rest takes no whole number of more than 64 bits,
    no NaN and no lone surrogate, all of which a call may hold.
    """
    return orjson.dumps(job | {"calls": json.dumps(calls)}) + b"\n"


def _question(item: BfclItem, run: str) -> dict[str, Any]:
    if item.multi_turn or item.agentic:
        do = "check_conversation" if item.multi_turn else "check_reply"
        return {"do": do, "conversation": run, "item": _setting(item), "answer": item.answer}
    job = {"do": "check", "category": item.category, "language": item.language}
    return job | {"functions": item.functions, "answer": item.answer}


def _setting(item: BfclItem) -> dict[str, Any]:
    return {
        "id": item.id,
        "category": item.category,
        "initial_config": item.initial_config,
        "involved_classes": item.involved_classes,
    }
