"""What the processes of a soak hold over time: memory and open files, of each process, by what it is for.

A process belongs to a soak where the variable `MARK` of its environment names the soak's folder: all that a soak starts
inherit it, so nobody is missed, also those that have lost their parents.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "AWPO_SOAK"
FLOW_RUN = "PREFECT__FLOW_RUN_ID"
"""What Prefect's worker tells the process of a run; the stages that it starts inherit it."""
STAGES = ("awpo.worker", "awpo.ranks")
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20

WARM_SECONDS = 300.0
"""After which a server has loaded what it needs, and has answered each kind of request."""
FEWEST = 30
"""Samples after that, without which a life says nothing about growth."""
WINDOW = 10
"""Samples whose median stands for the beginning and for the end."""
SHARE, SLACK_MIB, SLACK_FILES = 0.25, 48.0, 20
"""The bound: after the warm-up a server may grow by a quarter and 48 MiB, and by 20 open files. What ends by itself
(the process of a run, that of a stage) may at most be so much larger among the last third than among the first."""


@dataclass(frozen=True)
class Process:
    """One process of the soak. `flow_run` is empty for servers and the worker, `rank` where it is alone."""

    number: int
    parent: int
    command: str
    flow_run: str
    rank: str

    @property
    def stage(self) -> bool:
        """Whether it works for a stage: its worker, a rank, or the launcher of ranks."""
        return any(name in self.command for name in STAGES)

    def holds(self) -> tuple[float, int]:
        """Resident MiB and open files. Raises OSError where it has ended."""
        proc = Path(f"/proc/{self.number}")
        pages = int((proc / "statm").read_text("utf-8").split()[1])
        return pages * PAGE_MIB, len(list((proc / "fd").iterdir()))


def processes_of(folder: Path) -> dict[int, Process]:
    """The processes alive of the soak in `folder`, by number."""
    found = {}
    for proc in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            told = dict(
                part.split("=", 1) for part in _text(proc / "environ").split("\0") if part.partition("=")[1] == "="
            )
            if told.get(MARK) != str(folder):
                continue
            state, parent = _text(proc / "stat").rpartition(")")[2].split()[:2]
            command = _text(proc / "cmdline").replace("\0", " ").strip()
            if state != "Z":
                rank = told.get("RANK", "")
                found[int(proc.name)] = Process(int(proc.name), int(parent), command, told.get(FLOW_RUN, ""), rank)
    return found


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace")


def tree(alive: dict[int, Process], root: int) -> list[Process]:
    """A server's process and all below it but what belongs to a run."""
    below = defaultdict(list)
    for process in alive.values():
        below[process.parent].append(process)
    found = [alive[root]] if root in alive else []
    for process in found:
        found += [child for child in below[process.number] if not child.flow_run]
    return found


def held(processes: Iterable[Process]) -> tuple[float, int, int] | None:
    """Resident MiB, open files and number of some processes together; None where there are none any more."""
    numbers = []
    for process in processes:
        with suppress(OSError):
            numbers.append(process.holds())
    if not numbers:
        return None
    return sum(mib for mib, _ in numbers), sum(files for _, files in numbers), len(numbers)


@dataclass
class Life:
    """Samples of one server from its start to its end: seconds since its start, MiB, open files."""

    name: str
    samples: list[tuple[float, float, int]]

    def growth(self) -> dict[str, Any] | None:
        """How it grew after the warm-up; None of a life that was too short to tell."""
        warm = [sample for sample in self.samples if sample[0] >= WARM_SECONDS]
        if len(warm) < FEWEST:
            return None
        (mib, files), (late_mib, late_files) = _middle(warm[:WINDOW]), _middle(warm[-WINDOW:])
        later = warm[len(warm) // 2 :]
        slope = statistics.linear_regression([s[0] / 3600 for s in later], [s[1] for s in later]).slope
        return {
            "name": self.name,
            "minutes": round(self.samples[-1][0] / 60, 1),
            "mib_at_start": round(self.samples[0][1], 1),
            "mib_warm": round(mib, 1),
            "mib_at_end": round(late_mib, 1),
            "mib_most": round(max(s[1] for s in self.samples), 1),
            "mib_per_hour_of_second_half": round(slope, 1),
            "files_at_start": self.samples[0][2],
            "files_warm": files,
            "files_at_end": late_files,
            "files_most": max(s[2] for s in self.samples),
        }


def _middle(samples: list[tuple[float, float, int]]) -> tuple[float, float]:
    return statistics.median(s[1] for s in samples), statistics.median(s[2] for s in samples)


def too_much(name: str, before: tuple[float, float], after: tuple[float, float]) -> list[str]:
    """What is beyond the bound, in words: memory, open files, both or none; (MiB, files) before and after."""
    found = []
    if after[0] > before[0] * (1 + SHARE) + SLACK_MIB:
        found.append(f"{name} grew from {before[0]:.0f} to {after[0]:.0f} MiB")
    if after[1] > before[1] + SLACK_FILES:
        found.append(f"{name} holds {after[1]:.0f} files, and held {before[1]:.0f}")
    return found


class Peaks:
    """The most that processes which end by themselves have held, in the order in which they were first seen."""

    def __init__(self) -> None:
        self.most: dict[int, tuple[float, int]] = {}

    def see(self, process: Process) -> None:
        with suppress(OSError):
            mib, files = process.holds()
            before = self.most.get(process.number, (0.0, 0))
            self.most[process.number] = max(mib, before[0]), max(files, before[1])

    def thirds(self) -> dict[str, Any] | None:
        """Medians among the first and the last third; None of too few."""
        peaks = list(self.most.values())
        third = len(peaks) // 3
        if third < 3:
            return None
        first, last = peaks[:third], peaks[-third:]
        return {
            "processes": len(peaks),
            "mib_of_first_third": round(statistics.median(mib for mib, _ in first), 1),
            "mib_of_last_third": round(statistics.median(mib for mib, _ in last), 1),
            "mib_most": round(max(mib for mib, _ in peaks), 1),
            "files_of_first_third": statistics.median(files for _, files in first),
            "files_of_last_third": statistics.median(files for _, files in last),
            "files_most": max(files for _, files in peaks),
        }
