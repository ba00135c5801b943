"""Makes a checkpoint the champion of MLflow's registry, where a smoke evaluation and, if asked, a person accept it."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, pause_flow_run
from prefect.client.schemas import State
from prefect.exceptions import FlowPauseTimeout
from prefect.input import RunInput
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import Field

from awpo.config import EvaluationConfig
from awpo.errors import UserError
from evaluation.items import read_scores
from flows.form_parameters import check_parameters
from flows.parameters import Share
from flows.pieces import THREADS_ALONE
from flows.preflight import check_out
from tasks.cancellation import stops_its_tasks
from tasks.evaluation import evaluate, find_score
from tasks.layout import checkpoint_of
from tasks.parents import close_runs, parent_run
from tasks.promotion import promoted
from tasks.registry import (
    CHAMPION,
    MODEL_NAME,
    SCHEME,
    Candidate,
    aliased_version,
    candidate_of,
    checked_checkpoint,
    find_version,
    newest_candidate,
    register,
)
from tasks.stage_run import log
from tasks.tracking_store import Tracking

SMOKE = EvaluationConfig(benchmarks=("held_out",), splits=("validation",), instances_per_split=16, samples=1)
ASK_SECONDS = 5


class SmokeFailed(RuntimeError):
    """The candidate did not pass its smoke evaluation; the champion is who it was."""


class NotApproved(RuntimeError):
    """Nobody said yes or no in time; the champion is who it was."""


class Refused(RuntimeError):
    """A person said no, and why."""


class Approval(RunInput):
    """The form that a person answers before a promotion is made for good."""

    approve: bool = Field(description="Yes: the alias stays with the candidate. No: it goes back")
    reason: str = Field(min_length=1, max_length=1000, description="Why; it is kept with the version in the registry")


def _run_name() -> str:
    given = flow_run.parameters
    return f"promote {given.get('candidate') or 'the newest checkpoint'} to {given.get('alias')}"


@flow(
    name="promote",
    flow_run_name=_run_name,
    on_crashed=[close_runs],
    on_cancellation=[close_runs],
    validate_parameters=True,
)
def promote(
    candidate: str | None = None,
    alias: str = CHAMPION,
    approval: bool = False,
    approval_hours: Annotated[float, Field(gt=0, le=168)] = 24.0,
    instances: str | None = None,
    minimum_accuracy: Share = 0.05,
    maximum_empty_rate: Share = 0.5,
    out: str = "runs/promote",
    name: str = MODEL_NAME,
    smoke: EvaluationConfig = SMOKE,
) -> dict[str, Any] | State[Any]:
    """Gives a candidate the alias and evaluates it through the alias on a few instances; where it fails, it goes back.

    The alias goes back, too, where a person refuses or does not answer in time, and where the run is cancelled or
    killed. With the alias "candidate" this nominates a checkpoint for the nightly regression; once it has passed its
    nights, models:/NAME@candidate is promoted to champion.

    Args:
        candidate: Folder of a checkpoint, or models:/NAME@ALIAS; empty for the newest that policy training left
        alias: Alias that is moved: champion, or candidate to nominate for the nightly regression
        approval: Wait for a person's yes, given by the button Resume on this run's page; until then the alias is moved
        approval_hours: How long to wait for it; without an answer the alias goes back
        instances: Folder of instances for the smoke evaluation; empty for those the candidate was trained on
        minimum_accuracy: Greedy accuracy below which the candidate is refused
        maximum_empty_rate: Share of empty answers above which the candidate is refused
        out: Folder of the smoke evaluation
        name: Name in the registry
        smoke: What the smoke evaluation runs; the validation split, so that no test split decides
    """
    check_parameters()
    settings = {"candidate": candidate, "instances": instances, "smoke": smoke.model_dump(mode="json"), "name": name}
    check_out(Path(out))
    with stops_its_tasks(), parent_run("promote", Path(out), settings) as (tracking, run):
        known = find_version(candidate, tracking) if candidate and candidate.startswith(SCHEME) else None
        chosen = _chosen(candidate, known, tracking)
        folder = Path(instances) if instances else chosen.instances
        if folder is None or not folder.is_dir():
            raise UserError(f"no instances to evaluate {chosen.checkpoint} on; give the folder of some as 'instances'")
        version = known if known and known.name == name else register(chosen, tracking, name=name)
        before = aliased_version(tracking, alias, name=name)
        try:
            with promoted(version, tracking, alias) as place:
                row = _smoke_evaluation(place, folder, Path(out) / "smoke", smoke, tracking)
                found = f"accuracy {row['accuracy']:.3f}, empty {row['empty_rate']:.3f}" if row else "nothing evaluated"
                if row is None or row["accuracy"] < minimum_accuracy or row["empty_rate"] > maximum_empty_rate:
                    raise SmokeFailed(
                        f"{place} failed its smoke evaluation ({found}; asked: accuracy of at least "
                        f"{minimum_accuracy}, at most {maximum_empty_rate} empty); {alias} is unchanged"
                    )
                if approval:
                    told = f"version {before.version}" if before else "no version"
                    _ask(f"`models:/{name}@{alias}`: {told} → version {version.version}", place, found, approval_hours)
        except Refused as refusal:
            run.tags({"awpo.refused": refusal})
            tracking.client().set_model_version_tag(name, version.version, "awpo.refused", str(refusal))
            return Completed(name="Refused", message=f"{refusal}; {alias} is unchanged")
        run.tags({"awpo.champion": f"models:/{name}/{version.version}"})
        log(f"models:/{name}@{alias} is version {version.version}: {place}")
    return {"version": version.version, "checkpoint": str(place), "accuracy": row["accuracy"], "run_id": run.run_id}


def _chosen(candidate: str | None, known: Any, tracking: Tracking) -> Candidate:
    if known:
        return candidate_of(checked_checkpoint(known), tracking)
    if candidate:
        return candidate_of(checkpoint_of(Path(candidate)), tracking)
    return newest_candidate(tracking)


def _smoke_evaluation(
    place: Path, folder: Path, out: Path, smoke: EvaluationConfig, tracking: Tracking
) -> dict[str, Any] | None:
    """The greedy score on the first split, or None where it was not run."""
    labels = {"method": "candidate", "init": "base", "model": place.parent.name, "seed": smoke.seed}
    # A task that is tried again rolls the transaction around it back at its first failure.
    once = evaluate.with_options(retries=0)
    result = once(place, folder, out, smoke, labels, tracking, THREADS_ALONE)
    return find_score(read_scores(result), "held_out", smoke.splits[0], "greedy")


def _ask(moved: str, place: Path, found: str, hours: float) -> None:
    """Waits for a person's answer. Raises Refused for a no, NotApproved where there is none in time."""
    form = Approval.with_initial_data(description=f"{moved}\n\nCheckpoint: `{place}`\n\nSmoke evaluation: {found}")
    log(f"waiting up to {hours:g} h for a person: the button Resume on this run's page has the form")
    try:
        answer = pause_flow_run(wait_for_input=form, timeout=int(hours * 3600), poll_interval=ASK_SECONDS)
    except FlowPauseTimeout:
        raise NotApproved(f"nobody approved {place} within {hours:g} h; the alias is back where it was") from None
    if not answer.approve:
        raise Refused(f"refused: {answer.reason}")
    log(f"approved: {answer.reason}")


if __name__ == "__main__":
    promote()
