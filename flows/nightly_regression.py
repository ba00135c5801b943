"""Evaluates the champion every night against the scores that were accepted for it."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas import State
from prefect.states import Completed

from awpo.artifacts import input_identity
from awpo.config import EvaluationConfig
from awpo.errors import UserError
from awpo.types import content_hash
from flows.pieces import THREADS_ALONE
from tasks.cancellation import stops_its_tasks
from tasks.evaluation import evaluate, read_scores
from tasks.parents import parent_run
from tasks.registry import (
    CHAMPION,
    MODEL_NAME,
    accept_scores,
    accepted_scores,
    candidate_of,
    champion_version,
    checked_checkpoint,
)
from tasks.stage_run import log, show_table
from tasks.tracking import connect

NIGHTLY = EvaluationConfig(benchmarks=("held_out",), instances_per_split=60, samples=4)


class Regression(RuntimeError):
    """The champion scores lower than what was accepted for it."""


@flow(name="nightly-regression", validate_parameters=True)
def nightly_regression(
    instances: str | None = None,
    max_drop: float = 0.03,
    out: str = "runs/nightly",
    evaluation: EvaluationConfig = NIGHTLY,
    name: str = MODEL_NAME,
    alias: str = CHAMPION,
) -> dict[str, Any] | State[Any]:
    """Evaluates the champion and fails where an accuracy is lower than accepted by more than MAX_DROP.

    The first night of a champion (or of other items) accepts what it finds; later nights never do, so that a slow
    decline cannot hide. Without a champion there is nothing to check, and the run's state says so.

    Args:
        instances: Folder of instances; empty for those the champion was trained on
        max_drop: Largest drop of an accuracy that passes, as a share
        out: Folder of the results; each night has its own within
        evaluation: What is evaluated
        name: Name in the registry
        alias: Alias of the champion
    """
    version = champion_version(connect(), name=name, alias=alias)
    if version is None:
        return Completed(name="NothingToCheck", message=f"models:/{name}@{alias} does not exist; run promote first")
    checkpoint = checked_checkpoint(version)
    night = Path(out) / datetime.now(UTC).strftime("%Y-%m-%dT%H%M%S")
    settings = {"champion": f"models:/{name}/{version.version}", "evaluation": evaluation.model_dump(mode="json")}
    with stops_its_tasks(), parent_run("nightly-regression", night, settings) as (tracking, run):
        folder = Path(instances) if instances else candidate_of(checkpoint, tracking).instances
        if folder is None or not folder.is_dir():
            raise UserError(f"no instances to evaluate {checkpoint} on; give the folder of some as 'instances'")
        labels = {"method": alias, "init": "base", "model": name, "seed": evaluation.seed}
        result = evaluate(checkpoint, folder, night / "evaluation", evaluation, labels, tracking, THREADS_ALONE)
        found = {
            f"{row['benchmark']}/{row['split']}/{row['mode']}": row["accuracy"]
            for row in read_scores(result)
            if row["group"] == "all"
        }
        protocol = content_hash([input_identity(folder), evaluation.model_dump(mode="json", exclude={"threads"})])
        accepted = accepted_scores(version, protocol)
        if accepted is None:
            accept_scores(version, protocol, found, tracking)
            log(f"first evaluation of version {version.version} on these items: accepted as its scores")
            accepted = found
        drops = {key: accepted[key] - found.get(key, 0.0) for key in accepted}
        run.metrics({f"drop/{key}": drop for key, drop in drops.items()})
        rows = [{"score": key, "accepted": accepted[key], "found": found.get(key)} for key in accepted]
        show_table(f"nightly {name}", rows, "Accepted and found accuracies of the champion")
        worse = {key: drop for key, drop in drops.items() if drop > max_drop}
        if worse:
            lines = "; ".join(f"{key} {accepted[key]:.3f} -> {found.get(key, 0.0):.3f}" for key in worse)
            raise Regression(
                f"models:/{name}@{alias} (version {version.version}) dropped by more than {max_drop}: {lines}"
            )
    return {"version": version.version, "scores": found, "accepted": accepted, "run_id": run.run_id}


if __name__ == "__main__":
    nightly_regression()
