"""Stage "rationales": copies instances with the reference rationale of each filled in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from awpo.artifacts import Manifest, input_identity, open_stage
from awpo.config import EndpointConfig, RationaleConfig
from awpo.data import store
from awpo.data.endpoint_rationales import PROMPT_HASH, Estimate, RationaleWriter, estimate_rationales
from awpo.data.offline_rationales import offline_rationale
from awpo.data.rationale_checks import Answer
from awpo.endpoint import Endpoint, cache_file
from awpo.endpoint_spending import SPENDING, spending_file
from awpo.errors import UserError
from awpo.events import Progress, silent
from awpo.types import Instance

__all__ = ["estimate", "offline_rationale", "rationale_writer", "write_rationales"]

VERSION = 1
CHECKS_VERSION = 2  # of what is asked of an endpoint's answers
FAILED = "failed.jsonl"
CACHE = ".answers.sqlite"
"""Answers of this work alone, where they go to no file that runs share; removed at the end."""
WRITER = "rationales"
"""Name in the metadata of the shards: who wrote the rationales."""
FAILURE_LIMIT = 0.5
"""Share of the instances asked about past which the stage fails: what is left would be a biased part of the data."""
INSTANCES_PER_REPORT = 500


def _settings(config: RationaleConfig) -> dict[str, Any]:
    """What the result depends on; the endpoint's address, pace and patience are not part of that."""
    settings: dict[str, Any] = {"version": VERSION, "writer": config.writer, "keep_existing": config.keep_existing}
    if config.writer == "endpoint" and config.endpoint is not None:
        asked = config.endpoint.model_dump(include={"model", "temperature", "max_tokens", "options"})
        settings |= {"endpoint": asked, "rewrites": config.rewrites, "language": config.language}
        settings |= {"prompt": PROMPT_HASH, "checks": CHECKS_VERSION}
    return settings


def rationales_identity(instances_folder: Path, config: RationaleConfig) -> tuple[dict[str, str], dict[str, Any]]:
    """The inputs and the config of the stage's manifest."""
    return {"instances": input_identity(instances_folder)}, _settings(config)


def writer_label(config: RationaleConfig) -> str:
    """Who writes the rationales, as it stands in every artifact."""
    return f"endpoint {config.endpoint.model}" if config.endpoint else "offline templates"


def rationale_writer(folder: Path) -> str | None:
    """Who wrote the rationales of a folder of instances, from its shards; None where that is not known."""
    return store.read_metadata(folder).get(WRITER)


def _endpoint(config: EndpointConfig, folder: Path, *, existing: bool = False) -> Endpoint:
    """The endpoint with a file of answers in any case: a second run goes on from it. `existing`: makes no new one."""
    file = cache_file(config, folder / CACHE) or folder / CACHE
    cache = "off" if existing and not file.exists() else str(file)
    return Endpoint(config.model_copy(update={"cache": cache}), spending=None if existing else spending_file(folder))


def _asked(instances_folder: Path, config: RationaleConfig) -> Iterator[Instance]:
    return (item for item in store.iterate_instances(instances_folder) if not _keeps(config, item))


def estimate(instances_folder: Path, out: Path, config: RationaleConfig) -> Estimate | None:
    """What `write_rationales` would ask and at which cost; None where it asks nobody. Writes nothing into `out`."""
    if config.endpoint is None:
        return None
    endpoint = _endpoint(config.endpoint, out, existing=True)
    try:
        return estimate_rationales(_asked(instances_folder, config), RationaleWriter(config, endpoint))
    finally:
        endpoint.close_cache()


