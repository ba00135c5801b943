"""Sends what a stage writes down to its MLflow run while it grows: each line once, whatever happens between.

For metrics.jsonl, what has been sent is written down after each batch that the store has taken. What it took of a process that died before
it could write that down, it is asked for: a trainer that resumes writes some steps again, with other times, and MLflow
would keep both.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

from mlflow.exceptions import MlflowException

from awpo.events import METRICS, Tail
from tasks.patience import in_a_line
from tasks.tracking import METRICS_PER_BATCH, TrackedRun, metric_name

EVERY_SECONDS = 3.0


class Relay(ABC):
    """Reads along in a thread of its own, as a context manager; on leaving, the rest is sent.

    `problem` holds the store's last refusal, or None; the stage goes on without it, and the next attempt or run
    sends what is missing.
    """

    def __init__(self, run: TrackedRun, every: float = EVERY_SECONDS) -> None:
        self.run, self.every = run, every
        self.problem: str | None = None
        self._stop = threading.Event()
        self._pumping = threading.Lock()
        self._thread = threading.Thread(target=self._keep_pumping, name=type(self).__name__, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.pump()

    def _keep_pumping(self) -> None:
        while not self._stop.wait(self.every):
            self.pump()

    def pump(self) -> int:
        """Sends what is new; returns how much the store took. A store that is away only sets `problem`."""
        with self._pumping:
            try:
                sent = self._send_new()
                self.problem = None
                return sent
            except (MlflowException, OSError) as error:
                self.problem = in_a_line(error)
                return 0

    @abstractmethod
    def _send_new(self) -> int:
        """Sends what is new, or raises what the store raises; what it took is not sent again."""


class MetricsRelay(Relay):
    """Sends metrics.jsonl; `pump` counts numbers."""

    def __init__(self, run: TrackedRun, folder: Path, every: float = EVERY_SECONDS) -> None:
        super().__init__(run, every)
        self.path = folder / METRICS
        # What was sent is known by name and step, so reading the file from its start is always right. Going on where an
        # earlier process stopped is not: the trainer may have replaced the file more than once since.
        run.file.inode, run.file.offset = 0, 0
        self._asked = False

    def _send_new(self) -> int:
        file = self.run.file
        if not self.path.exists():
            return 0
        self._ask_what_was_sent()
        status = self.path.stat()
        # A resumed trainer replaces the file without the steps that it will do again: read it from its start.
        if status.st_ino != file.inode or status.st_size < file.offset:
            file.inode, file.offset = status.st_ino, 0
        tail = Tail(self.path, file.offset)
        rows: list[tuple[str, object, int, int]] = []
        sent = 0
        for line in tail:
            values, step = line.get("metrics"), line.get("step")
            if isinstance(values, dict) and isinstance(step, int):
                stamp = int(float(line.get("time", 0)) * 1000)
                rows += [
                    (metric_name(name), value, stamp, step)
                    for name, value in values.items()
                    if file.sent.get(metric_name(name), -1) < step
                ]
            if len(rows) >= METRICS_PER_BATCH:
                sent += self._commit(rows, tail.offset)
                rows = []
        return sent + self._commit(rows, tail.offset)

    def _ask_what_was_sent(self) -> None:
        """Learns from the store, once, the last step that it has of each metric."""
        if self._asked:
            return
        client, run_id, sent = self.run.client, self.run.run_id, self.run.file.sent
        for name in client.get_run(run_id).data.metrics:
            last = max(metric.step for metric in client.get_metric_history(run_id, name))
            sent[name] = max(last, sent.get(name, -1))
        self._asked = True

    def _commit(self, rows: list[tuple[str, object, int, int]], offset: int) -> int:
        file = self.run.file
        if rows:
            self.run.send(rows)
            for name, _, _, step in rows:
                file.sent[name] = step
        if rows or offset != file.offset:
            file.offset = offset
            self.run.save()
        return len(rows)
