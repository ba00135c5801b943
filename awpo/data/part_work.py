"""The work on one part of a large source, done by a process of its own: `python -m awpo.data.part_work`.

Beside a shard of instances it leaves what only the process that sees all parts can decide on: hashes that tell
repetitions, rejected rows and calls that don't fit, numbered within the part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from awpo.data.decompose import Examined, cut_rows, examine, id_hash, unusable
from awpo.data.part_processes import serve
from awpo.data.parts import Part, read_segment
from awpo.data.rows import Row
from awpo.data.settings import DecomposeConfig
from awpo.data.sources import Rejected, get_source
from awpo.data.sources.base import Source
from awpo.data.splits import split_of
from awpo.data.store import ShardWriter

# Of each dialogue that can be decomposed: where it stands, its hashes, and how many rows of the shard are its.
RECORD = np.dtype(
    [("segment", "i4"), ("row", "i8"), ("content", "u8"), ("id", "u8"), ("instances", "i4"), ("dropped", "?")]
)


class PartFiles:
    """The files of a part's work in the folder of unfinished work."""

    def __init__(self, folder: Path, number: int) -> None:
        name = f"{number:05d}"
        self.shard, self.records = folder / f"{name}.parquet", folder / f"{name}.records.npy"
        self.rejected, self.invalid = folder / f"{name}.rejected.jsonl", folder / f"{name}.invalid.jsonl"
        self.rows, self.hashes, self.done = folder / f"{name}.rows", folder / f"{name}.npy", folder / f"{name}.done"
        self.settled_rejected = folder / f"{name}.settled.rejected.jsonl"
        self.settled_invalid = folder / f"{name}.settled.invalid.jsonl"

    def remove_work(self) -> None:
        """Removes what is no longer needed once the part is settled."""
        for path in (self.shard, self.records, self.rejected, self.invalid, self.rows):
            path.unlink(missing_ok=True)


def work_on_part(part: Part, folder: Path, reader: Source, config: DecomposeConfig) -> list[int]:
    """Reads and decomposes a part into the files of `PartFiles`; returns the number of rows of each segment.

    Raises UserError where a file cannot be read on or a text cannot be stored.
    """
    files = PartFiles(folder, part.number)
    records: list[tuple[int, int, int, int, int, bool]] = []
    counts = [0] * len(part.segments)
    writer = ShardWriter(files.shard)
    rejected_name, invalid_name = (
        path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in (files.rejected, files.invalid)
    )
    try:
        with (
            open(rejected_name, "w", encoding="utf-8", errors="backslashreplace") as rejected_file,
            open(invalid_name, "w", encoding="utf-8", errors="backslashreplace") as invalid_file,
        ):

            def reject(segment: int, item: Rejected) -> None:
                rejected_file.write(json.dumps({"segment": segment, **item.to_json()}, ensure_ascii=False) + "\n")

            for segment, row in _rows(part):
                counts[segment] += 1
                found = examine(row, reader)
                if isinstance(found, Rejected):
                    reject(segment, found)
                    continue
                for line in found.invalid_lines(row):
                    invalid_file.write(json.dumps({"segment": segment, **line}, ensure_ascii=False) + "\n")
                dropped = bool(found.invalid) and config.invalid_calls == "drop"
                rows: list[dict[str, Any]] = []
                if dropped:
                    reject(segment, unusable(row, found))
                else:
                    rows = _instances(found, reader, config)
                    for item in rows:
                        writer.add(item)
                content = int(found.content, 16)
                records.append((segment, row.number, content, id_hash(found.dialogue.id), len(rows), dropped))
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    os.replace(rejected_name, files.rejected)
    os.replace(invalid_name, files.invalid)
    temporary = files.records.with_name(f".{files.records.name}.{os.getpid()}.tmp.npy")
    np.save(temporary, np.array(records, RECORD))
    os.replace(temporary, files.records)
    return counts


def _rows(part: Part) -> Iterator[tuple[int, Row]]:
    for index, segment in enumerate(part.segments):
        for row in read_segment(segment):
            yield index, row


def _instances(found: Examined, reader: Source, config: DecomposeConfig) -> list[dict[str, Any]]:
    split = found.dialogue.split or split_of(found.dialogue.id)
    return cut_rows(found.texts, split, reader, config)


def work(job: dict[str, Any]) -> list[int]:
    """Decomposes the part that a job names; returns the number of rows of each of its segments."""
    config = DecomposeConfig.model_validate(job["config"])
    return work_on_part(Part.from_json(job["part"]), Path(job["folder"]), get_source(job["format"]), config)


if __name__ == "__main__":
    serve(work)
