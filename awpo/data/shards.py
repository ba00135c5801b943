"""The stage "decompose" on a large source: parts worked on by several processes, settled in order by this one.

Each process reads a part and writes a shard (`part_work`). This one only compares hashes: a dialogue that repeats one
of an earlier part, or of its own, is taken out of the shard. Everything that it knows it has written down, part by
part, so that a run that was killed goes on at the first part that is not settled; the bytes of the result depend on
the source alone.

Memory: 16 bytes for each dialogue (8 of the hash of its content, 8 of its id's), held in sorted arrays, twice that
while arrays are merged; everything else is bounded by a row group. Two different dialogues have one 8-byte hash with
a probability of about n^2 / 2^65 among n: 3e-8 for a million; the later one would count as a repetition.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from awpo.data.decompose import rate_and_rest
from awpo.data.masking import kinds_of
from awpo.data.part_processes import PartProcesses, default_workers
from awpo.data.part_work import PartFiles
from awpo.data.parts import Part, part_bytes, plan_parts
from awpo.data.settings import DecomposeConfig
from awpo.data.sources.base import Rejected, Source
from awpo.data.store import ROWS_PER_GROUP, ShardWriter
from awpo.data.tally import Tally
from awpo.events import Progress
from awpo.files import write_atomically

FOLDER = ".parts"
LAYOUT = 1


class HashSet:
    """A set of 64-bit hashes: sorted arrays, each at least twice as long as the next; 8 bytes a hash."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def add(self, hashes: np.ndarray) -> None:
        """Adds hashes that are not in the set yet."""
        run = np.sort(hashes)
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = np.concatenate([self._runs.pop(), run])
            run.sort(kind="stable")
        self._runs.append(run)

    def holds(self, hashes: np.ndarray) -> np.ndarray:
        """Which of the hashes are in the set."""
        found = np.zeros(len(hashes), bool)
        for run in self._runs:
            if len(run):
                places = np.minimum(np.searchsorted(run, hashes), len(run) - 1)
                found |= run[places] == hashes
        return found


class _Settling:
    """What is known of the parts settled so far."""

    def __init__(self, folder: Path, out: Path, reader: Source, config: DecomposeConfig) -> None:
        self.folder, self.out, self.reader, self.config = folder, out, reader, config
        self.tally = Tally()
        self.next = 0
        self.done_bytes = 0
        self._contents, self._ids = HashSet(), HashSet()
        self._file, self._file_rows = "", 0  # rows of this file that earlier parts had

    def resume(self) -> None:
        """Takes up what an earlier run has settled."""
        while (files := PartFiles(self.folder, self.next)).done.exists() and self._shard(self.next).exists():
            known = json.loads(files.done.read_text("utf-8"))
            hashes = np.load(files.hashes)
            self._remember(hashes[0], hashes[1])
            self.tally.merge(Tally.from_plain(known["tally"]))
            self._file, self._file_rows = known["file"], known["file_rows"]
            self.done_bytes += known["size"]
            self.next += 1

    def _shard(self, number: int) -> Path:
        return self.out / f"instances-{number:05d}.parquet"

    def _remember(self, contents: np.ndarray, ids: np.ndarray) -> None:
        self._contents.add(contents)
        if not self.reader.last_step_only:
            self._ids.add(ids)

    def settle(self, part: Part, segment_rows: list[int]) -> None:
        """Decides which of a part's dialogues stay, names its shard, and writes down that it is settled."""
        files = PartFiles(self.folder, part.number)
        records = np.load(files.records)
        first_rows = self._first_rows(part, segment_rows)
        repeated = self._repetitions(records)
        tally = Tally(rows=sum(segment_rows))
        names = [segment.name for segment in part.segments]
        rejections = self._rejections(files, records, repeated, first_rows, names)
        tally.rejected.update(rejection["reason"] for rejection in rejections)
        _write_lines(files.settled_rejected, rejections)
        gone = {(int(records["segment"][i]), int(records["row"][i])) for i in repeated}
        invalid = []
        for line in _read_lines(files.invalid):
            segment = line.pop("segment")
            if (segment, line["row"]) not in gone:
                line["row"] += first_rows[segment]
                tally.add_invalid(line["source"], line["reason"])
                invalid.append(line)
        _write_lines(files.settled_invalid, invalid)
        keep = np.ones(len(records), bool)
        keep[list(repeated)] = False
        keep &= ~records["dropped"]
        stays = np.repeat(keep, records["instances"])
        if not stays.all():
            _filter_shard(files.shard, stays)
        self._count(files.shard, records["instances"][keep], tally)
        contents, ids = records["content"][keep], np.unique(records["id"][keep])
        self._remember(contents, ids)
        with open(files.hashes, "wb") as file:
            width = len(contents)
            padded = np.concatenate([ids, np.repeat(ids[-1:], width - len(ids))]) if width else ids
            np.save(file, np.stack([contents, padded]))
        os.replace(files.shard, self._shard(part.number))
        last = part.segments[-1]
        self._file, self._file_rows = last.path, first_rows[-1] + segment_rows[-1]
        known = {"tally": tally.plain(), "file": self._file, "file_rows": self._file_rows, "size": part.size}
        write_atomically(files.done, json.dumps(known))
        files.remove_work()
        self.tally.merge(tally)
        self.done_bytes += part.size
        self.next = part.number + 1

    def _first_rows(self, part: Part, segment_rows: list[int]) -> list[int]:
        """What is added to the numbers of a segment's rows; parquet and copied rows have theirs already."""
        found, file, before = [], self._file, self._file_rows
        for segment, rows in zip(part.segments, segment_rows, strict=True):
            if segment.path != file:
                file, before = segment.path, 0
            found.append(before if segment.kind == "lines" else 0)
            before += rows
        return found

    def _repetitions(self, records: np.ndarray) -> dict[int, str]:
        """The records that repeat an earlier dialogue, and how."""
        by_id = not self.reader.last_step_only
        known_contents = self._contents.holds(records["content"])
        known_ids = self._ids.holds(records["id"])
        contents, ids = records["content"].tolist(), records["id"].tolist()
        seen_contents: set[int] = set()
        seen_ids: set[int] = set()
        found: dict[int, str] = {}
        for index, dropped in enumerate(records["dropped"].tolist()):
            if known_contents[index] or contents[index] in seen_contents:
                found[index] = "the same as an earlier row"
            elif by_id and (known_ids[index] or ids[index] in seen_ids):
                found[index] = "the id of an earlier dialogue"
            elif not dropped:
                seen_contents.add(contents[index])
                seen_ids.add(ids[index])
        return found

    def _rejections(
        self, files: PartFiles, records: np.ndarray, repeated: dict[int, str], first_rows: list[int], names: list[str]
    ) -> list[dict[str, Any]]:
        """The part's rejected rows in order; a row that repeats another is rejected for that."""
        found = {}
        for line in _read_lines(files.rejected):
            segment = line.pop("segment")
            found[segment, line["row"]] = {**line, "row": line["row"] + first_rows[segment]}
        for index, reason in repeated.items():
            segment, row = int(records["segment"][index]), int(records["row"][index])
            found[segment, row] = Rejected(row + first_rows[segment], reason, "", names[segment]).to_json()
        return [found[place] for place in sorted(found)]

    def _count(self, shard: Path, instances: np.ndarray, tally: Tally) -> None:
        table = pq.read_table(shard, columns=["source", "split", "kind"])
        tally.dialogues, tally.instances = len(instances), table.num_rows
        for name in ("source", "split", "kind"):
            for item in table[name].value_counts().to_pylist():
                getattr(tally, name)[item["values"]] = item["counts"]
        if self.config.masking is not None and len(instances):
            firsts = np.cumsum(instances) - instances
            for item in table["source"].take(pa.array(firsts)).value_counts().to_pylist():
                tally.masked.update(Counter(dict.fromkeys(kinds_of(item["values"]), item["counts"])))


