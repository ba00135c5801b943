"""What a night does beside evaluating: decide, tell of it in artifacts, and emit the event that an automation acts on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.runtime import flow_run

from evaluation.compare import read_run
from evaluation.diff import Diff, Flip, find_flips
from evaluation.nightly import Night, Verdict, compare_runs
from evaluation.nights import trend, write_night
from tasks.stage_run import show_table

REGRESSED, PASSED = "awpo.nightly.regressed", "awpo.nightly.passed"
"""Names of the events; their resource is awpo.model.NAME, with the model's name in the registry."""

SHOWN_FLIPS = 100
SHOWN_TEXT = 600  # characters of an output in an artifact; flips.json has all of them
NAMED_FLIPS = 20


@task(name="compare-night", task_run_name="compare candidate and champion", cache_policy=NO_CACHE)
def compare_night(
    champion: Path, candidate: Path, night: Path, names: tuple[str, str], margin: float, scores: dict[str, float]
) -> tuple[Night, Diff]:
    """Decides from the evaluations in `champion` and `candidate`; writes night.json and flips.json into `night`.

    `names` are those of champion and candidate in the registry. The decision and the flipped items are artifacts.
    """
    runs = read_run(champion), read_run(candidate)
    found, diff = compare_runs(*runs, margin=margin), find_flips(*runs)
    write_night(
        night,
        champion=names[0],
        candidate=names[1],
        state="regressed" if found.regressed else "passed",
        night=found,
        diff=diff,
        scores=scores,
    )
    show_table(
        "nightly decision",
        [_decision_row(verdict) for verdict in (found.whole, *found.parts)],
        f"{names[1]} less {names[0]}, greedy answers paired by item; a regression is an interval below "
        f"{-100 * margin:.1f} points. A drop of {100 * found.detectable:.1f} points of all items is found in 80% of "
        f"nights like this one. {found.missing} items without a verdict are left out.",
    )
    ordered = sorted(diff.flips, key=lambda flip: flip.change)  # what broke comes first
    show_table(
        "nightly flipped items",
        [_flip_row(flip) for flip in ordered[:SHOWN_FLIPS]],
        f"{min(len(ordered), SHOWN_FLIPS)} of {len(ordered)} greedy answers that only one of the two has right",
    )
    return found, diff


def _decision_row(verdict: Verdict) -> dict[str, Any]:
    return {
        "part": verdict.part,
        "items": verdict.items,
        "champion %": f"{100 * verdict.champion:.1f}",
        "candidate %": f"{100 * verdict.candidate:.1f}",
        "difference": f"{100 * verdict.difference:+.1f}",
        "interval": f"{100 * verdict.low:+.1f} to {100 * verdict.high:+.1f} ({100 * verdict.confidence:.4g}%)",
        "p (McNemar)": f"{verdict.p:.3g}",
        "regression": "yes" if verdict.regressed else "no",
    }


def _flip_row(flip: Flip) -> dict[str, Any]:
    worse = flip.second if flip.change == "broken" else flip.first
    return {
        "part": f"{flip.first.benchmark}/{flip.first.split}",
        "item": flip.first.item_id,
        "change": flip.change,
        "champion": flip.first.completion[:SHOWN_TEXT],
        "candidate": flip.second.completion[:SHOWN_TEXT],
        "why": f"{worse.error_type} {worse.detail}".strip()[:SHOWN_TEXT],
    }


def show_trend(out: Path, nights: int) -> list[dict[str, Any]]:
    """The last nights in `out` as a table artifact; returns its rows."""
    rows = trend(out, nights)
    show_table("nightly trend", rows, f"The last {len(rows)} nights, the newest first")
    return rows


def emit_night(
    name: str, night: Path, *, regressed: bool, reason: str, payload: Mapping[str, Any], flipped: Sequence[str] = ()
) -> None:
    """Emits the event of a night that had something to compare.

    Its payload has `reason` (one line), `folder`, `flipped` (names of items, at most 20) and what is in `payload`.
    """
    run = flow_run.id
    emit_event(
        REGRESSED if regressed else PASSED,
        resource=resource_of(name),
        related=[{"prefect.resource.id": f"prefect.flow-run.{run}", "prefect.resource.role": "flow-run"}]
        if run
        else [],
        payload=json.loads(
            json.dumps({**payload, "reason": reason, "folder": str(night), "flipped": list(flipped)[:NAMED_FLIPS]})
        ),
    )


def resource_of(name: str) -> dict[str, str]:
    """The resource of the events of a registered model."""
    return {"prefect.resource.id": f"awpo.model.{name}", "prefect.resource.name": name}


def broken_items(diff: Diff) -> list[str]:
    """The items that the candidate alone has wrong, as a message names them."""
    return [f"{f.first.benchmark}/{f.first.split} {f.first.item_id}" for f in diff.flips if f.change == "broken"]
