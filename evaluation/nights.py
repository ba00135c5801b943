"""What the nights leave: a file each in the night's folder, and the table of the last ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from awpo.files import write_atomically
from evaluation.diff import Diff
from evaluation.nightly import Night

NIGHT, FLIPS = "night.json", "flips.json"
UNFINISHED = "no result"
"""The state of a night that left no file: it was stopped, or failed before it had anything to say."""


def write_night(
    folder: Path,
    *,
    champion: str,
    candidate: str | None,
    state: str,
    night: Night | None = None,
    diff: Diff | None = None,
    scores: Mapping[str, float] | None = None,
    accepted: Mapping[str, float] | None = None,
) -> Path:
    """Writes night.json, and with a `diff` of champion and candidate flips.json; returns the first.

    `champion` and `candidate` are names in the registry, `state` "passed", "regressed" or "accepted". `scores` are the
    champion's accuracies by benchmark/split/mode, `accepted` those that it is held against.
    """
    value: dict[str, Any] = {"night": folder.name, "champion": champion, "candidate": candidate, "state": state}
    value |= {"scores": dict(scores or {}), "accepted": dict(accepted or {})}
    if night:
        value |= {
            "margin": night.margin,
            "detectable": night.detectable,
            "missing": night.missing,
            "whole": night.whole.to_json(),
            "parts": [part.to_json() for part in night.parts],
        }
    if diff:
        value |= {change: sum(flip.change == change for flip in diff.flips) for change in ("broken", "fixed")}
        write_atomically(folder / FLIPS, json.dumps(diff.to_json(), indent=1, ensure_ascii=False) + "\n")
    path = folder / NIGHT
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    return path


def trend(folder: Path, nights: int) -> list[dict[str, Any]]:
    """A row for each of the last `nights` nights in `folder`, the newest first; shares as percentages with a decimal.

    A night's folder without a file is a row, too.
    """
    rows = []
    for place in sorted((path for path in folder.glob("*/") if not path.name.startswith(".")), reverse=True)[:nights]:
        try:
            found = json.loads((place / NIGHT).read_text("utf-8"))
        except (OSError, ValueError):
            rows.append({"night": place.name, "state": UNFINISHED})
            continue
        row = {"night": place.name, "state": found["state"], "champion": found["champion"]}
        if whole := found.get("whole"):
            row |= {
                "candidate": found["candidate"],
                "items": whole["items"],
                "champion %": _percent(whole["champion"]),
                "candidate %": _percent(whole["candidate"]),
                "difference (95%)": f"{100 * whole['difference']:+.1f} [{100 * whole['low']:+.1f}, {100 * whole['high']:+.1f}]",
                "broken": found["broken"],
                "fixed": found["fixed"],
            }
        else:
            row |= {f"{name} %": _percent(score) for name, score in found["scores"].items()}
        rows.append(row)
    return rows


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
