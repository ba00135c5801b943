"""Trains one model by one method, and evaluates it beside what it started from."""

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
    MethodName,
    ModelFolder,
    ModelName,
    PipelineSettings,
    Seed,
    SourceFormat,
    read_pipeline,
)
from flows.pieces import AT_ONCE
from flows.pipeline import run_pipeline
from tasks.parents import close_runs

QUICK = read_pipeline("quick")


@flow(
    name="train",
    flow_run_name="train {method} · {model} · seed {seed}",
    task_runner=ThreadPoolTaskRunner(max_workers=AT_ONCE),  # type: ignore[arg-type]
    on_crashed=[close_runs],
    on_cancellation=[close_runs],
    validate_parameters=True,
)
def train(
    model: ModelName | ModelFolder = QUICK.model,
    method: MethodName = "awpo",
    seed: Seed = 0,
    init: Init = "sft",
    data: str | None = None,
    format: SourceFormat = "auto",
    out: str = "runs/train",
    launch: LaunchName | LaunchFile = QUICK.launch,
    policy: PolicySettings = QUICK.policy,
    sft: SftSettings = QUICK.sft,
    evaluation: EvaluationConfig = QUICK.evaluation,
    rationales: RationaleConfig = QUICK.rationales,
    decomposition: DecomposeConfig = DecomposeConfig(),  # noqa: B008 - immutable
    selection: SelectConfig = SelectConfig(),  # noqa: B008 - immutable
    corpus: CorpusConfig = QUICK.corpus,
) -> dict[str, Any]:
    """Prepares data, trains by one method and evaluates. What OUT holds already is not made again.

    Args:
        model: Starting model: a preset's name, or the folder of a checkpoint
        method: Method to train by
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
        methods=(method,),
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
    ).fitted(QUICK)
    return run_pipeline(settings.check(), Path(out), flow="train")


if __name__ == "__main__":
    train()
