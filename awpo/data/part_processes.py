"""Processes that work on the parts of something large, one part each at a time, all with the same function.

A module that calls `serve` with that function is started as `python -m MODULE`, once for each core, when it is first
needed. It is asked by a line of JSON on its standard input and answers by one on its standard output, until the input
ends; it dies with the process that started it.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from awpo.errors import UserError
from awpo.processes import wait_for_end_of


def default_workers() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class PartProcesses:
    """Processes of a module; at most `count` at a time, started when first needed."""

    def __init__(self, count: int, module: str) -> None:
        self._module = module
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        self._started: list[subprocess.Popen[str]] = []
        self._threads = ThreadPoolExecutor(count, "parts")
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, job: dict[str, Any], what: str) -> Future[Any]:
        """Starts a piece of work; the result is what the module's function returns of `job`, both JSON.

        A UserError comes out as it is; anything else that goes wrong is a RuntimeError that says `what` it befell.
        """
        return self._threads.submit(self._work, job, what)

    def _work(self, job: dict[str, Any], what: str) -> Any:
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        line = ""
        with suppress(OSError, ValueError):  # a process that has died: seen by its silence
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process died over {what} (code {process.wait()}); run again")
        self._idle.put(process)
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(answer["error"])
        if "crash" in answer:
            raise RuntimeError(f"{what} failed\n{answer['crash']}")
        return answer["result"]

    def _start(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._closed:
                raise InterruptedError("the work was stopped")
            # One thread each: the processes share the cores. The system's allocator gives memory back.
            alone = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "ARROW_DEFAULT_MEMORY_POOL": "system"}
            process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env={**os.environ, **alone},
            )
            self._started.append(process)
            return process

    def close(self) -> None:
        """Ends all processes, whatever they are at."""
        with self._lock:
            self._closed = True
            for process in self._started:
                process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._started:
            process.wait()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):
                    if stream is not None:
                        stream.close()


def serve(work: Callable[[dict[str, Any]], Any]) -> None:
    """Answers what is asked on standard input by `work`, until it ends."""
    _end_with_parent()
    # What is loaded stays, and what the work makes has no cycles: the collector need not look at it all the time.
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is no answer
    for line in sys.stdin:
        answer: dict[str, Any]
        try:
            answer = {"result": work(json.loads(line))}
        except UserError as error:
            answer = {"error": str(error)}
        except Exception:  # noqa: BLE001 -- told to the process that asked
            answer = {"crash": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        wait_for_end_of(parent)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
