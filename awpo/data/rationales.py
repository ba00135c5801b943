"""Stage "rationales": copies instances with the reference rationale of each filled in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from awpo.artifacts import Manifest, input_identity, open_stage
from awpo.config import RationaleConfig
from awpo.data import store
from awpo.data.endpoint_rationales import Answer, AnswerCache, answer_key, ask_for_rationales
from awpo.data.offline_rationales import offline_rationale
from awpo.errors import UserError
from awpo.events import Progress, silent
from awpo.types import Instance

__all__ = ["offline_rationale", "write_rationales"]

VERSION = 1
FAILED = "failed.jsonl"
CACHE = ".answers.jsonl"
FAILURE_LIMIT = 0.5
"""Share of the instances asked about past which the stage fails: what is left would be a biased part of the data."""
INSTANCES_PER_REPORT = 500


def _settings(config: RationaleConfig) -> dict[str, Any]:
    """What the result depends on; the endpoint's address, pace and patience are not part of that."""
    settings: dict[str, Any] = {"version": VERSION, "writer": config.writer, "keep_existing": config.keep_existing}
    if config.writer == "endpoint" and config.endpoint is not None:
        settings["endpoint"] = config.endpoint.model_dump(include={"model", "temperature", "max_tokens"})
    return settings


def write_rationales(
    instances_folder: Path, out: Path, config: RationaleConfig, *, progress: Progress = silent
) -> Manifest:
    """Stage "rationales": writes the instances of one stage's folder into `out`, with rationales.

    An instance's own rationale is kept where `config.keep_existing`. The writer "offline" gives every other one a
    template's; "endpoint" asks a model, and leaves an instance whose answer does not pass the checks without a
    rationale. Counts: instances = kept + written + the sum of `failed` (by reason); failed.jsonl lists the latter.
    A finished result of the same instances and config is returned as it is; an interrupted run goes on.

    Raises UserError where the instances cannot be read, the endpoint fails for good, or more than FAILURE_LIMIT of
    the answers are refused.
    """
    inputs = {"instances": input_identity(instances_folder)}
    with open_stage(out, "rationales", inputs, _settings(config)) as stage:
        if stage.finished:
            return stage.manifest
        total = store.count_instances(instances_folder)
        if config.writer == "offline":
            counts = _write(
                instances_folder, stage.folder, config, total, lambda item: Answer(offline_rationale(item)), progress
            )
            return stage.finish(counts)
        assert config.endpoint is not None  # RationaleConfig sees to it
        with AnswerCache(stage.folder / CACHE) as cache:
            asked = (item for item in store.iterate_instances(instances_folder) if not _keeps(config, item))
            ask_for_rationales(asked, total, config.endpoint, cache, progress)

            def cached(instance: Instance) -> Answer:
                answer = cache.get(answer_key(instance))
                assert answer is not None, "an instance was not asked about"
                return answer

            counts = _write(instances_folder, stage.folder, config, total, cached, progress)
        failed = counts["failed"]
        if sum(failed.values()) > FAILURE_LIMIT * (counts["instances"] - counts["kept"]):
            reason, count = max(failed.items(), key=lambda item: item[1])
            raise UserError(
                f"{sum(failed.values())} of {counts['instances'] - counts['kept']} rationales failed (mostly: {reason}, "
                f"{count}); {out / FAILED} lists them; use a stronger model or see that the endpoint is well"
            )
        manifest = stage.finish(counts)
        (stage.folder / CACHE).unlink(missing_ok=True)  # only now: until here it is what a second run goes on from
        return manifest


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

        instances = store.write_instances(folder, filled())
    assert instances == kept + written + failed.total(), "an instance was lost"
    return {"instances": instances, "kept": kept, "written": written, "failed": dict(failed.most_common())}
