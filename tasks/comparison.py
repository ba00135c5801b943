"""Tasks that put results side by side: summary.json, the comparison, the report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from awpo.artifacts import read_manifest
from awpo.events import METRICS, Tail
from awpo.files import write_atomically
from evaluation.bfcl.averages import NON_LIVE_CALLS
from evaluation.items import read_scores
from tasks.evaluation import find_score
from tasks.stage_run import show_markdown, show_table
from tasks.tracking import RunFile, TrackedRun, stands
from tasks.tracking_store import Tracking
from tasks.training import read_summary

if TYPE_CHECKING:
    from evaluation.report import RunSummary

# The split that methods are compared on: the first of these that was evaluated.
MAIN_SPLITS = ("test_phrasings", "test", "test_tools", "validation")


@dataclass(frozen=True)
class Subject:
    """Something evaluated: the base model, or what a training stage left in `trained`."""

    method: str
    init: str
    model: str
    seed: int
    evaluation: Path
    instances: Path
    trained: Path

    @property
    def labels(self) -> dict[str, Any]:
        return {"method": self.method, "init": self.init, "model": self.model, "seed": self.seed}


@dataclass(frozen=True)
class MethodRow:
    """One row of summary.json.

    `reward` is the mean outcome reward (ToolRL's, -3 to 4) of the sampled answers on `split`; `accuracy` their exact
    accuracy with its 95% interval; `response_length` their mean length in tokens; `seconds` the wall time of the
    training stage. `greedy` and `test_tools` are accuracies of greedy answers on `split` and of sampled ones on
    held-out tools; `bfcl_v3` is the official checker's overall score; each is None where it was not run.
    `train_reward` is the mean total reward over the last quarter of policy training.
    """

    method: str
    init: str
    model: str
    seed: int
    reward: float | None
    accuracy: float | None
    accuracy_low: float | None
    accuracy_high: float | None
    response_length: float | None
    seconds: float
    greedy: float | None
    test_tools: float | None
    bfcl_v3: float | None
    train_reward: float | None
    split: str | None
    run_id: str | None


def main_split(scores: Sequence[dict[str, Any]]) -> str | None:
    """The split that stands for an evaluation, or None where held_out was not run."""
    present = {row["split"] for row in scores if row["benchmark"] == "held_out"}
    return next((split for split in MAIN_SPLITS if split in present), next(iter(sorted(present)), None))


def mean_outcome_reward(subject: Subject, split: str) -> float | None:
    """Mean outcome reward of the sampled answers of an evaluation on one split of held_out."""
    import pandas as pd

    from awpo.data.store import read_instances
    from awpo.rewards import outcome_reward

    items = pd.read_parquet(
        subject.evaluation / "items.parquet", columns=["benchmark", "split", "item_id", "sample", "completion"]
    )
    items = items[(items["benchmark"] == "held_out") & (items["split"] == split) & (items["sample"] >= 0)]
    instances = {instance.id: instance for instance in read_instances(subject.instances, {split})}
    rewards = [
        outcome_reward(instances[item], completion)
        for item, completion in zip(items["item_id"], items["completion"], strict=True)
        if item in instances
    ]
    return sum(rewards) / len(rewards) if rewards else None


def method_row(subject: Subject) -> MethodRow:
    """The row of one subject, from the files that its stages left."""
    scores = read_scores(subject.evaluation)
    split = main_split(scores)
    sampled = find_score(scores, "held_out", split, "sampled") if split else None
    greedy = find_score(scores, "held_out", split, "greedy") if split else None
    tools = find_score(scores, "held_out", "test_tools", "sampled")
    trained = read_manifest(subject.trained)
    file = RunFile.read(subject.trained)
    return MethodRow(
        **subject.labels,
        reward=mean_outcome_reward(subject, split) if split else None,
        accuracy=sampled["accuracy"] if sampled else None,
        accuracy_low=sampled["low"] if sampled else None,
        accuracy_high=sampled["high"] if sampled else None,
        response_length=sampled["response_tokens"] if sampled else None,
        seconds=trained.seconds if trained else 0.0,
        greedy=greedy["accuracy"] if greedy else None,
        test_tools=tools["accuracy"] if tools else None,
        bfcl_v3=_bfcl(scores),
        train_reward=read_summary(subject.trained).get("reward/total"),
        split=split,
        run_id=file.run_id if file else None,
    )


def _bfcl(scores: Iterable[dict[str, Any]]) -> float | None:
    """BFCL's average over the non-live categories that ask for calls; None where not all of them were run.

    Not the categories that ask for none: a model that says nothing at all passes those.
    """
    found = [row["accuracy"] for row in scores if row["benchmark"] == "bfcl_v3" and row["split"] == NON_LIVE_CALLS]
    return found[0] if found else None


HEADLINES = (
    "accuracy",
    "accuracy_low",
    "accuracy_high",
    "reward",
    "response_length",
    "greedy",
    "test_tools",
    "bfcl_v3",
)
"""The numbers of a row that runs and models are ranked by in MLflow."""


@task(name="compare", task_run_name="compare methods", cache_policy=NO_CACHE)
def compare(subjects: list[Subject], summary: Path, tracking: Tracking) -> list[dict[str, Any]]:
    """Writes summary.json and returns its rows; the headline numbers also go to each method's run in MLflow."""
    rows = [asdict(method_row(subject)) for subject in subjects]
    write_atomically(summary, json.dumps({"methods": rows}, indent=2) + "\n")
    for subject, row in zip(subjects, rows, strict=True):
        file = RunFile.read(subject.trained)
        if file and stands(tracking.client(), file.run_id):
            named = {name if name.startswith("bfcl") else f"held_out/{name}": row[name] for name in HEADLINES}
            found = {name: value for name, value in named.items() if value is not None}
            TrackedRun(tracking, subject.trained, file).checkpoint_metrics(found)
    show_table("methods", [_shown(row) for row in rows], "Reward and held-out accuracy of each method")
    return rows


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: round(value, 4) if isinstance(value, float) else value for key, value in row.items() if key != "run_id"
    }


