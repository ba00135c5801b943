"""Tasks that evaluate a checkpoint, and read what an evaluation found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from awpo.config import EvaluationConfig
from evaluation.items import read_scores
from evaluation.target import Target, evaluation_identity, take_up_again
from tasks.progress import say
from tasks.slots import GPU
from tasks.stage_run import Work, show_table, stage_run, worth_trying_again
from tasks.tracking import RunFile
from tasks.tracking_store import Tracking

EVALUATION_TAG = "awpo-evaluate"
MAX_TABLE_ROWS = 5000


@task(
    name="evaluate",
    task_run_name="evaluate {labels[method]} · {labels[model]} · seed {labels[seed]}",
    cache_policy=NO_CACHE,
    retries=1,
    retry_delay_seconds=5,
    retry_condition_fn=worth_trying_again,
    tags=[EVALUATION_TAG],
)
def evaluate(
    checkpoint: Target,
    instances: Path | None,
    out: Path,
    config: EvaluationConfig,
    labels: dict[str, Any],
    tracking: Tracking,
    threads: int = 1,
) -> Path:
    """Evaluates a checkpoint or an endpoint as `config` says; returns `out`, with items.parquet and scores.json.

    A result that lacks answers is taken up again. `labels` (method, model, seed, init; judge in a study) say what is
    evaluated.
    """
    title = f"evaluate {labels['method']} · {labels['model']} · seed {labels['seed']}"
    if labels.get("judge", "none") != "none":
        title += f" · {labels['judge']}"
    identity = evaluation_identity(checkpoint, instances, config)
    inputs = {"instances": instances} if instances and "instances" in identity[0] else {}
    if isinstance(checkpoint, Path):
        inputs["checkpoint"] = checkpoint
    if take_up_again(out):
        RunFile.path_for(out).unlink(missing_ok=True)  # the whole result is another run than the partial one
    work = Work("evaluation", title, out, inputs, config, labels, identity)
    with stage_run(work, tracking) as stage:
        needs = (GPU,) if isinstance(checkpoint, Path) else ()  # an endpoint computes elsewhere
        stage.work_apart("evaluation", evaluation_job(checkpoint, instances, out, config), threads, needs)
        scores = read_scores(out)
        if not stage.already_told:
            stage.results(score_metrics(scores))
            stage.run.table(items_table(out), "items.json")
            stage.run.artifact(out / "items.parquet")
            stage.run.artifact(out / "scores.json")
        show_table(title, [_shown(row) for row in scores if row["group"] == "all"], "Accuracy with 95% intervals")
    return out


@task(
    name="pass-at-k",
    task_run_name="pass@1 and pass@8 before policy training · {labels[model]} · seed {labels[seed]}",
    cache_policy=NO_CACHE,
    retries=1,
    retry_condition_fn=worth_trying_again,
    tags=[EVALUATION_TAG],
)
def measure_pass_at_k(
    checkpoint: Path,
    instances: Path,
    out: Path,
    config: EvaluationConfig,
    labels: dict[str, Any],
    tracking: Tracking,
    threads: int = 1,
) -> dict[str, float]:
    """pass@1 and pass@8 of a checkpoint on the validation split, sampled at the training temperature.

    Reinforcement learning can only win what the policy sometimes gets right: where pass@8 is not well above pass@1
    there is little to win, and a warning says so. Empty where the instances have no validation split.
    """
    from awpo.data.store import read_instances

    if not any(True for _ in read_instances(instances, {"validation"})):
        say("the data have no validation split: pass@1 and pass@8 are not measured")
        return {}
    settings = config.model_copy(
        update={"benchmarks": ("held_out",), "splits": ("validation",), "samples": max(8, config.samples)}
    )
    title = f"pass@1 and pass@8 before policy training · {labels['model']} · seed {labels['seed']}"
    work = Work(
        "evaluation",
        title,
        out,
        {"checkpoint": checkpoint, "instances": instances},
        settings,
        {**labels, "on": "validation"},
    )
    with stage_run(work, tracking) as stage:
        stage.work_apart("evaluation", evaluation_job(checkpoint, instances, out, settings), threads)
        row = find_score(read_scores(out), "held_out", "validation", "sampled")
        found = {f"pass@{k}": float(value) for k, value in (row or {}).get("pass_at", {}).items()}
        stage.results(found)
        say(f"before policy training, on the validation split: {', '.join(f'{k} {v:.3f}' for k, v in found.items())}")
        one, eight = found.get("pass@1"), found.get("pass@8")
        if one is not None and eight is not None and eight - one < 0.05:
            stage.warn("pass@8 is hardly above pass@1: policy training from this checkpoint has little to win")
        show_table(title, [{"measure": name, "value": value} for name, value in found.items()])
    return found


def evaluation_job(checkpoint: Target, instances: Path | None, out: Path, config: EvaluationConfig) -> dict[str, Any]:
    """The job of the worker `python -m evaluation`."""
    target = {"checkpoint": str(checkpoint)} if isinstance(checkpoint, Path) else {"endpoint": checkpoint.model_dump()}
    return {
        **target,
        "instances": str(instances) if instances else None,
        "out": str(out),
        "config": config.model_dump(mode="json"),
    }


def find_score(
    rows: list[dict[str, Any]], benchmark: str, split: str, mode: str, group: str = "all"
) -> dict[str, Any] | None:
    """The row of one benchmark, split, mode and group, or None where it was not run."""
    wanted = (benchmark, split, mode, group)
    return next((row for row in rows if (row["benchmark"], row["split"], row["mode"], row["group"]) == wanted), None)


def score_metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Scores as metrics: benchmark/split/mode[/group]/what; none of an average that has no value."""
    found: dict[str, float] = {}
    for row in rows:
        if row["accuracy"] is None:
            continue
        group = "" if row["group"] == "all" else f"/{row['group'].replace('=', ':')}"
        name = f"{row['benchmark']}/{row['split']}/{row['mode']}{group}"
        found[f"{name}/accuracy"] = row["accuracy"]
        if row["group"] == "all":
            found |= {
                f"{name}/{key}": row[key] for key in ("low", "high", "empty_rate", "response_tokens") if key in row
            }
    return found


def items_table(folder: Path) -> Any:
    """The items of an evaluation as a data frame; the greedy answers first, cut to what a browser can show."""
    import pandas as pd

    frame = pd.read_parquet(folder / "items.parquet")
    columns = ["benchmark", "split", "item_id", "step", "kind", "sample", "correct", "error_type", "completion"]
    columns += ["response_tokens", "seconds"]
    return frame.sort_values("sample", kind="stable")[columns].head(MAX_TABLE_ROWS)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    names = ("benchmark", "split", "mode", "accuracy", "low", "high", "items", "empty_rate")
    return {name: round(row[name], 4) if isinstance(row.get(name), float) else row.get(name) for name in names}
