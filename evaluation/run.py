"""The stage "evaluation": every benchmark of the config on one checkpoint.

Work is cut into parts (a split of held_out, a category of BFCL). Each finished part is kept in a hidden folder, so
that a stage that was interrupted goes on where it stood. A part without items is not run: it has no row in
`scores.json`, and the manifest names it with the reason.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from awpo.artifacts import Manifest, code_version, input_identity, open_stage, write_atomically
from awpo.config import EvaluationConfig
from awpo.errors import UserError
from awpo.events import Progress, RunLog
from awpo.types import Instance, content_hash
from evaluation import held_out
from evaluation.bfcl import benchmark as bfcl
from evaluation.bfcl.data import CATEGORIES, choose, installed_version, read_category
from evaluation.items import ITEMS, SCORES, Item, ScoreRow, read_items, write_items

if TYPE_CHECKING:
    from evaluation.generate import Generator

STAGE = "evaluation"
PARTS = ".parts"

PartResult = tuple[list[Item], list[ScoreRow]]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an evaluation: `name` is "benchmark/split", `size` its completions; `run` gives items and rows."""

    name: str
    size: int
    run: Callable[[Generator, Progress], PartResult]


def evaluate(checkpoint: Path, instances: Path | None, out: Path, config: EvaluationConfig) -> Manifest:
    """Runs the stage; returns its manifest, at once where `out` already holds this result.

    `instances` may be None where the config asks for no benchmark that needs it. Raises UserError where the
    checkpoint or the instances cannot be used, or a benchmark's package is missing, before anything is generated.
    """
    inputs = {"checkpoint": input_identity(checkpoint)}
    if "held_out" in config.benchmarks:
        inputs["instances"] = input_identity(_needed(instances))
    if "bfcl" in config.benchmarks:
        inputs["bfcl-eval"] = installed_version()
    with open_stage(out, STAGE, inputs, config.model_dump(mode="json", exclude={"threads"})) as stage:
        if stage.finished:
            return stage.manifest
        log = RunLog(out)
        parts, missing = _plan(instances, config)
        for name, reason in missing.items():
            log.warning(f"{name} is not run: {reason}")
        items: list[Item] = []
        rows: list[ScoreRow] = []
        total, done, start = sum(part.size for part in parts), 0, time.monotonic()
        log.progress(0, total, "completions")
        from evaluation.generate import LocalGenerator  # torch takes seconds; mistakes are told before

        generator = LocalGenerator(checkpoint, config.threads)
        for part in parts:
            found, scored = _kept(out / PARTS, part, generator, _shifted(log, done, total))
            items += found
            rows += scored
            done += part.size
        if "bfcl" in config.benchmarks:
            rows += bfcl.summary_rows(rows)
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


def _needed(instances: Path | None) -> Path:
    if instances is None:
        raise UserError("the benchmark held_out needs 'instances': the folder that the stage decompose wrote")
    return instances


def _plan(instances: Path | None, config: EvaluationConfig) -> tuple[list[Part], dict[str, str]]:
    """The parts of an evaluation in order, and those that cannot be run with the reason."""
    parts: list[Part] = []
    missing: dict[str, str] = {}
    if "held_out" in config.benchmarks:
        for split, found in held_out.read_splits(_needed(instances), config.splits).items():
            if found:
                parts.append(_held_out_part(split, found, config))
            else:
                missing[f"{held_out.BENCHMARK}/{split}"] = "the instances hold none of this split"
    if "bfcl" in config.benchmarks:
        parts += [_bfcl_part(category, config) for category in CATEGORIES]
    return parts, missing


def _held_out_part(split: str, found: Sequence[Instance], config: EvaluationConfig) -> Part:
    chosen = held_out.choose(found, config.instances_per_split, config.seed)

    def run(generator: Generator, progress: Progress) -> PartResult:
        items, rows = held_out.evaluate_split(generator, chosen, config, progress=progress)
        return items, [row | {"available": len(found)} for row in rows]

    return Part(f"{held_out.BENCHMARK}/{split}", len(chosen) * (config.samples + 1), run)


def _bfcl_part(category: str, config: EvaluationConfig) -> Part:
    known = read_category(category)
    chosen = choose(known, config.bfcl_items_per_category, config.seed)

    def run(generator: Generator, progress: Progress) -> PartResult:
        return bfcl.evaluate_category(generator, chosen, config, available=len(known), progress=progress)

    return Part(f"{bfcl.BENCHMARK}/{category}", len(chosen), run)


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
