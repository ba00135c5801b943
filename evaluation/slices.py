"""A slice of a benchmark's part, and one score over several parts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

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


def pooled(rows: Sequence[ScoreRow], due: Sequence[str], *, split: str, **fields: Any) -> ScoreRow | None:
    """One greedy score over all items of the splits `due`, from their rows; None where none of them was run.

    Where every item was judged this is correct / items with Wilson's interval. Where a part is a slice, each counts
    by its full size ("available"), with the interval of a stratified mean. `fields` are added. The row is "partial"
    where a split is missing (named in "not_run") or has items without a verdict.
    """
    found = {row["split"]: row for row in rows if row["mode"] == "greedy" and row["group"] == "all"}
    parts = [found[name] for name in due if name in found]
    if not parts:
        return None
    items = sum(part["items"] for part in parts)
    if all(part["items"] == part["available"] for part in parts):
        correct = sum(round(part["accuracy"] * part["items"]) for part in parts)
        accuracy, (low, high) = correct / items, wilson(correct, items)
    else:
        weights = [part["available"] for part in parts]
        accuracy, low, high = weighted_mean([(part["accuracy"], part["items"]) for part in parts], weights)
    row: ScoreRow = {"benchmark": parts[0]["benchmark"], "split": split, "mode": "greedy", "group": "average"}
    row |= {"accuracy": accuracy, "low": low, "high": high, "items": items}
    row |= {key: sum(part[key] for part in parts) for key in ("dialogues", "available", "seconds")}
    row |= {
        key: sum(part[key] * part["items"] for part in parts) / items
        for key in ("empty_rate", "response_tokens", "cut_rate")
    }
    if len(parts) < len(due):
        row |= {"partial": True, "not_run": [name for name in due if name not in found]}
    if missing := sum(part.get("missing", 0) for part in parts):
        row |= {"partial": True, "missing": missing}
    return row | {"protocol": parts[0]["protocol"], "splits": [part["split"] for part in parts]} | fields
