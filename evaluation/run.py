"""The stage "evaluation": every benchmark of the config on one checkpoint.

Each finished part of a benchmark is kept in a hidden folder, so that a stage that was interrupted goes on where it
stood. A part without items is not run: it has no row in `scores.json`, and the manifest names it with the reason.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from awpo.artifacts import Manifest, code_version, input_identity, open_stage, write_atomically
from awpo.config import EvaluationConfig
from awpo.events import Progress, RunLog
from awpo.types import content_hash
from evaluation.benchmarks import Benchmark, Part, PartResult, get_benchmark, identities
from evaluation.generate import Generator
from evaluation.held_out import needed
from evaluation.items import ITEMS, SCORES, Item, ScoreRow, read_items, write_items

STAGE = "evaluation"
PARTS = ".parts"


def evaluate(checkpoint: Path, instances: Path | None, out: Path, config: EvaluationConfig) -> Manifest:
    """Runs the stage; returns its manifest, at once where `out` already holds this result.

    `instances` may be None where the config asks for no benchmark that needs it. Raises UserError where the
    checkpoint or the instances cannot be used, or a benchmark's package is missing, before anything is generated.
    """
    inputs = {"checkpoint": input_identity(checkpoint)}
    if "held_out" in config.benchmarks:
        inputs["instances"] = input_identity(needed(instances))
    inputs |= identities(config)
    benchmarks = [get_benchmark(name) for name in config.benchmarks]
    with open_stage(out, STAGE, inputs, config.model_dump(mode="json", exclude={"threads", "benchmark_data"})) as stage:
        if stage.finished:
            return stage.manifest
        log = RunLog(out)
        parts, missing = _plan(benchmarks, instances, config)
        for name, reason in missing.items():
            log.warning(f"{name} is not run: {reason}")
        items: list[Item] = []
        rows: list[ScoreRow] = []
        total, done, start = sum(part.size for part in parts), 0, time.monotonic()
        log.progress(0, total, "completions")
        from evaluation.local_generator import LocalGenerator  # torch takes seconds; mistakes are told before

        generator = LocalGenerator(checkpoint, config.threads, config.batch_size)
        for part in parts:
            found, scored = _kept(out / PARTS, part, generator, _shifted(log, done, total))
            items += found
            rows += scored
            done += part.size
        for benchmark in benchmarks:
            rows += benchmark.summary([row for row in rows if row["benchmark"] == benchmark.name])
        counts = {
            "items": len({(item.benchmark, item.item_id) for item in items}),
            "completions": len(items),
            "generated_tokens": sum(item.response_tokens for item in items),
            "no_room": sum(item.finish == "no_room" for item in items),
            "parts": [part.name for part in parts],
            "not_run": missing,
            "work_seconds": round(time.monotonic() - start, 3),
        }
        if counts["no_room"]:
            log.warning(f"{counts['no_room']} prompts fill the model's context; they count as wrong")
        write_items(out / ITEMS, items)
        write_atomically(out / SCORES, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        log.progress(total, total, "completions")
        manifest = stage.finish(counts)
        shutil.rmtree(out / PARTS, ignore_errors=True)
        return manifest


def _plan(
    benchmarks: Sequence[Benchmark], instances: Path | None, config: EvaluationConfig
) -> tuple[list[Part], dict[str, str]]:
    """The parts of an evaluation in order, and those that cannot be run with the reason."""
    parts: list[Part] = []
    missing: dict[str, str] = {}
    for benchmark in benchmarks:
        its_parts, its_missing = benchmark.parts(instances, config)
        parts += its_parts
        missing |= its_missing
    return parts, missing


def _shifted(log: RunLog, before: int, overall: int) -> Progress:
    """Progress of one part as that of the whole stage, at most once a second."""
    last = 0.0

    def progress(done: int, total: int, what: str = "") -> None:
        nonlocal last
        if time.monotonic() - last >= 1.0:
            last = time.monotonic()
            log.progress(before + done, overall, what)

    return progress


def _kept(folder: Path, part: Part, generator: Generator, progress: Progress) -> PartResult:
    """A part's result: from the folder where an interrupted run left it, else run and kept there."""
    stem = content_hash([part.name, code_version()])  # what other code made is made again
    table, scores = folder / f"{stem}.parquet", folder / f"{stem}.json"
    if scores.exists():  # written last
        return read_items(table), json.loads(scores.read_text("utf-8"))
    items, rows = part.run(generator, progress)
    folder.mkdir(exist_ok=True)
    write_items(table, items)
    write_atomically(scores, json.dumps(rows, ensure_ascii=False))
    return items, rows
