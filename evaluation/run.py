"""The stage "evaluation": every benchmark of the config on one checkpoint.

Each answer and each finished part of a benchmark are kept in a hidden folder, so that a stage that was interrupted goes
on where it stood. An answer that an endpoint did not give is an item without a verdict; its rows say "partial". A part without items is not run: it has no row in `scores.json`, and the manifest names it with the reason.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from awpo.artifacts import Manifest, code_version, input_identity, open_stage
from awpo.config import EndpointConfig, EvaluationConfig
from awpo.endpoint_cache import EndpointCache
from awpo.endpoint_spending import spending_file
from awpo.events import Progress, RunLog
from awpo.files import write_atomically
from awpo.serving.process import ModelServer
from awpo.types import content_hash
from evaluation.benchmarks import Benchmark, Part, PartResult, get_benchmark
from evaluation.endpoint_generator import EndpointGenerator
from evaluation.generate import Generator
from evaluation.items import ITEMS, SCORES, Item, ScoreRow, read_items, write_items
from evaluation.prompts import PromptFormat
from evaluation.target import STAGE, Target, evaluation_identity, take_up_again, with_engine

PARTS, ANSWERS = ".parts", "answers.sqlite"
MOST_REASONS = 20
SERVER_SECONDS = 6 * 3600.0
"""Time limit of a request to a server that the evaluation started. A CPU may take an hour for a batch of long prompts,
and what a request that was given up had come to is lost; a server that ends is noticed at once."""


def evaluate(target: Target, instances: Path | None, out: Path, config: EvaluationConfig) -> Manifest:
    """Runs the stage; returns its manifest, at once where `out` already holds this result.

    `target` is a checkpoint's folder, or an endpoint. `instances` may be None where the config asks for no benchmark
    that needs it. A result that lacks answers, because requests failed, is taken up again and asks for those. Raises
    UserError where the target or the instances cannot be used, or a benchmark's package or data is missing, before
    anything is generated.
    """
    config = with_engine(config)
    inputs, settings = evaluation_identity(target, instances, config)
    benchmarks = [get_benchmark(name) for name in config.benchmarks]
    take_up_again(out)
    with open_stage(out, STAGE, inputs, settings) as stage:
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
        with open_generator(target, config, out / PARTS) as generator:
            for part in parts:
                found, scored = _kept(out / PARTS, part, generator, _shifted(log, done, total))
                items += found
                rows += scored
                done += part.size
                if found and all(item.correct is None for item in found):
                    missing[part.name] = f"none of its {len(found)} answers came: {found[0].detail}"
            generated_by = dict(generator.identity)
        for benchmark in benchmarks:
            rows += benchmark.summary([row for row in rows if row["benchmark"] == benchmark.name])
        unanswered = Counter(item.detail for item in items if item.correct is None)
        counts = {
            "items": len({(item.benchmark, item.item_id) for item in items}),
            "completions": len(items),
            "generated_tokens": sum(item.response_tokens for item in items),
            "no_room": sum(item.finish == "no_room" for item in items),
            "missing": unanswered.total(),
            "missing_reasons": dict(unanswered.most_common(MOST_REASONS)),
            "parts": [part.name for part in parts],
            "not_run": missing,
            "generator": generated_by,
            "work_seconds": round(time.monotonic() - start, 3),
        }
        if counts["no_room"]:
            log.warning(f"{counts['no_room']} prompts fill the model's context; they count as wrong")
        if unanswered:
            log.warning(
                f"{unanswered.total()} of {len(items)} answers are missing ({unanswered.most_common(1)[0][0]}); "
                "the same command asks for them again"
            )
        write_items(out / ITEMS, items)
        write_atomically(out / SCORES, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        log.progress(total, total, "completions")
        manifest = stage.finish(counts)
        if not unanswered:
            shutil.rmtree(out / PARTS, ignore_errors=True)
        return manifest


@contextmanager
def open_generator(target: Target, config: EvaluationConfig, folder: Path) -> Iterator[Generator]:
    """Who answers: this process, a server that is started for it, or an endpoint; its answers are kept in `folder`."""
    folder.mkdir(exist_ok=True)
    answers, prompt_format = folder / ANSWERS, PromptFormat.of(config)
    if isinstance(target, Path) and config.engine == "in_process":
        from evaluation.local_generator import LocalGenerator  # torch takes seconds; mistakes are told before

        with EndpointCache(answers) as cache:
            yield LocalGenerator(target, config.threads, config.batch_size, prompt_format, cache)
        return
    with ExitStack() as stack:
        if isinstance(target, EndpointConfig):
            generator = EndpointGenerator(target, prompt_format, cache=answers, spending=spending_file(folder))
        else:
            fingerprint = input_identity(target)
            server = stack.enter_context(
                ModelServer(target, name=fingerprint, engine=config.engine, threads=config.threads or 1, folder=folder)
            )
            local = EndpointConfig(
                base_url=server.url,
                model=server.name,
                concurrency=config.batch_size,
                timeout_seconds=SERVER_SECONDS,
                cache=str(answers),
                # Calls are read from the text, as in training; vLLM would look for them itself where tools are given.
                options={"tool_choice": "none"} if config.engine == "vllm" else {},
            )
            generator = EndpointGenerator(local, prompt_format, fingerprint=fingerprint, engine=config.engine)
        stack.callback(generator.close)
        yield generator


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
    if all(item.correct is not None for item in items):
        write_items(table, items)
        write_atomically(scores, json.dumps(rows, ensure_ascii=False))
    return items, rows
