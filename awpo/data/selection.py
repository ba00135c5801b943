"""Stage "select": from instances those that are to be trained on, of one folder or of several.

In order: near-duplicate dialogues go; training dialogues that overlap with a benchmark's questions go; instances that
are too long go; of what is left in the training split a mixture is taken. Each part is off where it is not asked for.
Near-duplicates are looked for in all splits, and one of the training split goes before one that is held out. The
order of rows is that of the input; nothing but whole rows is left out.

The input is read twice, in parts, by several processes (`select_work`): once to see what there is, once to write what
stays. This process decides in between, part by part: what stays in its memory is some bytes for each near-duplicate.
What is done is on disk, so that a run that was killed goes on where it was; the bytes of the result depend on input
and config alone.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from awpo.artifacts import Manifest, input_identity, open_stage
from awpo.data import contamination, select_work, store
from awpo.data.instance_parts import InstancePart, part_rows, plan_instance_parts, read_rows
from awpo.data.part_processes import PartProcesses, default_workers
from awpo.data.select_decisions import Decisions
from awpo.data.select_work import SelectFiles
from awpo.data.settings import SelectConfig
from awpo.errors import UserError
from awpo.events import Progress, silent
from awpo.files import write_atomically

VERSION = 2
CONTAMINATED = "contaminated.jsonl"
FOLDER = ".select"


def select_identity(folders: list[Path], config: SelectConfig) -> tuple[dict[str, str], dict[str, Any]]:
    """The inputs and the config of the stage's manifest. Raises UserError for an input that is not there."""
    inputs = {f"instances {index}": input_identity(folder) for index, folder in enumerate(folders)}
    if config.decontamination is not None:
        for name, text in config.decontamination.benchmarks.items():
            if text.path == contamination.INSTALLED:
                inputs[f"benchmark {name}"] = f"bfcl-eval {_version('bfcl-eval')}"
            else:
                inputs[f"benchmark {name}"] = input_identity(Path(text.path))
    if config.lengths is not None:
        from awpo.data.lengths import tokenizer_identity

        inputs["tokenizer"] = tokenizer_identity(config.lengths)
    return inputs, {"select": VERSION, "store": store.VERSION, **config.model_dump(mode="json")}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def select_instances(
    folders: list[Path],
    out: Path,
    config: SelectConfig,
    *,
    progress: Progress = silent,
    workers: int | None = None,
) -> Manifest:
    """Writes what `config` leaves of the instances of `folders`, in their order, into `out`.

    Counts: dialogues and instances read and left; `selection`, by source the instances read, those left out by the
    first reason that holds of `select_decisions.REASONS`, and those left, which add up; near_duplicates, the dialogues that go by source;
    benchmark_questions and contaminated, the dialogues that overlap by source and benchmark, kept or not; lengths, a
    table of tokens by source; mixture, the dialogues taken by source and steps.
    `contaminated.jsonl` lists each dialogue that overlaps with a benchmark. Work is shared by `workers` processes, all
    cores where none is named; what is small is done in this one. Raises UserError where a folder, a benchmark or a
    tokenizer cannot be read, or nothing is left.
    """
    inputs, identity = select_identity(folders, config)
    with open_stage(out, "select", inputs, identity) as stage:
        if stage.finished:
            return stage.manifest
        total = sum(store.count_instances(folder) for folder in folders)
        parts = plan_instance_parts(folders, part_rows(total))
        selection = _Selection(folders, parts, stage.folder, config, progress)
        selection.begin()
        try:
            counts = selection.run(workers or default_workers())
        except UserError:  # what has to be mended makes other work of it: there is nothing to go on from
            shutil.rmtree(selection.work)
            raise
        shutil.rmtree(selection.work)
        return stage.finish(counts)


