"""Writes a reference rationale for each instance."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from pathlib import Path
from typing import Any

from prefect import flow

from awpo.artifacts import read_manifest
from awpo.config import RationaleConfig
from flows.form_parameters import check_parameters
from flows.parameters import read_pipeline
from flows.preflight import check_out
from tasks.cancellation import stops_its_tasks
from tasks.data import decompose, write_corpus, write_rationales
from tasks.layout import Layout
from tasks.parents import close_runs, parent_run

QUICK = read_pipeline("quick")


@flow(
    name="synthesize-rationales",
    flow_run_name="rationales · {out}",
    on_crashed=[close_runs],
    on_cancellation=[close_runs],
    validate_parameters=True,
)
def synthesize_rationales(
    instances: str | None = None,
    out: str = "runs/data",
    rationales: RationaleConfig = QUICK.rationales,
) -> dict[str, Any]:
    """Writes the rationales into OUT/data/rationales.

    Args:
        instances: Folder of instances; empty for those of OUT, made from the embedded corpus where there are none
        out: Folder of the results, made where it is missing
        rationales: Who writes the reference rationales
    """
    check_parameters()
    layout = Layout(Path(out))
    check_out(layout.out)
    settings = {"instances": instances, "rationales": rationales.model_dump(mode="json")}
    with stops_its_tasks(), parent_run("synthesize-rationales", layout.out, settings) as (tracking, run):
        folder = Path(instances) if instances else layout.instances
        if not instances and read_manifest(folder) is None:
            corpus = write_corpus(layout.corpus, QUICK.corpus, tracking)
            folder = decompose(corpus, folder, "auto", QUICK.decomposition, tracking)
        result = write_rationales(folder, layout.rationales, rationales, tracking)
        manifest = read_manifest(result)
    return {"folder": str(result), "run_id": run.run_id, **(manifest.counts if manifest else {})}


if __name__ == "__main__":
    synthesize_rationales()
