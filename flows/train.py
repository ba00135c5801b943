"""Trains one model by one method, and evaluates it beside what it started from."""

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
from flows.pieces import AT_ONCE
from flows.pipeline import run_pipeline

QUICK = read_pipeline("quick")


@flow(
    name="train",
    flow_run_name="train {method} · {model} · seed {seed}",
    task_runner=ThreadPoolTaskRunner(max_workers=AT_ONCE),  # type: ignore[arg-type]
    validate_parameters=True,
)
def train(
    out: str = "runs/train",
    data: str | None = None,
    format: str = "auto",
    decomposition: DecomposeConfig = DecomposeConfig(),  # noqa: B008 - immutable
    selection: SelectConfig = SelectConfig(),  # noqa: B008 - immutable
    model: ModelName | str = QUICK.model,
    method: MethodName = "awpo",
    init: Init = "sft",
    seed: int = 0,
    corpus: CorpusConfig = QUICK.corpus,
    rationales: RationaleConfig = QUICK.rationales,
    sft: SftConfig = QUICK.sft,
    policy: PolicyConfig = QUICK.policy,
    evaluation: EvaluationConfig = QUICK.evaluation,
) -> dict[str, Any]:
    """Prepares data, trains by one method and evaluates. What OUT holds already is not made again.

    Args:
        out: Folder of the results, made where it is missing
        data: Source file or folder of dialogues; empty for the embedded corpus
        format: Format of the source; auto looks at its rows
        decomposition: How dialogues become instances
        selection: What is taken of the instances: near-duplicates, benchmarks, lengths, shares; nothing goes by default
        model: Starting model: a preset's name, or the folder of a checkpoint
        method: Method to train by
        init: Where policy training starts: from the base model or from SFT
        seed: Seed of model, SFT and policy training
        corpus: The embedded corpus, where no data are given
        rationales: Who writes the reference rationales
        sft: Supervised fine-tuning
        policy: Policy training
        evaluation: Benchmarks, splits and sampling
    """
    settings = PipelineSettings(
        data=data,
        format=format,
        decomposition=decomposition,
        selection=selection,
        model=model,
        methods=(method,),
        init=init,
        seed=seed,
        corpus=corpus,
        rationales=rationales,
        sft=sft,
        policy=policy,
        evaluation=evaluation,
    ).check()
    return run_pipeline(settings, Path(out), flow="train")


if __name__ == "__main__":
    train()
