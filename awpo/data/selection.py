"""Stage "select": from instances those that are to be trained on, of one folder or of several.

In order: near-duplicate dialogues go; training dialogues that overlap with a benchmark's questions go; instances that
are too long go; of what is left in the training split a mixture is taken. Each part is off where it is not asked for.
Near-duplicates are looked for in all splits, and one of the training split goes before one that is held out. The
order of rows is that of the input; nothing but whole rows is left out.

The input is read twice, a dialogue at a time. In memory lie about 40 bytes a dialogue, on disk what
`near_duplicates` says.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from awpo.artifacts import Manifest, input_identity, open_stage
from awpo.data import mixture, store, strict_json
from awpo.data.settings import SelectConfig
from awpo.errors import UserError
from awpo.events import Progress, silent

VERSION = 1
CONTAMINATED = "contaminated.jsonl"
_WORK = ".select"
ROWS_PER_REPORT = 2000
ROWS_AT_ONCE = 64  # instances tokenised together


class _Dialogue:
    """The rows of one dialogue, in order."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        last = rows[-1]
        self.source, self.id, self.split, self.steps = last["source"], last["dialogue_id"], last["split"], last["steps"]

    def messages(self) -> list[dict[str, Any]]:
        """The whole dialogue, in stored form."""
        return [*json.loads(self.rows[-1]["prompt"]), json.loads(self.rows[-1]["target"])]

    def key(self) -> int:
        """63 bits by which near-duplicates are ordered: those of the training split come after all others."""
        text = "\0".join((self.source, self.id, *(row["id"] for row in self.rows)))
        bits = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 2
        return bits | (self.split == "train") << 62


def _dialogues(folders: list[Path]) -> Iterator[_Dialogue]:
    for folder in folders:
        for _, rows in groupby(store.iterate_rows(folder), key=lambda row: (row["source"], row["dialogue_id"])):
            # Formats whose rows are steps of their own may hold several of one dialogue, one after another.
            pending: list[dict[str, Any]] = []
            for row in rows:
                if pending and row["step"] <= pending[-1]["step"]:
                    yield _Dialogue(pending)
                    pending = []
                pending.append(row)
            yield _Dialogue(pending)


def select_instances(folders: list[Path], out: Path, config: SelectConfig, *, progress: Progress = silent) -> Manifest:
    """Writes what `config` leaves of the instances of `folders`, in their order, into `out`.

    Counts: dialogues and instances read and left; near_duplicates and contaminated (by benchmark) by source; lengths,
    a table by source; mixture, the dialogues taken by source and steps.
    `contaminated.jsonl` lists each dialogue that overlaps with a benchmark. Raises UserError where a folder, a
    benchmark or a tokenizer cannot be read, or nothing is left.
    """
    inputs = {f"instances {index}": input_identity(folder) for index, folder in enumerate(folders)}
    if config.decontamination is not None:
        for name, text in config.decontamination.benchmarks.items():
            path = Path(text.path)
            inputs[f"benchmark {name}"] = input_identity(path) if path.exists() else text.path
    identity = {"select": VERSION, "store": store.VERSION, **config.model_dump(mode="json")}
    with open_stage(out, "select", inputs, identity) as stage:
        if stage.finished:
            return stage.manifest
        work = stage.folder / _WORK
        shutil.rmtree(work, ignore_errors=True)
        try:
            counts = _Selection(folders, stage.folder, work, config, progress).run()
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return stage.finish(counts)