class _Selection:
    def __init__(
        self, folders: list[Path], parts: list[InstancePart], out: Path, config: SelectConfig, progress: Progress
    ) -> None:
        self.folders, self.parts, self.out, self.config, self.progress = folders, parts, out, config, progress
        self.work = out / FOLDER
        self.total = sum(part.rows for part in parts)
        self.known: list[dict[str, Any]] = []  # by part: its sources, dialogues and overlaps

    def begin(self) -> None:
        """Takes up unfinished work of the same plan, or begins anew."""
        plan = {"parts": [part.to_json() for part in self.parts], "version": VERSION}
        text = json.dumps(plan)
        noted = self.work / "plan.json"
        stale = [*self.work.glob("*.tmp*"), *self.out.glob(".instances-*.tmp")]
        if not (noted.exists() and noted.read_text("utf-8") == text):
            shutil.rmtree(self.work, ignore_errors=True)
            stale = list(self.out.glob("*instances-*"))
        for path in stale:
            path.unlink(missing_ok=True)
        self.work.mkdir(exist_ok=True)
        write_atomically(noted, text)

    def run(self, workers: int) -> dict[str, Any]:
        """Examines, decides, writes; returns the counts."""
        self.config_text = self.config.model_dump_json()
        processes = PartProcesses(workers, "awpo.data.select_work") if workers > 1 and len(self.parts) > 1 else None
        try:
            self._examine(processes)
            same = self._near_duplicates(processes)
            counts = Decisions(self.work, self.known, self.config, same).write()
            self._write(processes)
        finally:
            if processes is not None:
                processes.close()
        return {**counts, **self._count()}

    def _do(
        self, jobs: Iterable[tuple[dict[str, Any], str, int]], processes: PartProcesses | None, total: int, what: str
    ) -> None:
        """Does jobs (job, its name, its size), in processes or in this one."""
        waiting: deque[tuple[Future[Any], int]] = deque()
        done, start = 0, time.monotonic()

        def settle(size: int) -> None:
            nonlocal done
            done += size
            seconds = max(time.monotonic() - start, 1e-9)
            left = seconds * (total - done) / max(done, 1)
            self.progress(done, total, f"{what} · {done / seconds:,.0f}/s, {left:.0f} s left")

        for job, name, size in jobs:
            job = {**job, "folder": str(self.work), "config": self.config_text}
            if processes is None:
                select_work.work(job)
                settle(size)
                continue
            waiting.append((processes.submit(job, name), size))
            if len(waiting) >= 64:
                waiting[0][0].result()
            while waiting and waiting[0][0].done():
                future, size = waiting.popleft()
                future.result()
                settle(size)
        for future, size in waiting:
            future.result()
            settle(size)

    def _examine(self, processes: PartProcesses | None) -> None:
        files = [SelectFiles(self.work, part.number) for part in self.parts]
        missing = [part for part in self.parts if not files[part.number].done.exists()]
        jobs = (
            ({"step": "examine", "part": part.to_json()}, f"examining part {part.number}", part.rows)
            for part in missing
        )
        self._do(jobs, processes, sum(part.rows for part in missing), "instances examined")
        self.known = [json.loads(part_files.done.read_text("utf-8")) for part_files in files]

    def _near_duplicates(self, processes: PartProcesses | None) -> np.ndarray:
        """The dialogues that are near-duplicates, by their number over all parts, in order."""
        if self.config.near_duplicates is None:
            return np.zeros(0, "i8")
        from awpo.data.near_duplicates import buckets_of, duplicates_of

        sizes = [known["dialogues"] for known in self.known]
        buckets = buckets_of(sizes, self.config.near_duplicates)
        paths = {bucket: select_work.pairs_file(self.work, bucket) for bucket in buckets}
        missing = [bucket for bucket in buckets if not paths[bucket].exists()]
        jobs = (({"step": "pairs", "bucket": bucket, "sizes": sizes}, f"bucket {bucket}", 1) for bucket in missing)
        self._do(jobs, processes, len(missing), "buckets compared")
        return duplicates_of(self.work, sizes, (np.load(path) for path in paths.values()))

    # The result

    def _write(self, processes: PartProcesses | None) -> None:
        """Writes shards of as many parts as fill one, and the list of what overlaps with benchmarks."""
        noted = _joined_metadata(self.folders)
        groups: list[list[InstancePart]] = []
        rows = store.ROWS_PER_SHARD
        sizes: list[int] = []
        for part in self.parts:
            kept = int(np.load(SelectFiles(self.work, part.number).keep).sum())
            if rows + kept > store.ROWS_PER_SHARD:
                groups.append([])
                sizes.append(0)
                rows = 0
            groups[-1].append(part)
            sizes[-1] += part.rows
            rows += kept
        paths = [self.out / f"instances-{number:05d}.parquet" for number in range(len(groups))]
        missing = [number for number, path in enumerate(paths) if not path.exists()]
        jobs = (
            (
                {
                    "step": "write",
                    "path": str(paths[number]),
                    "parts": [part.to_json() for part in groups[number]],
                    "metadata": noted,
                },
                f"writing {paths[number].name}",
                sizes[number],
            )
            for number in missing
        )
        self._do(jobs, processes, sum(sizes[number] for number in missing), "instances written")
        if self.config.decontamination is not None:
            with open(self.out / CONTAMINATED, "wb") as listed:
                for part in self.parts:
                    with open(SelectFiles(self.work, part.number).contaminated, "rb") as found:
                        shutil.copyfileobj(found, listed)

    def _count(self) -> dict[str, Any]:
        """Counts of what was written, and of overlaps."""
        counts: dict[str, Counter[str]] = {"split": Counter(), "source": Counter()}
        for path in store.shard_paths(self.out):
            for table in read_rows(InstancePart(0, ((str(path), 0, store.count_instances(path)),)), list(counts)):
                for name, counter in counts.items():
                    for item in pc.value_counts(table[name]).to_pylist():
                        counter[item["values"]] += item["counts"]
        found: dict[str, Any] = {
            f"instances_by_{name}": dict(sorted(counter.items())) for name, counter in counts.items()
        }
        if self.config.decontamination is not None:
            found["benchmark_questions"] = self.known[0]["questions"]
            overlaps: dict[str, Counter[str]] = {}
            for known in self.known:
                for source, names in known["overlaps"].items():
                    overlaps.setdefault(source, Counter()).update(names)
            found["contaminated"] = {source: dict(sorted(names.items())) for source, names in sorted(overlaps.items())}
        return found


def _joined_metadata(folders: list[Path]) -> dict[str, str]:
    """What the folders' shards say of themselves, such as who wrote their rationales."""
    found: dict[str, list[str]] = {}
    for folder in folders:
        for name, value in store.read_metadata(folder).items():
            if value not in found.setdefault(name, []):
                found[name].append(value)
    return {name: " + ".join(values) for name, values in sorted(found.items())}
