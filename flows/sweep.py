"""Models x methods x seeds from the same data: a run of its own for each cell, that waits for a slot to compute in."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from pathlib import Path
from typing import Any

from prefect import flow

from awpo.config import CorpusConfig, EvaluationConfig, RationaleConfig
from awpo.config_training import PolicySettings, SftSettings
from awpo.data.settings import DecomposeConfig, SelectConfig
from awpo.errors import UserError
from awpo.models import resolve_model
from flows.cells import Cells
from flows.form_parameters import check_parameters
from flows.parameters import (
    Init,
    LaunchFile,
    LaunchName,
    MethodNames,
    Models,
    PipelineSettings,
    Seeds,
    SourceFormat,
    read_pipeline,
)
from flows.pieces import Settled, conclude, fit_evaluation, prepare_instances
from flows.preflight import check_out
from tasks.cancellation import stops_its_tasks
from tasks.layout import Layout
from tasks.parents import close_runs, parent_run
from tasks.tracking import TrackedRun
from tasks.tracking_store import Tracking

QUICK = read_pipeline("quick")
MODELS = ["embedded-1m"]
METHODS = ["grpo", "awpo"]
SEEDS = [0, 1]


@flow(
    name="sweep",
    flow_run_name="sweep · {out}",
    on_crashed=[close_runs],
    on_cancellation=[close_runs],
    validate_parameters=True,
)
def sweep(
    models: Models = MODELS,
    methods: MethodNames = METHODS,
    seeds: Seeds = SEEDS,
    init: Init = "sft",
    data: str | None = None,
    format: SourceFormat = "auto",
    out: str = "runs/sweep",
    launch: LaunchName | LaunchFile = QUICK.launch,
    policy: PolicySettings = QUICK.policy,
    sft: SftSettings = QUICK.sft,
    evaluation: EvaluationConfig = QUICK.evaluation,
    rationales: RationaleConfig = QUICK.rationales,
    decomposition: DecomposeConfig = DecomposeConfig(),  # noqa: B008 - immutable
    selection: SelectConfig = SelectConfig(),  # noqa: B008 - immutable
    corpus: CorpusConfig = QUICK.corpus,
) -> dict[str, Any]:
    """Trains and evaluates every combination. The state is Failed where any cell failed, with each cell named.

    Each cell is a run of its own, here and in MLflow. Data are prepared once, and the model and SFT once for each model
    and seed. How many cells compute at once is the limit `gpu` (under Concurrency); the others wait. Run again with the
    same OUT, only what is missing is done.

    Args:
        models: Starting models: presets or folders of checkpoints
        methods: Methods to train by
        seeds: Seeds of model, SFT and policy training; data and evaluated items are the same for all
        init: Where policy training starts: from the base model or from SFT
        data: Source file or folder of dialogues; empty for the embedded corpus
        format: Format of the source; auto looks at its rows
        out: Folder of the results, made where it is missing
        launch: Processes that train, on this machine: a preset's name, or the path of a YAML file (docs/training.md)
        policy: Policy training; left as it is, that of each model's preset, where it is no embedded model
        sft: Supervised fine-tuning; likewise
        evaluation: Benchmarks, splits and sampling; likewise
        rationales: Who writes the reference rationales
        decomposition: How dialogues become instances
        selection: What is taken of the instances: near-duplicates, benchmarks, lengths, shares; nothing goes by default
        corpus: The embedded corpus, where no data are given
    """
    check_parameters()
    common = PipelineSettings(
        methods=tuple(methods),
        init=init,
        data=data,
        format=format,
        launch=launch,
        policy=policy,
        sft=sft,
        evaluation=evaluation,
        rationales=rationales,
        decomposition=decomposition,
        selection=selection,
        corpus=corpus,
    )
    starts = starts_of(common, models, seeds)
    layout = Layout(Path(out))
    check_out(layout.out)
    whole = {**common.model_dump(mode="json", exclude={"model", "seed"}), "models": models, "seeds": seeds}
    with stops_its_tasks(), parent_run("sweep", layout.out, whole) as (tracking, run):
        settled, rows = run_cells(starts, layout, tracking, run)
        settled.raise_named()
    return {"out": out, "run_id": run.run_id, "methods": rows, "report": str(layout.report)}


def starts_of(common: PipelineSettings, models: list[str], seeds: list[int]) -> list[PipelineSettings]:
    """The settings of each model and seed, which all methods start from.

    Raises UserError for a model or a source that does not exist, and for two models whose results would have one name.
    """
    named: dict[str, str] = {}
    for model in dict.fromkeys(models):
        name = resolve_model(model).name
        if name in named:
            raise UserError(f"models {named[name]!r} and {model!r} would both be called {name!r}; rename a folder")
        named[name] = model
    return [
        common.model_copy(update={"model": model, "seed": seed}).fitted(QUICK).check()
        for model in named.values()
        for seed in dict.fromkeys(seeds)
    ]


def run_cells(
    starts: list[PipelineSettings], layout: Layout, tracking: Tracking, run: TrackedRun
) -> tuple[Settled, list[dict[str, Any]]]:
    """Runs every cell and compares what came of them; returns that and the rows of summary.json."""
    instances = prepare_instances(layout, starts[0], tracking)
    cells = Cells(layout, instances, tracking)
    settled = cells.run([fit_evaluation(start, instances) for start in starts])
    return settled, conclude(settled, layout, tracking, run, [])


if __name__ == "__main__":
    sweep()
