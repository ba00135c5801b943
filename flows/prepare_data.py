"""Prepares instances: a source file, or the embedded corpus, decomposed."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from pathlib import Path
from typing import Any

from prefect import flow

from awpo.artifacts import read_manifest
from awpo.config import CorpusConfig
from awpo.data.settings import DecomposeConfig, SelectConfig
from flows.form_parameters import check_parameters
from flows.parameters import SourceFormat, read_pipeline
from flows.preflight import check_out
from tasks.cancellation import stops_its_tasks
from tasks.data import decompose, select, write_corpus
from tasks.layout import Layout
from tasks.parents import close_runs, parent_run

QUICK = read_pipeline("quick")


@flow(
    name="prepare-data",
    flow_run_name="prepare data · {out}",
    on_crashed=[close_runs],
    on_cancellation=[close_runs],
    validate_parameters=True,
)
def prepare_data(
    source: str | None = None,
    format: SourceFormat = "auto",
    out: str = "runs/data",
    decomposition: DecomposeConfig = DecomposeConfig(),  # noqa: B008 - immutable
    selection: SelectConfig = SelectConfig(),  # noqa: B008 - immutable
    corpus: CorpusConfig = QUICK.corpus,
) -> dict[str, Any]:
    """Decomposes dialogues into instances, one per assistant step, in OUT/data/instances.

    Args:
        source: File or folder of dialogues; empty for the embedded corpus
        format: Format of the source; auto looks at its rows
        out: Folder of the results, made where it is missing
        decomposition: How dialogues become instances: calls that fail their schema, masking
        selection: What is taken of the instances, in OUT/data/selected: near-duplicates, benchmarks, lengths, shares
        corpus: The embedded corpus, where no source is given
    """
    check_parameters()
    layout = Layout(Path(out))
    check_out(layout.out)
    settings = {
        "source": source,
        "format": format,
        "decomposition": decomposition.model_dump(mode="json"),
        "selection": selection.model_dump(mode="json"),
        "corpus": corpus.model_dump(mode="json"),
    }
    with stops_its_tasks(), parent_run("prepare-data", layout.out, settings) as (tracking, run):
        where = Path(source) if source else write_corpus(layout.corpus, corpus, tracking)
        instances = decompose(where, layout.instances, format, decomposition, tracking)
        if selection != SelectConfig():
            instances = select(instances, layout.selected, selection, tracking)
        manifest = read_manifest(instances)
    return {"folder": str(instances), "run_id": run.run_id, **(manifest.counts if manifest else {})}


if __name__ == "__main__":
    prepare_data()