def write_rationales(
    instances_folder: Path, out: Path, config: RationaleConfig, *, progress: Progress = silent
) -> Manifest:
    """Stage "rationales": writes the instances of one stage's folder into `out`, with rationales.

    An instance's own rationale is kept where `config.keep_existing`. The writer "offline" gives every other one a
    template's; "endpoint" asks a model, and leaves an instance of which no answer passes the checks without a
    rationale. Counts: instances = kept + written + the sum of `failed` (by reason); failed.jsonl lists the latter;
    `endpoint` holds what was asked. Manifest and shards name the writer.
    A finished result of the same instances and config is returned as it is; an interrupted run goes on.

    Raises UserError where the instances cannot be read, the budget cannot suffice or is used up, the endpoint fails
    for good, or more than FAILURE_LIMIT of the answers are refused.
    """
    with open_stage(out, "rationales", *rationales_identity(instances_folder, config)) as stage:
        if stage.finished:
            return stage.manifest
        total = store.count_instances(instances_folder)
        if config.writer == "offline":
            counts = _write(
                instances_folder, stage.folder, config, total, lambda item: Answer(offline_rationale(item)), progress
            )
            return stage.finish(counts)
        assert config.endpoint is not None  # RationaleConfig sees to it
        writer = RationaleWriter(config, _endpoint(config.endpoint, stage.folder))
        _check_budget(estimate_rationales(_asked(instances_folder, config), writer), config.endpoint)
        writer.ask_all(_asked(instances_folder, config), total, progress)
        counts = _write(instances_folder, stage.folder, config, total, writer.result, progress)
        counts["endpoint"] = writer.endpoint.usage.metrics(config.endpoint)
        writer.endpoint.close_cache()
        failed = counts["failed"]
        if sum(failed.values()) > FAILURE_LIMIT * (counts["instances"] - counts["kept"]):
            reason, count = max(failed.items(), key=lambda item: item[1])
            raise UserError(
                f"{sum(failed.values())} of {counts['instances'] - counts['kept']} rationales failed (mostly: {reason}, "
                f"{count}); {out / FAILED} lists them; use a stronger model or see that the endpoint is well"
            )
        manifest = stage.finish(counts)
        for file in (CACHE, SPENDING):
            for part in ("", "-wal", "-shm"):  # only now: until here it is what a second run goes on from
                (stage.folder / f"{file}{part}").unlink(missing_ok=True)
        return manifest


def _check_budget(found: Estimate, config: EndpointConfig) -> None:
    """Raises UserError where the prompts alone would pass the budget: better before the start than on the way."""
    spending, tokens = config.spending_limit, config.token_limit
    if spending is not None and found.least_cost is not None and found.least_cost > spending:
        raise UserError(f"spending_limit {spending:g} cannot suffice: {found}; raise it or take fewer instances")
    if tokens is not None and found.prompt_tokens > tokens:
        raise UserError(f"token_limit {tokens:,} cannot suffice: {found}; raise it or take fewer instances")


def _keeps(config: RationaleConfig, instance: Instance) -> bool:
    return config.keep_existing and bool((instance.rationale or "").strip())


def _write(
    source: Path,
    folder: Path,
    config: RationaleConfig,
    total: int,
    answer_of: Callable[[Instance], Answer],
    progress: Progress,
) -> dict[str, Any]:
    """Writes shards and failed.jsonl; returns the counts."""
    kept = written = 0
    failed: Counter[str] = Counter()

    with open(folder / FAILED, "w", encoding="utf-8", errors="backslashreplace") as failed_file:

        def filled() -> Iterator[Instance]:
            nonlocal kept, written
            for number, instance in enumerate(store.iterate_instances(source), start=1):
                if number % INSTANCES_PER_REPORT == 0 or number == total:
                    progress(number, total, "instances")
                if _keeps(config, instance):
                    kept += 1
                    yield instance
                    continue
                answer = answer_of(instance)
                if answer.rationale is None:
                    failed[answer.reason] += 1
                    row = {"id": instance.id, "dialogue_id": instance.dialogue_id, "step": instance.step}
                    row |= {"reason": answer.reason, "detail": answer.detail}
                    failed_file.write(json.dumps(row, ensure_ascii=False) + "\n")
                else:
                    written += 1
                yield instance.with_rationale(answer.rationale)

        instances = store.write_instances(folder, filled(), {WRITER: writer_label(config)})
    assert instances == kept + written + failed.total(), "an instance was lost"
    counts: dict[str, Any] = {"instances": instances, "kept": kept, "written": written}
    return {**counts, "failed": dict(failed.most_common()), "writer": writer_label(config)}
