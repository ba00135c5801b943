"""Every night: the candidate against the champion on the same items, and the champion against its accepted scores."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas import State
from prefect.states import Completed
from pydantic import PositiveInt

from awpo.artifacts import input_identity
from awpo.config import EvaluationConfig
from awpo.errors import UserError
from awpo.types import content_hash
from evaluation.items import read_scores
from evaluation.nightly import MARGIN, Night
from evaluation.nights import FLIPS, NIGHT, write_night
from flows.form_parameters import check_parameters
from flows.parameters import PositiveShare
from flows.pieces import THREADS_ALONE
from flows.preflight import check_writable
from tasks.cancellation import stops_its_tasks
from tasks.evaluation import evaluate
from tasks.nightly import NAMED_FLIPS, broken_items, compare_night, emit_night, show_trend
from tasks.parents import close_runs, parent_run
from tasks.patience import patience_of_this_run
from tasks.registry import (
    CANDIDATE,
    CHAMPION,
    MODEL_NAME,
    accept_scores,
    accepted_scores,
    aliased_version,
    candidate_of,
    checked_checkpoint,
)
from tasks.stage_run import log, show_table
from tasks.tracking import TrackedRun
from tasks.tracking_store import Tracking, connect

NIGHTLY = EvaluationConfig(benchmarks=("held_out",), instances_per_split=400, samples=1)


class Regression(RuntimeError):
    """The candidate is worse than the champion, or the champion than what was accepted for it."""


@flow(name="nightly-regression", on_crashed=[close_runs], on_cancellation=[close_runs], validate_parameters=True)
def nightly_regression(
    instances: str | None = None,
    margin: PositiveShare = MARGIN,
    max_drop: PositiveShare = 0.03,
    nights: PositiveInt = 14,
    out: str = "runs/nightly",
    name: str = MODEL_NAME,
    alias: str = CHAMPION,
    candidate: str = CANDIDATE,
    evaluation: EvaluationConfig = NIGHTLY,
) -> dict[str, Any] | State[Any]:
    """Evaluates champion and candidate on the same items and fails where the candidate is worse by more than MARGIN.

    The champion is also held against the scores accepted for it. Its first night (or that of other items) accepts what
    it finds; later nights never do, so that a slow decline cannot hide. No night makes a champion: `promote` does.
    Without a champion there is nothing to check, and the run's state says so.

    Args:
        instances: Folder of instances; empty for those the champion was trained on
        margin: Drop of accuracy that passes, as a share; a regression is one whose 95% interval lies beyond it
        max_drop: Largest drop of the champion's accuracies below what was accepted for it, as a share
        nights: How many of the last nights the table of the trend shows
        out: Folder of the results; each night has its own within
        name: Name in the registry
        alias: Alias of the champion
        candidate: Alias of the candidate; where no version bears it, only the champion is evaluated
        evaluation: What is evaluated; the number of items decides how small a drop can be found
    """
    check_parameters()
    tracking = connect(patience=patience_of_this_run())
    version = aliased_version(tracking, alias, name=name)
    if version is None:
        return Completed(name="NothingToCheck", message=f"models:/{name}@{alias} does not exist; run promote first")
    rival = aliased_version(tracking, candidate, name=name)
    if rival is not None and rival.version == version.version:
        log(f"models:/{name}@{candidate} is the champion itself: nothing to compare")
        rival = None
    check_writable(Path(out))
    night = Path(out) / datetime.now(UTC).strftime("%Y-%m-%dT%H%M%S")
    settings: dict[str, Any] = {"champion": _uri(version), "candidate": _uri(rival) if rival else None}
    settings |= {"margin": margin, "evaluation": evaluation.model_dump(mode="json")}
    with stops_its_tasks(), parent_run("nightly-regression", night, settings) as (tracking, run):
        checkpoint = checked_checkpoint(version)
        folder = Path(instances) if instances else candidate_of(checkpoint, tracking).instances
        if folder is None or not folder.is_dir():
            raise UserError(f"no instances to evaluate {checkpoint} on; give the folder of some as 'instances'")
        results = {}
        for who, found in ((alias, version), *([(candidate, rival)] if rival else [])):
            labels = {"method": who, "init": "base", "model": name, "seed": evaluation.seed}
            place = checked_checkpoint(found)
            results[who] = evaluate(place, folder, night / who, evaluation, labels, tracking, THREADS_ALONE)
        scores = _accuracies(results[alias])
        protocol = content_hash([input_identity(folder), evaluation.identity()])
        accepted = _accepted(version, protocol, scores, tracking)
        problems = _dropped(version, scores, accepted, max_drop, run)
        if rival is None:
            state = "regressed" if problems else "passed"
            write_night(night, champion=_uri(version), candidate=None, state=state, scores=scores, accepted=accepted)
            decision, broken = None, []
        else:
            names = _uri(version), _uri(rival)
            decision, diff = compare_night(results[alias], results[candidate], night, names, margin, scores)
            broken = broken_items(diff)
            problems += _worse(decision, names, broken, night)
            run.metrics(_metrics(decision) | {"broken": len(broken), "fixed": len(diff.flips) - len(broken)})
            run.artifact(night / FLIPS)
        run.artifact(night / NIGHT)
        show_trend(Path(out), nights)
        reason = "; ".join(problems) or "nothing is worse by more than the margin"
        emit_night(name, night, regressed=bool(problems), reason=reason, payload=settings, flipped=broken)
        if problems:
            raise Regression(reason)
    whole = decision.whole.to_json() if decision else None
    return {
        "version": version.version,
        "candidate": rival.version if rival else None,
        "difference": whole,
        "scores": scores,
        "accepted": accepted,
        "out": str(night),
        "run_id": run.run_id,
    }


def _uri(version: Any) -> str:
    return f"models:/{version.name}/{version.version}"


def _accuracies(folder: Path) -> dict[str, float]:
    return {
        f"{row['benchmark']}/{row['split']}/{row['mode']}": row["accuracy"]
        for row in read_scores(folder)
        if row["group"] == "all"
    }


def _accepted(version: Any, protocol: str, scores: dict[str, float], tracking: Tracking) -> dict[str, float]:
    known = accepted_scores(version, protocol)
    if known is None:
        accept_scores(version, protocol, scores, tracking)
        log(f"first evaluation of version {version.version} on these items: accepted as its scores")
        return scores
    return known


def _dropped(
    version: Any, scores: dict[str, float], accepted: dict[str, float], max_drop: float, run: TrackedRun
) -> list[str]:
    """What of the champion's scores is missing or lower than accepted; all of them are shown."""
    rows = [{"score": key, "accepted": value, "found": scores.get(key)} for key, value in accepted.items()]
    show_table(f"nightly {version.name}", rows, "Accepted and found accuracies of the champion")
    run.metrics({f"drop/{key}": accepted[key] - scores[key] for key in accepted if key in scores})
    lines = [f"{key} {accepted[key]:.3f} -> no score" for key in accepted if key not in scores]
    lines += [
        f"{key} {accepted[key]:.3f} -> {scores[key]:.3f}"
        for key in accepted
        if key in scores and accepted[key] - scores[key] > max_drop
    ]
    if not lines:
        return []
    return [
        f"the champion {_uri(version)} dropped by more than {max_drop} below its accepted scores: {', '.join(lines)}"
    ]


def _worse(decision: Night, names: tuple[str, str], broken: list[str], night: Path) -> list[str]:
    if not decision.regressed:
        return []
    found = ", ".join(
        f"{verdict.part} {verdict.champion:.3f} -> {verdict.candidate:.3f} "
        f"({100 * verdict.low:+.1f} to {100 * verdict.high:+.1f} points over {verdict.items} items)"
        for verdict in decision.regressed
    )
    more = f" and {len(broken) - NAMED_FLIPS} more" if len(broken) > NAMED_FLIPS else ""
    items = f"{', '.join(broken[:NAMED_FLIPS])}{more}"
    return [
        f"the candidate {names[1]} is worse than the champion {names[0]} by more than {decision.margin}: {found}; "
        f"{len(broken)} items broken, all outputs in {night / FLIPS}: {items}"
    ]


def _metrics(decision: Night) -> dict[str, float]:
    found: dict[str, float] = {"detectable": decision.detectable, "missing": decision.missing}
    for verdict in (decision.whole, *decision.parts):
        found |= {
            f"{key}/{verdict.part}": getattr(verdict, key)
            for key in ("champion", "candidate", "difference", "low", "high")
        }
    return found


if __name__ == "__main__":
    nightly_regression()
