"""Methods over several seeds, with the statistics: means over seeds, and differences paired by seed and item."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from awpo.config import CorpusConfig, EvaluationConfig, PolicyConfig, RationaleConfig, SftConfig
from flows.parameters import Init, MethodName, ModelName, PipelineSettings, read_pipeline
from flows.pieces import AT_ONCE
from flows.sweep import cells_of, run_cells
from tasks.cancellation import stops_its_tasks
from tasks.layout import Layout
from tasks.parents import parent_run
from tasks.study import study_table

QUICK = read_pipeline("quick")
METHODS = ["grpo", "grpo_mixed", "awpo"]
SEEDS = [0, 1, 2]


@flow(
    name="study",
    flow_run_name="study {model} · {out}",
    task_runner=ThreadPoolTaskRunner(max_workers=AT_ONCE),  # type: ignore[arg-type]
    validate_parameters=True,
)
def study(
    out: str = "runs/study",
    model: ModelName | str = QUICK.model,
    methods: list[MethodName] = METHODS,
    seeds: list[int] = SEEDS,
    data: str | None = None,
    format: str = "auto",
    init: Init = "sft",
    corpus: CorpusConfig = QUICK.corpus,
    rationales: RationaleConfig = QUICK.rationales,
    sft: SftConfig = QUICK.sft,
    policy: PolicyConfig = QUICK.policy,
    evaluation: EvaluationConfig = QUICK.evaluation,
) -> dict[str, Any]:
    """Trains each method from each seed's own start, and writes OUT/study.json.

    Differences are between methods of the same seed on the same items, so that what a seed or an item is worth
    cancels out: per seed, their mean with a t interval over seeds, and pooled over items by dialogue.

    Args:
        out: Folder of the results, made where it is missing
        model: Starting model: a preset's name, or the folder of a checkpoint
        methods: Methods to train by
        seeds: Seeds of model, SFT and policy training; data and evaluated items are the same for all
        data: Source file or folder of dialogues; empty for the embedded corpus
        format: Format of the source; auto looks at its rows
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
        methods=tuple(methods),
        init=init,
        corpus=corpus,
        rationales=rationales,
        sft=sft,
        policy=policy,
        evaluation=evaluation,
    )
    cells = cells_of(common, [model], seeds)
    layout = Layout(Path(out))
    whole = {**common.model_dump(mode="json", exclude={"model", "seed"}), "model": model, "seeds": seeds}
    with stops_its_tasks(), parent_run("study", layout.out, whole) as (tracking, run):
        settled, rows = run_cells(cells, layout, tracking, run)
        statistics = study_table(settled.subjects, layout.out / "study.json")
        run.artifact(layout.out / "study.json")
        run.metrics({f"mean_accuracy/{row['method']}": row["mean"] for row in statistics["accuracy"]})
        settled.raise_failures(len(settled.subjects) + len(settled.failures))
    return {"out": out, "run_id": run.run_id, "methods": rows, **statistics}


if __name__ == "__main__":
    study()
