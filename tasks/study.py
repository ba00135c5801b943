"""Cells of a study: which there are, one task for each, and the file that remembers them."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from awpo.artifacts import read_manifest
from awpo.config import EvaluationConfig, JudgeConfig
from awpo.config_training import PolicySettings
from awpo.errors import UserError
from awpo.events import METRICS, Tail
from awpo.methods import get_method
from awpo.types import content_hash
from evaluation.items import read_scores
from evaluation.study_cells import NO_JUDGE, CellResult, add_cell, read_cells
from evaluation.study_report import study_json, study_markdown, write_study
from tasks.evaluation import evaluate, find_score
from tasks.layout import Cell
from tasks.stage_run import show_markdown
from tasks.tracking import TrackedRun
from tasks.tracking_store import Tracking
from tasks.training import train_policy

MAIN_SPLIT, TOOLS_SPLIT = "test_phrasings", "test_tools"
SCALE_FREE = frozenset({"gdpo", "dara"})
"""Estimators that divide each reward by its own std: the judge's scale is nothing to them, so one is tried."""

_writing = threading.Lock()


@dataclass(frozen=True)
class StudyCell:
    """One method under one judge (None: the method reads none) with one seed."""

    method: str
    judge: JudgeConfig | None
    seed: int

    @property
    def judge_label(self) -> str:
        return self.judge.label if self.judge else NO_JUDGE

    @property
    def key(self) -> tuple[str, str, int]:
        return self.method, self.judge_label, self.seed

    @property
    def title(self) -> str:
        return f"{self.method} · {self.judge_label} · seed {self.seed}"


@dataclass(frozen=True)
class CellPlace:
    """What the cells of one seed share: the checkpoint that they start from, its names, folders and data."""

    checkpoint: str
    label: str
    init: str
    folders: Cell
    instances: Path


def plan_cells(methods: Sequence[str], judges: Sequence[JudgeConfig], seeds: Sequence[int]) -> list[StudyCell]:
    """Every method with every judge that makes a difference to it, judge by judge, then seed by seed.

    A method that reads no judge is one cell a seed; `sft`, which starts them all, is evaluated once a seed. An
    estimator that is free of the judge's scale is tried at the first scale given for each kind of judge.
    """
    found: dict[tuple[str, str, int], StudyCell] = {}
    for judge in judges or [JudgeConfig()]:
        twin = next(other for other in judges or [judge] if other.model_copy(update={"scale": judge.scale}) == judge)
        for seed in seeds:
            for name in ("sft", *methods):
                method = get_method(name)
                if method.estimator in SCALE_FREE and judge is not twin:
                    continue
                cell = StudyCell(name, judge if method.needs_judge else None, seed)
                found.setdefault(cell.key, cell)
    return list(found.values())


def missing_cells(cells: Iterable[StudyCell], store: Path, common: dict[str, Any]) -> list[StudyCell]:
    """The cells that `store` does not hold yet.

    Raises UserError where it holds one that was made by other settings: the two can't be compared.
    """
    known = {cell.key: cell for cell in read_cells(store)}
    missing = []
    for cell in cells:
        found, settings = known.get(cell.key), settings_hash(common, cell.method)
        if found is None:
            missing.append(cell)
        elif found.settings != settings:
            raise UserError(
                f"{store} holds {cell.title} from other settings ({found.settings}, now {settings}); "
                "give the study another file of cells, or the settings that it was begun with"
            )
    return missing


def settings_hash(common: dict[str, Any], method: str) -> str:
    """The hash of what a cell depends on but judge and seed; keys at their defaults and descriptions do not count."""
    words = {"name", "summary", "sources", "reading"}
    entry = get_method(method).model_dump(mode="json", exclude_defaults=True, exclude=words)
    return content_hash([common, entry])


