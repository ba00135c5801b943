"""Progress of long stages: bars on a terminal, a line now and then elsewhere, a progress artifact in Prefect.

A stage only calls `Progress` (`awpo.events`). Who is told is decided here: the command line installs a reporter for
its process with `reporting`, and tasks open a line of it per stage with `open_line`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

LINE_SECONDS = 15.0


class Line(Protocol):
    """One stage's progress as someone sees it; a `total` of 0 is one that nobody knows."""

    def update(self, done: int, total: int, what: str = "") -> None: ...
    def note(self, message: str) -> None: ...
    def end(self, outcome: str) -> None: ...


class Reporter(Protocol):
    """Someone who wants to know."""

    def open(self, title: str) -> Line: ...


class NoReporter:
    """For those who look at Prefect or MLflow instead."""

    class _Line:
        def update(self, done: int, total: int, what: str = "") -> None: ...
        def note(self, message: str) -> None: ...
        def end(self, outcome: str) -> None: ...

    def open(self, title: str) -> Line:
        return self._Line()


class PlainReporter:
    """Whole lines: at the start and the end of a stage, and at most every `LINE_SECONDS` between.

    Lines go to standard error by default, so that standard output holds results alone.
    """

    def __init__(self, stream: Any = None, every: float = LINE_SECONDS) -> None:
        self.stream, self.every, self._lock = stream, every, threading.Lock()

    def say(self, text: str) -> None:
        with self._lock:
            print(text, file=self.stream or sys.stderr, flush=True)

    def open(self, title: str) -> Line:
        return _PlainLine(self, title)


class _PlainLine:
    def __init__(self, reporter: PlainReporter, title: str) -> None:
        self.reporter, self.title = reporter, title
        self.start = self.last = time.monotonic()
        reporter.say(f"{title}: started")

    def update(self, done: int, total: int, what: str = "") -> None:
        now = time.monotonic()
        if now - self.last >= self.reporter.every:
            self.last = now
            counted = f"{done}/{total}" if total else str(done)
            self.reporter.say(f"{self.title}: {counted} {what}".rstrip())

    def note(self, message: str) -> None:
        self.reporter.say(f"{self.title}: {message}")

    def end(self, outcome: str) -> None:
        self.reporter.say(f"{self.title}: {outcome} ({time.monotonic() - self.start:.0f} s)")


class BarReporter:
    """One bar per stage on a terminal, with time gone and time left; finished stages become one line."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[what]}"),
            TimeElapsedColumn(),
            Remaining(compact=True),
            console=console,
            transient=True,
        )

    def __enter__(self) -> BarReporter:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def open(self, title: str) -> Line:
        return _BarLine(self, title)


class _BarLine:
    def __init__(self, reporter: BarReporter, title: str) -> None:
        self.reporter, self.title, self.start = reporter, title, time.monotonic()
        self.bar: TaskID = reporter.bars.add_task(title, total=None, what="")

    def update(self, done: int, total: int, what: str = "") -> None:
        self.reporter.bars.update(self.bar, completed=done, total=total or None, what=what)

    def note(self, message: str) -> None:
        self.reporter.bars.console.print(f"  {self.title}: {message}", style="yellow", highlight=False)

    def end(self, outcome: str) -> None:
        self.reporter.bars.remove_task(self.bar)
        seconds = time.monotonic() - self.start
        style = "green" if outcome in ("done", "nothing to do") else "red"
        self.reporter.bars.console.print(
            f"  [{style}]{outcome:>13}[/]  {self.title}  [dim]{seconds:.0f} s[/]", highlight=False
        )


_current: Reporter = NoReporter()


@contextmanager
def reporting(reporter: Reporter) -> Iterator[None]:
    """Installs `reporter` for this process, whatever the thread: tasks run in threads of their own."""
    global _current
    before, _current = _current, reporter
    try:
        yield
    finally:
        _current = before


def open_line(title: str) -> Line:
    """A line of the installed reporter."""
    return _current.open(title)


def say(message: str) -> None:
    """One message that belongs to no stage's line, such as pass@1 and pass@8 before policy training."""
    if isinstance(_current, PlainReporter):
        _current.say(message)
    elif isinstance(_current, BarReporter):
        _current.bars.console.print(f"  {message}", highlight=False)
