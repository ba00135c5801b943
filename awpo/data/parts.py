"""A large source cut into parts, each read, decomposed and written by one process as one shard.

Where the cuts are depends on the source alone, not on how many processes work on it. Lines are cut at byte positions
and parquet between row groups, without reading what lies between; an array or a gzip file can only be read from its
start, so its rows are copied, part by part, into files that the processes then read (`marshal`, which is faster than
JSON and knows all of its values).

Rows of a part of lines are numbered from the part's first: which row of the file that is is known once the parts
before it have been read.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from awpo.data.rows import Row, Rows, line_rows, parquet_rows, refuse_lossy_structs
from awpo.errors import UserError

PART_BYTES = 8 * 2**20
MOST_PARTS = 2000  # a shard's name has five digits, and a folder of more files than this is no pleasure

Kind = Literal["lines", "parquet", "whole", "copied"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one file: of the lines that begin in [start, end), of the row groups in [start, end), or all of it."""

    path: str
    name: str
    kind: Kind
    start: int = 0
    end: int = 0
    first_row: int = 0  # of row groups; lines and whole files begin at 0


@dataclass(frozen=True, slots=True)
class Part:
    """What becomes one shard: segments in order; `size` in bytes of the source, for progress."""

    number: int
    segments: tuple[Segment, ...]
    size: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Part:
        return Part(value["number"], tuple(Segment(**item) for item in value["segments"]), value["size"])


def part_bytes(total: int) -> int:
    """The size of a part of a source of `total` bytes."""
    return max(PART_BYTES, -(-total // MOST_PARTS))


def _kind(path: Path) -> Literal["gzip", "parquet", "lines", "other"]:
    try:
        with open(path, "rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; check that it is a file you may read"
        ) from None
    if start[:2] == b"\x1f\x8b":
        return "gzip"
    if start[:4] == b"PAR1":
        return "parquet"
    return "lines" if start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{" and b"\0" not in start else "other"


def plan_parts(files: list[Path], size: int, folder: Path, wanted: Callable[[int], bool]) -> Iterator[Part]:
    """The parts of a source in order, each of about `size` bytes; small files share one.

    Rows that have to be copied are written into `folder` for the parts that are `wanted`. Raises UserError as
    `Rows` does.
    """
    pending: list[Segment] = []
    number = pending_size = 0
    for path in files:
        kind, file_size = _kind(path), path.stat().st_size
        if kind in ("gzip", "other") and file_size > size // 4:
            if pending:
                yield Part(number, tuple(pending), pending_size)
                number, pending, pending_size = number + 1, [], 0
            for part in _copied_parts(path, size, folder, number, wanted):
                yield part
                number = part.number + 1
            continue
        for segment, weight in _segments(path, kind, file_size, size):
            pending.append(segment)
            pending_size += weight
            if pending_size >= size:
                yield Part(number, tuple(pending), pending_size)
                number, pending, pending_size = number + 1, [], 0
    if pending:
        yield Part(number, tuple(pending), pending_size)


def _segments(path: Path, kind: str, file_size: int, size: int) -> Iterator[tuple[Segment, int]]:
    if kind == "lines":
        for start in range(0, file_size, size):
            end = min(start + size, file_size)
            yield Segment(str(path), path.name, "lines", start, end), end - start
    elif kind == "parquet":
        yield from _row_groups(path, file_size, size)
    else:
        yield Segment(str(path), path.name, "whole"), file_size


def _row_groups(path: Path, file_size: int, size: int) -> Iterator[tuple[Segment, int]]:
    try:
        with pq.ParquetFile(path) as file:
            refuse_lossy_structs(path, file.schema_arrow)
            metadata = file.metadata
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            sizes = [(group.num_rows, group.total_byte_size) for group in groups]
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a whole parquet file ({str(error).splitlines()[0]}); fetch it again") from None
    if not sum(rows for rows, _ in sizes):
        raise UserError(f"{path} holds no rows; give a file that holds rows")
    total = sum(held for _, held in sizes) or 1
    start = first_row = rows = held = 0
    for index, (group_rows, group_bytes) in enumerate(sizes):
        rows, held = rows + group_rows, held + group_bytes
        if held >= size or index == len(sizes) - 1:
            yield (
                Segment(str(path), path.name, "parquet", start, index + 1, first_row),
                max(1, file_size * held // total),
            )
            start, first_row, rows, held = index + 1, first_row + rows, 0, 0


def _copied_parts(path: Path, size: int, folder: Path, number: int, wanted: Callable[[int], bool]) -> Iterator[Part]:
    rows = Rows(path)
    iterator, read = iter(rows), 0
    row = next(iterator, None)
    while row is not None:
        copied, written = folder / f"{number:05d}.rows", 0
        with open(copied if wanted(number) else os.devnull, "wb") as file:
            while row is not None and written < size:
                try:
                    text = marshal.dumps((row.number, row.value, row.fault))
                except ValueError:  # it writes 2,000 levels; the JSON reader of later Pythons reads more
                    text = marshal.dumps((row.number, None, "the value is nested too deeply"))
                file.write(text)
                written += len(text)
                row = next(iterator, None)
        yield Part(number, (Segment(str(copied), path.name, "copied"),), rows.done - read)
        read, number = rows.done, number + 1


def read_segment(segment: Segment) -> Iterator[Row]:
    """The rows of a segment. Raises UserError where the file cannot be read on."""
    path = Path(segment.path)
    if segment.kind == "whole":
        yield from Rows(path)
        return
    try:
        with open(path, "rb") as file:
            if segment.kind == "lines":
                yield from line_rows(segment.name, file, segment.start, segment.end)
            elif segment.kind == "parquet":
                groups = range(segment.start, segment.end)
                yield from parquet_rows(path, file, groups, segment.first_row)
            else:
                yield from _copied_rows(segment.name, file)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; check that it is a file you may read"
        ) from None


def _copied_rows(name: str, file: Any) -> Iterator[Row]:
    while True:
        try:
            number, value, fault = marshal.load(file)
        except EOFError:
            return
        yield Row(name, number, value, fault)