@task(name="study-cell", task_run_name="{cell.title}", cache_policy=NO_CACHE)
def run_cell(
    cell: StudyCell,
    place: CellPlace,
    policy: PolicySettings,
    evaluation: EvaluationConfig,
    store: Path,
    common: dict[str, Any],
    tracking: Tracking,
) -> CellResult:
    """Trains and evaluates one cell and writes its row into `store`; what its folders hold already is kept."""
    folders = place.folders
    if cell.judge:
        folders = Cell(folders.folder / cell.judge.label.replace(" ", "-"))
    trained, checkpoint = folders.sft, place.checkpoint
    if get_method(cell.method).trains:
        judged = policy.model_copy(update={"judge": cell.judge}) if cell.judge else policy
        config = judged.with_method(cell.method, cell.seed)
        trained = folders.policy(cell.method, place.init)
        checkpoint = str(
            train_policy(checkpoint, place.label, place.init, place.instances, trained, config, tracking, 1)
        )
    labels = {
        "method": cell.method,
        "init": place.init,
        "model": place.label,
        "seed": cell.seed,
        "judge": cell.judge_label,
    }
    out = folders.evaluation(cell.method)
    evaluated = evaluate(Path(checkpoint), place.instances, out, evaluation, labels, tracking, 1)
    result = cell_result(cell, settings_hash(common, cell.method), trained, evaluated)
    with _writing:
        add_cell(store, result)
    return result


def cell_result(cell: StudyCell, settings: str, trained: Path, evaluated: Path) -> CellResult:
    """The row of a cell, from the files that its stages left."""
    scores = read_scores(evaluated)
    manifest = read_manifest(trained)
    judge = cell.judge

    def score(split: str, mode: str, name: str = "accuracy") -> float:
        row = find_score(scores, "held_out", split, mode)
        return float(row[name]) if row else math.nan

    return CellResult(
        method=cell.method,
        judge=cell.judge_label,
        correlation=judge.correlation if judge and judge.correlation is not None else math.nan,
        scale=judge.scale if judge else math.nan,
        seed=cell.seed,
        settings=settings,
        code=manifest.code if manifest else "",
        accuracy=score(MAIN_SPLIT, "sampled"),
        accuracy_tools=score(TOOLS_SPLIT, "sampled"),
        greedy=score(MAIN_SPLIT, "greedy"),
        response_length=score(MAIN_SPLIT, "sampled", "response_tokens"),
        seconds=manifest.seconds if manifest else math.nan,
        **(training_numbers(trained / METRICS) if get_method(cell.method).trains else {}),
    )


def training_numbers(metrics: Path) -> dict[str, Any]:
    """What a policy's metrics.jsonl says of its training; see `CellResult`."""
    rows = [(int(row["step"]), row["metrics"]) for row in Tail(metrics)]
    drawn = [(step, row) for step, row in rows if "reward/outcome" in row]  # logged where rollouts were sampled
    tail = drawn[-max(1, len(drawn) // 4) :]
    norms = [row["gradient_norm"] for _, row in rows if "gradient_norm" in row]
    mean_norm = sum(norms) / len(norms)
    deviation = math.sqrt(sum((norm - mean_norm) ** 2 for norm in norms) / len(norms))

    def mean(name: str, over: Iterable[tuple[int, dict[str, float]]] = drawn) -> float:
        values = [row[name] for _, row in over if name in row]
        return sum(values) / len(values) if values else math.nan

    return {
        "steps": rows[-1][0],
        "steps_per_rollout": drawn[1][0] - drawn[0][0] if len(drawn) > 1 else rows[-1][0],
        "reward": mean("reward/outcome", tail),
        "gradient_norm": mean_norm,
        "gradient_norm_variation": deviation / mean_norm if mean_norm else math.nan,
        "training_length": mean("response_length", tail),
        "gate_open_share": mean("gate/open_share"),
        "saturated_share": mean("saturated_share"),
        "ratio": mean("gate/ratio_p50"),
        "advantage_correlation": mean("gate/correlation_p50"),
        "judge_correlation": mean("judge/outcome_correlation"),
        "clip_radius": mean("clip/radius_mean"),
        "clipped_share": mean("clip/clipped_share", rows),
        "reward_curve": tuple(row["reward/outcome"] for _, row in drawn),
    }


def sum_up(store: Path, planned: Sequence[StudyCell], out: Path, run: TrackedRun) -> dict[str, Any]:
    """Means and tests of the planned cells that there are: study.json, study.md and figures in `out`, on the run."""
    wanted = {cell.key: place for place, cell in enumerate(planned)}
    cells = sorted((cell for cell in read_cells(store) if cell.key in wanted), key=lambda cell: wanted[cell.key])
    for path in (store, *write_study(cells, out)):
        if path.exists():
            run.artifact(path)
    result = study_json(cells)
    for arm in result["arms"]:
        name = arm["method"] if arm["judge"] == NO_JUDGE else f"{arm['method']}/{arm['judge']}"
        run.metrics({f"mean_accuracy/{name}": arm["accuracy"]["mean"]} if arm["accuracy"] else {})
    show_markdown("study", study_markdown(cells))
    return result
