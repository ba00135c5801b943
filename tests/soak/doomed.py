"""Runs a module as `python -m` does, in a process that sends itself a signal at a chosen moment of its work.

    python tests/soak/doomed.py PLAN.json MODULE [ARGUMENT ...]

Moments are what the process does to files under a folder (a file opened to be written, renamed, removed; a folder made;
a database opened), or calls of some functions. A first run counts them, a second one dies at the n-th of them, or some
time after it. The plan: {"watch": folder, "functions": ["module:Class.method", ...] or [], "counted": file} to count;
{"watch", "functions", "signal": number, "at": n, "delay": seconds} to die. A MODULE that ends in .py is a file's path.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Moments:
    """Counts moments; sends the signal at the planned one."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.count, self.times = plan, 0, [time.monotonic()]
        self._process = os.getpid()

    def pass_by(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child: the moments are those of the process itself
        self.count += 1
        self.times.append(time.monotonic())
        if self.count == self.plan.get("at"):
            if self.plan["delay"]:
                threading.Timer(self.plan["delay"], self._send).start()
            else:
                self._send()

    def _send(self) -> None:
        os.kill(self._process, self.plan["signal"])

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        match event:
            case "open":
                path, mode, flags = arguments
                written = set(mode) & set("wax+") if isinstance(mode, str) else flags & WRITES
            case "os.rename" | "os.remove" | "os.mkdir" | "os.rmdir" | "sqlite3.connect":
                path, written = arguments[0], True
            case _:
                return
        if written and isinstance(path, str | os.PathLike) and str(os.fspath(path)).startswith(self.plan["watch"]):
            self.pass_by()

    def wrap(self, name: str) -> None:
        module, _, path = name.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, last = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        function = getattr(owner, last)

        @functools.wraps(function)
        def noticed(*given: Any, **named: Any) -> Any:
            self.pass_by()
            return function(*given, **named)

        setattr(owner, last, noticed)


def main() -> None:
    # A shell that runs the matrix in its background has SIGINT ignored, which is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    plan = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    module, arguments = sys.argv[2], sys.argv[3:]
    moments = Moments(plan)
    for name in plan["functions"]:
        moments.wrap(name)
    if not plan["functions"]:
        sys.addaudithook(moments.audit)
    sys.argv = [module, *arguments]
    try:
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        if "counted" in plan:
            moments.times.append(time.monotonic())
            Path(plan["counted"]).write_text(json.dumps({"moments": moments.count, "times": moments.times}), "utf-8")


if __name__ == "__main__":
    main()
