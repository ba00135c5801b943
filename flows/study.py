"""Methods under judges of set quality over several seeds, remembered cell by cell and summed up with statistics."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner

from awpo.artifacts import input_identity
from awpo.config import CorpusConfig, EvaluationConfig, JudgeConfig, RationaleConfig
from awpo.config_training import PolicySettings, SftSettings
from awpo.data.settings import DecomposeConfig
from flows.form_parameters import check_parameters
from flows.parameters import Init, MethodName, ModelFolder, ModelName, Seeds, SourceFormat, StudySettings, read_study
from flows.pieces import AT_ONCE, Failure, Settled, Start, error_of, make_start, prepare_instances
from tasks.cancellation import stops_its_tasks
from tasks.layout import Layout
from tasks.parents import close_runs, parent_run
from tasks.study import CellPlace, StudyCell, missing_cells, plan_cells, run_cell, sum_up
from tasks.tracking_store import Tracking

QUICK = read_study("judge-noise").quick()
METHODS, JUDGES, SEEDS = list(QUICK.methods), list(QUICK.judges), list(QUICK.seeds)


@flow(
    name="study",
    flow_run_name="study {model} · {out}",
    task_runner=ThreadPoolTaskRunner(max_workers=AT_ONCE),  # type: ignore[arg-type]
    on_crashed=[close_runs],
    on_cancellation=[close_runs],
    validate_parameters=True,
)
def study(
    model: ModelName | ModelFolder = QUICK.model,
    methods: list[MethodName] = METHODS,
    judges: list[JudgeConfig] = JUDGES,
    seeds: Seeds = SEEDS,
    init: Init = "sft",
    data: str | None = None,
    format: SourceFormat = "auto",
    out: str = "runs/study",
    cells: str | None = None,
    policy: PolicySettings = QUICK.policy,
    sft: SftSettings = QUICK.sft,
    evaluation: EvaluationConfig = QUICK.evaluation,
    rationales: RationaleConfig = QUICK.rationales,
    decomposition: DecomposeConfig = DecomposeConfig(),  # noqa: B008 - immutable
    corpus: CorpusConfig = QUICK.corpus,
) -> dict[str, Any]:
    """Trains each method under each judge from each seed's own start, and compares them by statistics over seeds.

    A finished cell (method, judge, seed) is a row of the file of cells; what stands there is not run again, on
    whatever machine the file is. Judges matter only to the methods that read them.

    Args:
        model: Starting model: a preset's name, or the folder of a checkpoint
        methods: Methods to train by
        judges: Judges of the reasoning reward; each kind's first scale comes first
        seeds: Seeds of model, SFT and policy training; data and evaluated items are the same for all
        init: Where policy training starts: from the base model or from SFT
        data: Source file or folder of dialogues; empty for the embedded corpus
        format: Format of the source; auto looks at its rows
        out: Folder of the results, made where it is missing
        cells: File of finished cells, to go on from and to add to; empty for OUT/cells.csv
        policy: Policy training; its method, judge and seed are those of each cell
        sft: Supervised fine-tuning
        evaluation: Splits and sampling
        rationales: Who writes the reference rationales
        decomposition: How dialogues become instances
        corpus: The embedded corpus, where no data are given
    """
    check_parameters()
    settings = StudySettings(
        model=model,
        methods=tuple(methods),
        judges=tuple(judges),
        seeds=tuple(seeds),
        data=data,
        format=format,
        decomposition=decomposition,
        init=init,
        corpus=corpus,
        rationales=rationales,
        sft=sft,
        policy=policy,
        evaluation=evaluation,
    )
    layout = Layout(Path(out))
    store = Path(cells) if cells else layout.out / "cells.csv"
    common = {**settings.common(), **({"data": input_identity(Path(data))} if data else {})}
    planned = plan_cells(settings.methods, settings.judges, settings.seeds)
    missing = missing_cells(planned, store, common)
    with (
        stops_its_tasks(),
        parent_run("study", layout.out, settings.model_dump(mode="json")) as (tracking, run),
    ):
        failures = run_missing(missing, settings, layout, store, common, tracking) if missing else []
        result = sum_up(store, planned, layout.out, run)
        Settled(failures=failures).raise_failures(len(planned))
    return {"out": out, "run_id": run.run_id, "cells": str(store), **result}


def run_missing(
    missing: list[StudyCell],
    settings: StudySettings,
    layout: Layout,
    store: Path,
    common: dict[str, Any],
    tracking: Tracking,
) -> list[Failure]:
    """Runs cells two at a time, each from the start of its seed; returns what failed. Every other cell is kept."""
    failures: list[Failure] = []
    starts: dict[int, Start] = {}
    instances = prepare_instances(layout, settings.pipeline(missing[0].seed), tracking)
    for seed in dict.fromkeys(cell.seed for cell in missing):
        try:
            starts[seed] = make_start(layout, settings.pipeline(seed), instances, tracking)
        except Exception as error:  # noqa: BLE001 - kept, told at the end; the other seeds go on
            failures.append(Failure(f"start of {settings.model} · seed {seed}", error))
    pending: list[tuple[StudyCell, PrefectFuture[Any]]] = []
    for cell in missing:
        if (start := starts.get(cell.seed)) is None:
            continue
        place = CellPlace(start.checkpoint(settings.init), start.label, settings.init, start.cell, instances)
        future = run_cell.submit(cell, place, settings.policy, settings.evaluation, store, common, tracking)  # type: ignore[call-overload]
        pending.append((cell, future))
    for cell, future in pending:
        if (reason := error_of(future)) is not None:
            failures.append(Failure(cell.title, reason))
    return failures


if __name__ == "__main__":
    study()
