"""A slice of a benchmark's part, and one score over several parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from awpo.events import Progress
from evaluation.benchmarks import Part, PartResult
from evaluation.generate import Generator
from evaluation.items import ScoreRow
from evaluation.statistics import weighted_mean, wilson


class _Named(Protocol):
    @property
    def id(self) -> str: ...


N = TypeVar("N", bound=_Named)


def take(items: Sequence[N], count: int | None, seed: int) -> list[N]:
    """At most `count` items (None: all) in their own order, by a hash of seed and id: a smaller slice is part of a
    larger one."""
    ranked = sorted(items, key=lambda item: hashlib.sha256(f"{seed}\0{item.id}".encode()).digest())
    chosen = {item.id for item in ranked[:count]}
    return [item for item in items if item.id in chosen]


def sliced(
    name: str,
    known: Sequence[N],
    count: int | None,
    seed: int,
    evaluate: Callable[[Generator, Sequence[N], Progress], PartResult],
) -> Part:
    """The part that evaluates what `take` takes of all its items; its rows say how many are "available"."""
    chosen = take(known, count, seed)

    def run(generator: Generator, progress: Progress) -> PartResult:
        items, rows = evaluate(generator, chosen, progress)
        return items, [row | {"available": len(known)} for row in rows]

    return Part(name, len(chosen), run)


def pooled(rows: Sequence[ScoreRow], due: Sequence[str], *, split: str) -> ScoreRow | None:
    """One greedy score over all items of the splits `due`, from their rows; None where none of them was run.

    Each part counts by its full size ("available"), so that over whole parts this is correct / items. The interval is
    Wilson's where the parts are whole and each item stands for itself. Where they are slices, or items come from
    dialogues, it is that of a stratified mean, items of dialogues counted by their effective number
    (`clustered_share`); no dialogue may lie in two parts. Where a split was not run, or has items without a verdict,
    the row is "partial": its accuracy is None, "not_run" and "missing" say what it lacks.
    """
    found = {row["split"]: row for row in rows if row["mode"] == "greedy" and row["group"] == "all"}
    parts = [found[name] for name in due if name in found]
    if not parts:
        return None
    row: ScoreRow = {"benchmark": parts[0]["benchmark"], "split": split, "mode": "greedy", "group": "average"}
    row |= {key: sum(part[key] for part in parts) for key in ("items", "dialogues", "available", "seconds")}
    row |= {"protocol": parts[0]["protocol"], "splits": list(due)}
    if full := sum(part.get("no_room", 0) for part in parts):
        row["no_room"] = full
    not_run = [name for name in due if name not in found]
    missing = {part["split"]: part["missing"] for part in parts if part.get("missing")}
    if not_run or missing:
        nothing = {"accuracy": None, "low": None, "high": None}
        return row | nothing | {"partial": True, "not_run": not_run, "missing": missing}
    strata = [(part["accuracy"], part["effective_items"]) for part in parts]
    row["accuracy"], row["low"], row["high"] = weighted_mean(strata, [part["available"] for part in parts])
    if row["items"] == row["available"]:
        correct = sum(round(part["accuracy"] * part["items"]) for part in parts)
        row["accuracy"] = correct / row["items"]
        if row["items"] == row["dialogues"]:
            row["low"], row["high"] = wilson(correct, row["items"])
    for key in ("empty_rate", "response_tokens", "cut_rate"):
        row[key] = sum(part[key] * part["available"] for part in parts) / row["available"]
    return row
