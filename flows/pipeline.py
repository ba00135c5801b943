"""From a source to a comparison: data, rationales, model, SFT, each method, evaluations, report."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from awpo.config import CorpusConfig, EvaluationConfig, RationaleConfig
from awpo.config_training import PolicySettings, SftSettings
from awpo.data.settings import DecomposeConfig, SelectConfig
from flows.form_parameters import check_parameters
from flows.parameters import (
    Init,
    LaunchFile,
    LaunchName,
    MethodNames,
    ModelFolder,
    ModelName,
    PipelineSettings,
    Seed,
    SourceFormat,
    read_pipeline,
)
from flows.pieces import (
    AT_ONCE,
    conclude,
    fit_evaluation,
    make_start,
    measure_start,
    prepare_instances,
    settle,
    submit_methods,
)
from flows.preflight import check_launch, check_out
from tasks.cancellation import stops_its_tasks
from tasks.layout import Layout
from tasks.parents import close_runs, parent_run

DEMO = read_pipeline("demo")
DEMO_METHODS = list(DEMO.methods)


@flow(
    name="pipeline",
    flow_run_name="pipeline {model} · seed {seed}",
    task_runner=ThreadPoolTaskRunner(max_workers=AT_ONCE),  # type: ignore[arg-type]
    on_crashed=[close_runs],
    on_cancellation=[close_runs],
    validate_parameters=True,
)
def pipeline(
    model: ModelName | ModelFolder = DEMO.model,
    methods: MethodNames = DEMO_METHODS,
    seed: Seed = DEMO.seed,
    init: Init = DEMO.init,
    data: str | None = None,
    format: SourceFormat = "auto",
    out: str = "runs/pipeline",
    launch: LaunchName | LaunchFile = DEMO.launch,
    policy: PolicySettings = DEMO.policy,
    sft: SftSettings = DEMO.sft,
    evaluation: EvaluationConfig = DEMO.evaluation,
    rationales: RationaleConfig = DEMO.rationales,
    decomposition: DecomposeConfig = DecomposeConfig(),  # noqa: B008 - immutable
    selection: SelectConfig = SelectConfig(),  # noqa: B008 - immutable
    corpus: CorpusConfig = DEMO.corpus,
) -> dict[str, Any]:
    """Trains and compares methods from the same start. What OUT holds already is not made again.

    Args:
        model: Starting model: a preset's name, or the folder of a checkpoint
        methods: Methods to train by; the base model and SFT are evaluated beside them
        seed: Seed of model, SFT and policy training
        init: Where policy training starts: from the base model or from SFT
        data: Source file or folder of dialogues; empty for the embedded corpus
        format: Format of the source; auto looks at its rows
        out: Folder of the results, made where it is missing
        launch: Processes that train, on this machine: a preset's name, or the path of a YAML file (docs/training.md)
        policy: Policy training; left as it is, that of the model's preset, where it is no embedded model
        sft: Supervised fine-tuning; likewise
        evaluation: Benchmarks, splits and sampling; likewise
        rationales: Who writes the reference rationales
        decomposition: How dialogues become instances
        selection: What is taken of the instances: near-duplicates, benchmarks, lengths, shares; nothing goes by default
        corpus: The embedded corpus, where no data are given
    """
    check_parameters()
    settings = PipelineSettings(
        model=model,
        methods=tuple(methods),
        seed=seed,
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
    ).fitted(DEMO)
    return run_pipeline(settings.check(), Path(out))


def run_pipeline(settings: PipelineSettings, out: Path, *, flow: str = "pipeline") -> dict[str, Any]:
    """The body of the flows pipeline and train; must be called within a flow run.

    Raises UserError for what a person must mend, WorkFailed where methods failed; the others are compared first.
    """
    layout = Layout(out)
    check_out(out)
    check_launch(settings.launch, settings.policy, out)
    with stops_its_tasks(), parent_run(flow, out, settings.model_dump(mode="json")) as (tracking, run):
        instances = prepare_instances(layout, settings, tracking)
        settings = fit_evaluation(settings, instances)
        start = make_start(layout, settings, instances, tracking)
        pass_at = measure_start(start, tracking)
        pending = submit_methods(start, tracking)
        settled = settle(pending)
        run.metrics(pass_at)
        rows = conclude(settled, layout, tracking, run, pass_at_notes(pass_at))
        settled.raise_failures(len(pending))
    return {"out": str(out), "run_id": run.run_id, "methods": rows, "pass_at": pass_at, "report": str(layout.report)}


def pass_at_notes(pass_at: dict[str, float]) -> list[str]:
    """What the report says of the start of policy training."""
    found = ", ".join(f"{name} {value:.3f}" for name, value in pass_at.items())
    return [f"Before policy training, on the validation split at the training temperature: {found}."] if found else []


if __name__ == "__main__":
    pipeline()
