"""Tasks that train: supervised fine-tuning and policy training, each a worker process that is listened to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from awpo.config import JudgeConfig
from awpo.config_training import PolicyConfig, SftConfig
from awpo.launch import DEFAULT, LaunchSettings, read_launch
from awpo.methods import get_method
from awpo.serving.vllm import launch_for
from awpo.training.identity import GROWING, policy_identity, refuse_other_launch, sft_identity
from tasks.judge import judgements_relayed
from tasks.slots import GPU, JUDGE_API
from tasks.stage_run import StageRun, Work, show_markdown, stage_run, worth_trying_again
from tasks.tracking_store import Tracking

TRAINING_TAG = "awpo-train"


@task(
    name="sft",
    task_run_name="train sft · {label} · seed {config.seed}",
    cache_policy=NO_CACHE,
    retries=1,
    retry_delay_seconds=5,
    retry_condition_fn=worth_trying_again,
    tags=[TRAINING_TAG],
)
def train_sft(
    model: str,
    label: str,
    instances: Path,
    out: Path,
    config: SftConfig,
    tracking: Tracking,
    threads: int = 2,
    launch: str = DEFAULT,
) -> Path:
    """Supervised fine-tuning of `model` (a folder or hub id) on `instances`; returns the checkpoint's folder.

    `label` is the model's name in results, `launch` a preset of infra/presets/launch or a file, `threads` are those of
    a launch of one process. A retry goes on from the last whole checkpoint, in the same MLflow run.
    """
    processes = read_launch(launch)
    labels = {"model": label, "method": "sft", "seed": config.seed, "init": "base"}
    title = f"train sft · {label} · seed {config.seed}"
    known = sft_identity(model, instances, config, processes.effect())
    refuse_other_launch(out, known)
    inputs = {"model": Path(model), "instances": instances}
    work = Work("sft", title, out, inputs, config, labels, (known.inputs, known.settings), known.former)
    with stage_run(work, tracking) as stage:
        job = _job(model, instances, out, config, processes)
        _train(stage, "awpo.training.sft", job, threads, (GPU,), launch, processes)
        _finish(stage, out / "checkpoint", config.steps)
    return out / "checkpoint"


@task(
    name="policy",
    task_run_name="train {config.method} · {label} · seed {config.seed}",
    cache_policy=NO_CACHE,
    retries=1,
    retry_delay_seconds=5,
    retry_condition_fn=worth_trying_again,
    tags=[TRAINING_TAG],
)
def train_policy(
    model: str,
    label: str,
    init: str,
    instances: Path,
    out: Path,
    config: PolicyConfig,
    tracking: Tracking,
    threads: int = 1,
    launch: str = DEFAULT,
) -> Path:
    """Policy training by `config.method` from the checkpoint `model`; returns the checkpoint's folder.

    `init` ("base" or "sft") says what `model` is; `launch` and `threads` are as for SFT. A retry goes on from the last
    whole checkpoint, in the same run.
    """
    processes = read_launch(launch)
    method = get_method(config.method)
    judge = config.judge.label if method.needs_judge else "none"
    labels = {"model": label, "method": method.name, "seed": config.seed, "init": init, "judge": judge}
    title = f"train {method.name} · {label} · seed {config.seed}"
    if method.needs_judge and config.judge != JudgeConfig():
        title += f" · {judge}"
    known = policy_identity(model, instances, config, processes.effect())
    refuse_other_launch(out, known, GROWING)
    inputs = {"model": Path(model), "instances": instances}
    work = Work("policy", title, out, inputs, config, labels, (known.inputs, known.settings), known.former)
    with stage_run(work, tracking) as stage, judgements_relayed(stage, config):
        needs = (GPU, JUDGE_API) if method.needs_judge and config.judge.kind == "endpoint" else (GPU,)
        job, settings = _job(model, instances, out, config, processes), launch_for(config.rollouts.engine, processes)
        _train(stage, "awpo.training.policy", job, threads, needs, launch, settings)
        _finish(stage, out / "checkpoint", config.steps)
    return out / "checkpoint"


def _job(
    model: str, instances: Path, out: Path, config: SftConfig | PolicyConfig, launch: LaunchSettings
) -> dict[str, Any]:
    job = {"model": model, "instances": str(instances), "out": str(out), "launch": launch.effect()}
    return {**job, "config": config.model_dump(mode="json")}


def _train(
    stage: StageRun,
    module: str,
    job: dict[str, Any],
    threads: int,
    needs: Sequence[str],
    launch: str,
    settings: LaunchSettings,
) -> None:
    """Runs the worker as `settings` say, which are of the launch preset that the run in MLflow tells of."""
    stage.run.tags({"awpo.launch": launch, "awpo.processes": settings.total})
    stage.work_apart(module, job, threads, needs, settings)


def _finish(stage: StageRun, checkpoint: Path, steps: int) -> None:
    """Sums a training stage up in MLflow and in Prefect."""
    summary = read_summary(stage.work.folder)
    numbers = {f"final/{name}": value for name, value in summary.items() if isinstance(value, int | float)}
    stage.results(numbers)
    if not stage.already_told:
        name = f"{stage.work.labels['model']}-{stage.work.labels['method']}-seed-{stage.work.labels['seed']}"
        stage.run.checkpoint(
            name, checkpoint, {**stage.work.labels, "instances": str(stage.work.inputs["instances"])}, steps
        )
        samples = stage.work.folder / "judge_samples.jsonl"
        if samples.exists():
            stage.run.artifact(samples)
    lines = [f"| {name} | {value} |" for name, value in summary.items()]
    show_markdown(stage.work.title, "\n".join([f"Checkpoint: `{checkpoint}`", "", "| | |", "|---|---|", *lines]))


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary.json of a training stage's folder; empty where there is none."""
    try:
        value = json.loads((folder / "summary.json").read_text("utf-8"))
    except FileNotFoundError:
        return {}
    return value if isinstance(value, dict) else {}
