"""How a stage tells of itself: JSON lines in its run folder, never a call to a server.

`metrics.jsonl`  {"step", "time", "metrics": {name: number}}
`events.jsonl`   {"time", "event": "progress", "stage", "done", "total"} | {"event": "warning" or "note", "message"} | ...
The parent process reads along and relays them; what was written while nobody listened is read later.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"


class Progress(Protocol):
    """Called with the number of units done, the total and a short unit or phase name."""

    def __call__(self, done: int, total: int, what: str = "") -> None: ...


def silent(done: int, total: int, what: str = "") -> None:
    """The progress of those who do not want to know."""


class RunLog:
    """Appends metrics and events of one run to its folder.

    Each line is written whole or, where there is no room for it (OSError), not at all. Half a line, which a process that
    died or a full disk left there, never swallows the one behind it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        text = json.dumps({"time": round(time.time(), 3), **row}, ensure_ascii=False, default=str) + "\n"
        raw = text.encode("utf-8", "backslashreplace")  # a lone surrogate is no UTF-8
        with open(self.folder / name, "a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                raw = raw if file.read(1) == b"\n" else b"\n" + raw
            written = 0
            try:
                while written < len(raw):
                    written += file.write(raw[written:])
            except OSError:
                if file.seek(0, os.SEEK_END) == size + written:  # nobody else has written meanwhile
                    file.truncate(size)
                raise

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append(METRICS, {"step": step, "metrics": dict(metrics)})

    def event(self, event: str, **fields: Any) -> None:
        self._append(EVENTS, {"event": event, **fields})

    def progress(self, done: int, total: int, what: str = "") -> None:
        self.event("progress", done=done, total=total, what=what)

    def note(self, message: str) -> None:
        self.event("note", message=message)

    def warning(self, message: str) -> None:
        self.event("warning", message=message)


class Tail:
    """Reads the new whole lines of a JSON-lines file each time it is asked."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # half a line: its writer has not finished, or died; the next reading tells
                self.offset += len(line)
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if isinstance(row, dict):
                    yield row
                else:
                    yield {"event": "warning", "message": f"{self.path}: unreadable line before byte {self.offset}"}


class LineTail:
    """Reads the new whole lines of a text file each time it is asked, from its present end on.

    Of a line that was written over (a progress bar's, with carriage returns) the last state counts.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, path.stat().st_size if path.exists() else 0

    def read(self) -> list[str]:
        """The lines that have been finished since, without their ends."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return []
        self.offset += len(whole) + 1
        return [line.rstrip("\r").rpartition("\r")[2] for line in whole.decode("utf-8", "replace").split("\n")]


EventHandler = Callable[[dict[str, Any]], None]