class _Selection:
    def __init__(self, folders: list[Path], out: Path, work: Path, config: SelectConfig, progress: Progress) -> None:
        self.folders, self.out, self.work, self.config, self.progress = folders, out, work, config, progress
        self.total = sum(store.count_instances(folder) for folder in folders)
        self.counts: dict[str, Any] = {}
        self.cells: dict[tuple[str, str], int] = {}

    def run(self) -> dict[str, Any]:
        """Reads, decides, writes; returns the counts."""
        keep, instances = self._decide()
        split: Counter[str] = Counter()
        source: Counter[str] = Counter()

        def rows() -> Iterator[dict[str, Any]]:
            at = done = 0
            for index, dialogue in enumerate(_dialogues(self.folders)):
                for row in dialogue.rows:
                    if keep[index] and instances[at]:
                        split[row["split"]] += 1
                        source[row["source"]] += 1
                        yield row
                    at += 1
                done = self._report(done, at, "instances written")

        written = store.write_rows(self.out, rows())
        if not written:
            raise UserError("nothing is left of the instances; ask for less")
        self.progress(self.total, self.total, "instances written")
        return {
            "dialogues_read": len(keep),
            "instances_read": self.total,
            "instances": written,
            **self.counts,
            "instances_by_split": dict(sorted(split.items())),
            "instances_by_source": dict(sorted(source.items())),
        }

    def _report(self, before: int, at: int, what: str) -> int:
        if at // ROWS_PER_REPORT != before // ROWS_PER_REPORT:
            self.progress(at, self.total, what)
        return at

    def _decide(self) -> tuple[np.ndarray, np.ndarray]:
        """Which dialogues stay, and which instances of them."""
        config = self.config
        near = contamination = lengths = None
        if config.near_duplicates is not None:
            from awpo.data.near_duplicates import NearDuplicates

            near = NearDuplicates(config.near_duplicates, self.work, self.total)
        if config.decontamination is not None:
            from awpo.data.contamination import Contamination

            contamination = Contamination(config.decontamination)
        if config.lengths is not None:
            from awpo.data.lengths import Lengths

            lengths = Lengths(config.lengths)
        fits = np.ones(self.total, bool)
        cells = np.full(self.total, -1, "i4")
        ranks = np.zeros(self.total if config.mixture else 0, "u8")
        gone = np.zeros(self.total, bool)
        sources: list[str] = []
        source_of = np.zeros(self.total, "i4")
        overlaps: dict[str, Counter[str]] = {}
        number = at = done = 0
        pending: list[tuple[int, dict[str, Any]]] = []

        def measure() -> None:
            assert lengths is not None
            found = lengths.fits([store.instance_of(row) for _, row in pending])
            for (place, _), fitting in zip(pending, found, strict=True):
                fits[place] = fitting
            pending.clear()

        with open(self.out / CONTAMINATED, "w", encoding="utf-8") if contamination else _nowhere() as listed:
            for dialogue in _dialogues(self.folders):
                messages = dialogue.messages() if near or contamination else []
                if dialogue.source not in sources:
                    sources.append(dialogue.source)
                source_of[number] = sources.index(dialogue.source)
                if near is not None:
                    from awpo.data.near_duplicates import said_in

                    near.add(said_in(messages), dialogue.key())
                if contamination is not None:
                    said = [message.get("content") or "" for message in messages if message["role"] == "user"]
                    if names := contamination.find(said):
                        overlaps.setdefault(dialogue.source, Counter()).update(names)
                        line = {"dialogue": dialogue.id, "source": dialogue.source, "split": dialogue.split}
                        listed.write(strict_json.dump({**line, "benchmarks": names}) + "\n")
                        drop = config.decontamination is not None and config.decontamination.found == "drop"
                        gone[number] = drop and dialogue.split == "train"
                if lengths is not None:
                    pending.extend((at + index, row) for index, row in enumerate(dialogue.rows))
                    if len(pending) >= ROWS_AT_ONCE:
                        measure()
                if config.mixture is not None and dialogue.split == "train":
                    cell = (dialogue.source, mixture.stratum(dialogue.steps))
                    cells[number] = self.cells.setdefault(cell, len(self.cells))
                    ranks[number] = mixture.rank(config.mixture.seed, f"{dialogue.source}\0{dialogue.id}")
                number, at = number + 1, at + len(dialogue.rows)
                done = self._report(done, at, "instances read")
        if pending:
            measure()
        keep, cells, source_of = ~gone[:number], cells[:number], source_of[:number]
        if near is not None:
            same = near.duplicates()
            keep &= ~same
            found = np.bincount(source_of[same], minlength=len(sources)).tolist()
            self.counts["near_duplicates"] = {name: count for name, count in zip(sources, found, strict=True) if count}
        if contamination is not None:
            self.counts["benchmark_questions"] = contamination.questions
            self.counts["contaminated"] = {
                name: dict(sorted(found.items())) for name, found in sorted(overlaps.items())
            }
        if lengths is not None:
            table = {name: {**row, "up_to": dict(row["up_to"])} for name, row in sorted(lengths.table.items())}
            self.counts["lengths"] = table
        if config.mixture is not None:
            self._mix(keep, cells, ranks[:number])
        return keep, fits

    def _mix(self, keep: np.ndarray, cells: np.ndarray, ranks: np.ndarray) -> None:
        assert self.config.mixture is not None
        left = np.where(keep, cells, -1)
        available = {cell: int((left == number).sum()) for cell, number in self.cells.items()}
        available = {cell: count for cell, count in available.items() if count}
        take = mixture.numbers_to_take(available, self.config.mixture)
        chosen = mixture.choose(left, ranks, [take.get(cell, 0) for cell in self.cells])
        keep &= chosen
        self.counts["mixture"] = {f"{source} · {steps}": count for (source, steps), count in sorted(take.items())}


class _nowhere:
    """A file for those who list nothing."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def write(self, text: str) -> None:
        return None
