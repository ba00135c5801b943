"""Folders of instances cut into parts, between dialogues; where the cuts are depends on the folders alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from awpo.data import store
from awpo.errors import UserError

PART_ROWS = 8192
MOST_PARTS = 2000

_NAMES = ["source", "dialogue_id", "step"]


@dataclass(frozen=True, slots=True)
class InstancePart:
    """Rows of one folder: of each shard named, those in [start, end)."""

    number: int
    segments: tuple[tuple[str, int, int], ...]

    @property
    def rows(self) -> int:
        return sum(end - start for _, start, end in self.segments)

    def to_json(self) -> dict[str, Any]:
        return {"number": self.number, "segments": self.segments}

    @staticmethod
    def from_json(value: dict[str, Any]) -> InstancePart:
        return InstancePart(value["number"], tuple((path, start, end) for path, start, end in value["segments"]))


def continues(row: dict[str, Any], before: dict[str, Any] | None) -> bool:
    """Whether a row is of the same dialogue as the row before it.

    Formats whose rows are steps of their own may hold several dialogues of one id, one after another: in a dialogue,
    steps grow.
    """
    return (
        before is not None
        and (row["source"], row["dialogue_id"]) == (before["source"], before["dialogue_id"])
        and row["step"] > before["step"]
    )


def part_rows(total: int) -> int:
    """The rows of a part of so many."""
    return max(PART_ROWS, -(-total // MOST_PARTS))


def plan_instance_parts(folders: list[Path], size: int) -> list[InstancePart]:
    """The parts of folders in order, each of about `size` rows. Raises UserError where a folder cannot be read."""
    parts: list[InstancePart] = []
    for folder in folders:
        shards = [(str(path), store.count_instances(path)) for path in store.shards_of(folder)]
        total = sum(rows for _, rows in shards)
        start = 0
        while start < total:
            end = min(start + size, total)
            if end < total:
                end = _next_dialogue(shards, end, total)
            parts.append(InstancePart(len(parts), tuple(_segments(shards, start, end))))
            start = end
    return parts


def _segments(shards: list[tuple[str, int]], start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """The rows [start, end) of all shards, by shard."""
    first = 0
    for path, rows in shards:
        low, high = max(start - first, 0), min(end - first, rows)
        if low < high:
            yield path, low, high
        first += rows


def _next_dialogue(shards: list[tuple[str, int]], at: int, total: int) -> int:
    """The first row from `at` on that begins a dialogue, or the end."""
    before: dict[str, Any] | None = None
    number = at - 1
    for table in read_rows(InstancePart(0, tuple(_segments(shards, at - 1, total))), _NAMES):
        for row in table.to_pylist():
            if number >= at and not continues(row, before):
                return number
            before, number = row, number + 1
    return total


def read_rows(part: InstancePart, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """The rows of a part as tables, each of a row group or what the part has of it. Raises UserError for damage."""
    for name, start, end in part.segments:
        path = Path(name)
        with store.open_shard(path) as file:
            first = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                low, high = max(start - first, 0), min(end - first, rows)
                if low < high:
                    try:
                        table = file.read_row_group(group, columns)
                    except (pa.ArrowException, OSError, ValueError) as error:
                        reason = str(error).splitlines()[0]
                        raise UserError(f"{path} is damaged ({reason}); redo the stage that wrote it") from None
                    yield table.slice(low, high - low)
                first += rows
