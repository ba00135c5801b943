"""Models x methods x seeds from the same data; a cell that fails does not end the others."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from awpo.config import CorpusConfig, EvaluationConfig, PolicyConfig, RationaleConfig, SftConfig
from awpo.data.settings import DecomposeConfig, SelectConfig
from flows.parameters import Init, MethodName, ModelName, PipelineSettings, read_pipeline
from flows.pieces import (
    AT_ONCE,
    Failure,
    Pending,
    Settled,
    conclude,
    fit_evaluation,
    make_start,
    measure_start,
    prepare_instances,
    settle,
    submit_methods,
)
from tasks.cancellation import stops_its_tasks
from tasks.layout import Layout
from tasks.parents import parent_run
from tasks.tracking import TrackedRun, Tracking

QUICK = read_pipeline("quick")
MODELS = ["embedded-1m"]
METHODS = ["grpo", "awpo"]
SEEDS = [0, 1]


@flow(
    name="sweep",
    flow_run_name="sweep · {out}",
    task_runner=ThreadPoolTaskRunner(max_workers=AT_ONCE),  # type: ignore[arg-type]
    validate_parameters=True,
)
def sweep(
    out: str = "runs/sweep",
    models: list[ModelName | str] = MODELS,
    methods: list[MethodName] = METHODS,
    seeds: list[int] = SEEDS,
    data: str | None = None,
    format: str = "auto",
    decomposition: DecomposeConfig = DecomposeConfig(),  # noqa: B008 - immutable
    selection: SelectConfig = SelectConfig(),  # noqa: B008 - immutable
    init: Init = "sft",
    corpus: CorpusConfig = QUICK.corpus,
    rationales: RationaleConfig = QUICK.rationales,
    sft: SftConfig = QUICK.sft,
    policy: PolicyConfig = QUICK.policy,
    evaluation: EvaluationConfig = QUICK.evaluation,
) -> dict[str, Any]:
    """Trains and evaluates every combination. The state is Failed where any cell failed, with each cell named.

    Args:
        out: Folder of the results, made where it is missing
        models: Starting models: presets or folders of checkpoints
        methods: Methods to train by
        seeds: Seeds of model, SFT and policy training; data and evaluated items are the same for all
        data: Source file or folder of dialogues; empty for the embedded corpus
        format: Format of the source; auto looks at its rows
        decomposition: How dialogues become instances
        selection: What is taken of the instances: near-duplicates, benchmarks, lengths, shares; nothing goes by default
        init: Where policy training starts: from the base model or from SFT
        corpus: The embedded corpus, where no data are given
        rationales: Who writes the reference rationales
        sft: Supervised fine-tuning
        policy: Policy training
        evaluation: Benchmarks, splits and sampling
    """
    common = PipelineSettings(
        data=data,
        format=format,
        decomposition=decomposition,
        selection=selection,
        methods=tuple(methods),
        init=init,
        corpus=corpus,
        rationales=rationales,
        sft=sft,
        policy=policy,
        evaluation=evaluation,
    )
    cells = cells_of(common, models, seeds)
    layout = Layout(Path(out))
    whole = {**common.model_dump(mode="json", exclude={"model", "seed"}), "models": models, "seeds": seeds}
    with stops_its_tasks(), parent_run("sweep", layout.out, whole) as (tracking, run):
        settled, rows = run_cells(cells, layout, tracking, run)
        settled.raise_failures(len(settled.subjects) + len(settled.failures))
    return {"out": out, "run_id": run.run_id, "methods": rows, "report": str(layout.report)}


def cells_of(common: PipelineSettings, models: list[str], seeds: list[int]) -> list[PipelineSettings]:
    """The settings of each cell. Raises UserError for a model or a source that does not exist."""
    return [
        common.model_copy(update={"model": model, "seed": seed}).check()
        for model in dict.fromkeys(models)
        for seed in dict.fromkeys(seeds)
    ]


def run_cells(
    cells: list[PipelineSettings], layout: Layout, tracking: Tracking, run: TrackedRun
) -> tuple[Settled, list[dict[str, Any]]]:
    """Trains and evaluates the cells and compares what came of them; returns that and the rows of summary.json.

    Starts (model, SFT) come one after the other with all threads; then methods and evaluations two at a time.
    """
    instances = prepare_instances(layout, cells[0], tracking)
    cells = [fit_evaluation(cell, instances) for cell in cells]
    failures: list[Failure] = []
    starts = []
    for cell in cells:
        try:
            start = make_start(layout, cell, instances, tracking)
            measure_start(start, tracking)
            starts.append(start)
        except Exception as error:  # noqa: BLE001 - kept, told at the end; the other cells go on
            failures.append(Failure(f"start of {cell.model} · seed {cell.seed}", error))
    pending: list[Pending] = [item for start in starts for item in submit_methods(start, tracking)]
    settled = settle(pending)
    settled.failures[:0] = failures
    rows = conclude(settled, layout, tracking, run, [])
    return settled, rows


if __name__ == "__main__":
    sweep()
