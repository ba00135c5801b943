"""Stage "rationales": copies instances with the reference rationale of each filled in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from awpo.artifacts import Manifest, input_identity, open_stage
from awpo.config import RationaleConfig
from awpo.data import store
from awpo.data.offline_rationales import offline_rationale
from awpo.events import Progress, silent
from awpo.types import Instance

__all__ = ["offline_rationale", "write_rationales"]

VERSION = 1
INSTANCES_PER_REPORT = 500


def write_rationales(
    instances_folder: Path, out: Path, config: RationaleConfig, *, progress: Progress = silent
) -> Manifest:
    """Stage "rationales": writes the instances of one stage's folder into `out`, with rationales.

    An instance's own rationale is kept where `config.keep_existing`. A finished result of the same instances and
    config is returned as it is.

    Raises UserError where the instances cannot be read or the endpoint fails for good.
    """
    settings = {"version": VERSION, "writer": config.writer, "keep_existing": config.keep_existing}
    with open_stage(out, "rationales", {"instances": input_identity(instances_folder)}, settings) as stage:
        if stage.finished:
            return stage.manifest
        counts: Counter[str] = Counter()

        def filled() -> Iterator[Instance]:
            for instance in store.iterate_instances(instances_folder):
                counts["instances"] += 1
                if config.keep_existing and instance.rationale:
                    counts["kept"] += 1
                    yield instance
                else:
                    counts["written"] += 1
                    yield instance.with_rationale(offline_rationale(instance))
                if counts["instances"] % INSTANCES_PER_REPORT == 0:
                    progress(counts["instances"], counts["instances"], "instances")

        store.write_instances(stage.folder, filled())
        return stage.finish(counts)