def _filter_shard(path: Path, stays: np.ndarray) -> None:
    """Takes rows out of a shard."""
    writer, at = ShardWriter(path), 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_GROUP):
                mask = pa.array(stays[at : at + batch.num_rows])
                writer.add_table(pa.Table.from_batches([batch]).filter(mask).replace_schema_metadata())
                at += batch.num_rows
        writer.close()
    except BaseException:
        writer.abandon()
        raise


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _join(paths: Iterator[Path], file: IO[bytes]) -> None:
    for path in paths:
        with open(path, "rb") as part:
            shutil.copyfileobj(part, file)


def decompose_parts(
    files: list[Path],
    total: int,
    out: Path,
    reader: Source,
    config: DecomposeConfig,
    progress: Progress,
    workers: int | None = None,
) -> Tally:
    """Decomposes a large source into the shards, rejected.jsonl and invalid_calls.jsonl of `out`; see the module.

    `out` is the folder of an open stage. Raises UserError where a file cannot be read or a text cannot be stored.
    """
    folder, size = out / FOLDER, part_bytes(total)
    plan = {"layout": LAYOUT, "size": size}
    noted = folder / "plan.json"
    if folder.exists() and not (noted.exists() and json.loads(noted.read_text("utf-8")) == plan):
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    write_atomically(noted, json.dumps(plan))
    for stale in (*folder.glob(".*.tmp*"), *out.glob(".instances-*.tmp")):
        stale.unlink(missing_ok=True)
    settling = _Settling(folder, out, reader, config)
    settling.resume()
    first, before, bytes_before = settling.next, settling.tally.dialogues, settling.done_bytes
    count = workers or default_workers()
    processes = PartProcesses(count, "awpo.data.part_work")
    job = {"folder": str(folder), "format": reader.name, "config": config.model_dump(mode="json")}
    waiting: deque[tuple[Part, Future[list[int]]]] = deque()
    start = time.monotonic()

    def settle_one() -> None:
        part, future = waiting.popleft()
        settling.settle(part, future.result())
        gone, work = time.monotonic() - start, settling.done_bytes - bytes_before
        rate = rate_and_rest(settling.tally.dialogues - before, work, total - bytes_before, gone)
        progress(min(settling.done_bytes, total), total, f"bytes read · {rate}")

    try:
        for part in plan_parts(files, size, folder, lambda number: number >= first):
            if part.number < first:
                continue
            waiting.append((part, processes.submit({**job, "part": part.to_json()}, f"part {part.number}")))
            while len(waiting) >= 2 * count:
                settle_one()
        while waiting:
            settle_one()
    finally:
        processes.close()
    for name, attribute in (("rejected.jsonl", "settled_rejected"), ("invalid_calls.jsonl", "settled_invalid")):
        with open(out / name, "wb") as file:
            _join((getattr(PartFiles(folder, number), attribute) for number in range(settling.next)), file)
    return settling.tally
