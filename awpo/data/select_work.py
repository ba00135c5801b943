"""The work of selection on one part, by a process of its own: `python -m awpo.data.select_work`.

A part is examined: what its dialogues and instances are is written down, and nothing decided. Near-duplicates are
looked for in one bucket. A shard is written of the rows that stay.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from awpo.data import mixture, store, strict_json
from awpo.data.instance_parts import InstancePart, continues, read_rows
from awpo.data.part_processes import serve
from awpo.data.settings import SelectConfig
from awpo.files import write_atomically

# Of each dialogue: its rows; its source, by its place among those of the part; whether it may be left out for the
# benchmarks or the mixture; whether it overlaps with a benchmark; its range of steps; its rank in the mixture.
DIALOGUE = np.dtype(
    [("rows", "i4"), ("source", "i4"), ("train", "?"), ("overlaps", "?"), ("stratum", "i1"), ("rank", "u8")]
)
ROWS_AT_ONCE = 64  # instances tokenised together


class SelectFiles:
    """The files of a part's work in the folder of unfinished work; `done` is written when all others are there."""

    def __init__(self, folder: Path, number: int) -> None:
        name = f"{number:05d}"
        self.dialogues, self.tokens = folder / f"{name}.dialogues.npy", folder / f"{name}.tokens.npy"
        self.contaminated, self.keep = folder / f"{name}.contaminated.jsonl", folder / f"{name}.keep.npy"
        self.done = folder / f"{name}.done"


def pairs_file(folder: Path, bucket: tuple[int, int, int]) -> Path:
    """The file of the pairs of a bucket."""
    return folder / f"pairs-{bucket[0]:03d}-{bucket[1]:05d}.npy"


class _Dialogue:
    """The rows of one dialogue, in order."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        last = rows[-1]
        self.source, self.id, self.split, self.steps = last["source"], last["dialogue_id"], last["split"], last["steps"]

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        """The whole dialogue, in stored form."""
        return [*_parse(self.rows[-1]["prompt"]), _parse(self.rows[-1]["target"])]

    @cached_property
    def name(self) -> str:
        """What tells this dialogue from all others that are not the same."""
        return "\0".join((self.source, self.id, *(row["id"] for row in self.rows)))

    def key(self) -> int:
        """63 bits by which near-duplicates are ordered: those of the training split come after all others."""
        bits = int.from_bytes(hashlib.sha256(self.name.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 2
        return bits | (self.split == "train") << 62


def _parse(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:  # an integer of many digits
        return json.loads(text)


def dialogues_of(part: InstancePart, columns: list[str] | None = None) -> Iterator[_Dialogue]:
    """The dialogues of a part, in order."""
    rows: list[dict[str, Any]] = []
    for table in read_rows(part, columns):
        for row in table.to_pylist():
            if rows and not continues(row, rows[-1]):
                yield _Dialogue(rows)
                rows = []
            rows.append(row)
    if rows:
        yield _Dialogue(rows)


class Examiner:
    """Looks at parts; holds what takes long to load: the benchmarks' questions, the tokenizer."""

    def __init__(self, config: SelectConfig) -> None:
        """Raises UserError where a benchmark or the tokenizer cannot be read."""
        self.config = config
        self.sketches = self.contamination = self.lengths = None
        if config.near_duplicates is not None:
            from awpo.data.near_duplicates import Sketches

            self.sketches = Sketches(config.near_duplicates)
        if config.decontamination is not None:
            from awpo.data.contamination import Contamination

            self.contamination = Contamination(config.decontamination)
        if config.lengths is not None:
            from awpo.data.lengths import Lengths

            self.lengths = Lengths(config.lengths)

    def examine(self, part: InstancePart, folder: Path) -> None:
        """Writes the files of a part. Raises UserError where a shard is damaged."""
        files = SelectFiles(folder, part.number)
        sources: dict[str, int] = {}
        records: list[tuple[int, int, bool, bool, int, int]] = []
        signatures: list[np.ndarray] = []
        keys: list[int] = []
        tokens: list[int] = []
        pending: list[dict[str, Any]] = []
        overlaps: dict[str, Counter[str]] = {}
        listed: list[str] = []
        for dialogue in dialogues_of(part, self._columns()):
            found = self._benchmarks(dialogue)
            if found:
                overlaps.setdefault(dialogue.source, Counter()).update(found)
                line = {"dialogue": dialogue.id, "source": dialogue.source, "split": dialogue.split}
                listed.append(strict_json.dump({**line, "benchmarks": found}) + "\n")
            if self.sketches is not None:
                from awpo.data.near_duplicates import said_in

                signatures.append(self.sketches.of(said_in(dialogue.messages)))
                keys.append(dialogue.key())
            if self.lengths is not None:
                pending += dialogue.rows
                if len(pending) >= ROWS_AT_ONCE:
                    tokens += self.lengths.count([store.instance_of(row) for row in pending])
                    pending = []
            source = sources.setdefault(dialogue.source, len(sources))
            place = mixture.STRATA.index(mixture.stratum(dialogue.steps))
            rank = mixture.rank(self.config.mixture.seed, dialogue.name) if self.config.mixture is not None else 0
            records.append((len(dialogue.rows), source, dialogue.split == "train", bool(found), place, rank))
        if self.lengths is not None:
            tokens += self.lengths.count([store.instance_of(row) for row in pending])
            np.save(files.tokens, np.array(tokens, "i4"))
        if self.config.near_duplicates is not None:
            from awpo.data.near_duplicates import write_part

            write_part(folder, part.number, signatures, keys, self.config.near_duplicates)
        np.save(files.dialogues, np.array(records, DIALOGUE))
        files.contaminated.write_text("".join(listed), "utf-8")
        questions = self.contamination.questions if self.contamination is not None else {}
        known = {"sources": list(sources), "dialogues": len(records), "overlaps": overlaps, "questions": questions}
        write_atomically(files.done, json.dumps(known))

    def _columns(self) -> list[str]:
        """What has to be read: tools and rationales only where tokens are counted, messages where they are looked at."""
        if self.lengths is not None:
            return list(store.SCHEMA.names)
        names = ["id", "source", "dialogue_id", "step", "steps", "split"]
        return names + ["prompt", "target"] * (self.sketches is not None or self.contamination is not None)

    def _benchmarks(self, dialogue: _Dialogue) -> list[str]:
        if self.contamination is None:
            return []
        said = [message.get("content") or "" for message in dialogue.messages if message["role"] == "user"]
        return self.contamination.find(said)