@task(name="report", task_run_name="write report", cache_policy=NO_CACHE)
def write_report(subjects: list[Subject], out: Path, notes: list[str]) -> Path:
    """One self-contained HTML file with tables and curves of all subjects; returns its path."""
    from evaluation import report

    several = len({(subject.model, subject.seed) for subject in subjects}) > 1
    written = report.write_report(out, [run_summary(subject, several) for subject in subjects], notes=notes)
    show_markdown("report", "\n\n".join([f"One HTML file: `{written.absolute()}`", *notes]))
    return written


def run_summary(subject: Subject, several: bool) -> RunSummary:
    """What the report knows of a subject, from the files that its stages left.

    `several`: the report is over several models or seeds, so that a name must say which one it is of.
    """
    from evaluation.report import RunSummary

    trained, evaluated = read_manifest(subject.trained), read_manifest(subject.evaluation)
    manifests = {"training": trained, "evaluation": evaluated}
    start = f" from {subject.init}" if subject.init != "sft" and subject.method not in ("base", "sft") else ""
    return RunSummary(
        name=f"{subject.method}{start}" + (f" · {subject.model} · seed {subject.seed}" if several else ""),
        method=subject.method,
        model=subject.model,
        seed=subject.seed,
        init=subject.init,
        # SFT's loss is of another kind than a policy's; curves are compared between policies.
        metrics=[] if subject.method in ("base", "sft") else list(Tail(subject.trained / METRICS)),
        scores=read_scores(subject.evaluation),
        seconds=trained.seconds if trained else None,
        provenance={
            name: {"inputs": manifest.inputs, "config": manifest.config, "code": manifest.code}
            for name, manifest in manifests.items()
            if manifest
        },
        evaluation=subject.evaluation,
    )
