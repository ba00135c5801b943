"""Makes a checkpoint the champion of MLflow's registry, after a smoke evaluation."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from pathlib import Path
from typing import Any

from prefect import flow

from awpo.config import EvaluationConfig
from awpo.errors import UserError
from flows.pieces import THREADS_ALONE
from tasks.cancellation import stops_its_tasks
from tasks.evaluation import evaluate, find_score, read_scores
from tasks.layout import checkpoint_of
from tasks.parents import parent_run
from tasks.registry import (
    CHAMPION,
    MODEL_NAME,
    SCHEME,
    candidate_of,
    checked_checkpoint,
    find_version,
    move_alias,
    newest_candidate,
    register,
)
from tasks.stage_run import log

SMOKE = EvaluationConfig(benchmarks=("held_out",), splits=("validation",), instances_per_split=16, samples=1)


class SmokeFailed(RuntimeError):
    """The candidate did not pass its smoke evaluation; the champion is who it was."""


@flow(name="promote", flow_run_name="promote {candidate}", validate_parameters=True)
def promote(
    candidate: str | None = None,
    instances: str | None = None,
    minimum_accuracy: float = 0.05,
    maximum_empty_rate: float = 0.5,
    out: str = "runs/promote",
    smoke: EvaluationConfig = SMOKE,
    name: str = MODEL_NAME,
    alias: str = CHAMPION,
) -> dict[str, Any]:
    """Evaluates a candidate on a few instances and, if it passes, gives it the alias.

    The alias is moved last, and moved back where it does not resolve to the candidate's files afterwards. With the
    alias "candidate" this nominates a checkpoint for the nightly regression; once it has passed its nights,
    models:/NAME@candidate is promoted to champion.

    Args:
        candidate: Folder of a checkpoint, or models:/NAME@ALIAS; empty for the newest that policy training left
        instances: Folder of instances for the smoke evaluation; empty for those the candidate was trained on
        minimum_accuracy: Greedy accuracy below which the candidate is refused
        maximum_empty_rate: Share of empty answers above which the candidate is refused
        out: Folder of the smoke evaluation
        smoke: What the smoke evaluation runs; the validation split, so that no test split decides
        name: Name in the registry
        alias: Alias that is moved: champion, or candidate to nominate for the nightly regression
    """
    settings = {"candidate": candidate, "instances": instances, "smoke": smoke.model_dump(mode="json"), "name": name}
    with stops_its_tasks(), parent_run("promote", Path(out), settings) as (tracking, run):
        known = find_version(candidate, tracking) if candidate and candidate.startswith(SCHEME) else None
        if known:
            chosen = candidate_of(checked_checkpoint(known), tracking)
        elif candidate:
            chosen = candidate_of(checkpoint_of(Path(candidate)), tracking)
        else:
            chosen = newest_candidate(tracking)
        folder = Path(instances) if instances else chosen.instances
        if folder is None or not folder.is_dir():
            raise UserError(f"no instances to evaluate {chosen.checkpoint} on; give the folder of some as 'instances'")
        labels = {"method": "candidate", "init": "base", "model": chosen.checkpoint.parent.name, "seed": smoke.seed}
        result = evaluate(chosen.checkpoint, folder, Path(out) / "smoke", smoke, labels, tracking, THREADS_ALONE)
        row = find_score(read_scores(result), "held_out", smoke.splits[0], "greedy")
        if row is None or row["accuracy"] < minimum_accuracy or row["empty_rate"] > maximum_empty_rate:
            found = f"accuracy {row['accuracy']:.3f}, empty {row['empty_rate']:.3f}" if row else "nothing evaluated"
            raise SmokeFailed(
                f"{chosen.checkpoint} failed its smoke evaluation ({found}; asked: accuracy of at least "
                f"{minimum_accuracy}, at most {maximum_empty_rate} empty); {alias} is unchanged"
            )
        version = known if known and known.name == name else register(chosen, tracking, name=name)
        place = move_alias(version, tracking, alias=alias)
        run.tags({"awpo.champion": f"models:/{name}/{version.version}"})
        log(f"models:/{name}@{alias} is version {version.version}: {place}")
    return {"version": version.version, "checkpoint": str(place), "accuracy": row["accuracy"], "run_id": run.run_id}


if __name__ == "__main__":
    promote()