@lru_cache(maxsize=1)
def _examiner(config: str) -> Examiner:
    return Examiner(SelectConfig.model_validate_json(config))


def find_pairs(folder: Path, bucket: tuple[int, int, int], sizes: list[int], config: SelectConfig) -> None:
    """Writes the pairs of similar dialogues of a bucket."""
    from awpo.data.near_duplicates import similar_pairs

    assert config.near_duplicates is not None
    pairs = similar_pairs(folder, sizes, bucket, config.near_duplicates)
    temporary = pairs_file(folder, bucket).with_suffix(f".{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        np.save(file, pairs)
    os.replace(temporary, pairs_file(folder, bucket))


def write_shard(path: Path, parts: list[InstancePart], folder: Path, metadata: dict[str, str]) -> None:
    """Writes a shard of the rows of parts that stay; row groups are of about the usual size, however few stay."""
    writer = store.ShardWriter(path, metadata)
    pending: list[pa.Table] = []

    def flush() -> None:
        if pending:
            writer.add_table(pa.concat_tables(pending).combine_chunks())
            pending.clear()

    try:
        for part in parts:
            keep, at = np.load(SelectFiles(folder, part.number).keep), 0
            for table in read_rows(part):
                left = table.filter(pa.array(keep[at : at + table.num_rows])).replace_schema_metadata()
                at += table.num_rows
                rows = left.num_rows + sum(table.num_rows for table in pending)
                size = left.nbytes + sum(table.nbytes for table in pending)
                if rows > store.ROWS_PER_GROUP or size > store.BYTES_PER_GROUP:
                    flush()
                if left.num_rows:
                    pending.append(left)
        flush()
        writer.close()
    except BaseException:
        writer.abandon()
        raise


def work(job: dict[str, Any]) -> None:
    """Does what a job asks: `examine` a part, look for `pairs` in a bucket, or `write` a shard."""
    folder = Path(job["folder"])
    if job["step"] == "examine":
        _examiner(job["config"]).examine(InstancePart.from_json(job["part"]), folder)
    elif job["step"] == "pairs":
        band, place, ranges = job["bucket"]
        find_pairs(folder, (band, place, ranges), job["sizes"], SelectConfig.model_validate_json(job["config"]))
    else:
        parts = [InstancePart.from_json(part) for part in job["parts"]]
        write_shard(Path(job["path"]), parts, folder, job["metadata"])


if __name__ == "__main__":
    serve(work)
