"""Paired comparison of two evaluations: the same items, answered by two checkpoints.

Comparing the two accuracies' own intervals would throw away that the items are the same; the difference is taken
item by item and resampled by dialogue. Runs that did not answer the same questions in the same way are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from awpo.artifacts import read_manifest
from awpo.errors import UserError
from evaluation.items import GREEDY, ITEMS, SCORES, Item, by_item, mean_correct, read_items
from evaluation.statistics import paired_difference

Mode = Literal["greedy", "sampled"]
# What must be equal for two runs to be comparable, beside the items themselves and the benchmark's protocol.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "greedy": ("max_completion_length",),
    "sampled": ("max_completion_length", "samples", "temperature"),
}


@dataclass(frozen=True, slots=True)
class EvaluationRun:
    """A finished evaluation, read back: its items, the settings that it ran with, protocol by benchmark."""

    folder: Path
    items: tuple[Item, ...]
    settings: dict[str, Any]
    protocols: dict[str, str]


@dataclass(frozen=True, slots=True)
class Difference:
    """Accuracy of `second` minus that of `first` on the same items, with a 95% interval over dialogues."""

    benchmark: str
    split: str
    mode: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    items: int
    dialogues: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_run(folder: Path) -> EvaluationRun:
    """Raises UserError where `folder` is not a finished evaluation."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"{folder} is not a finished evaluation (no manifest.json); run the evaluation first")
    items = tuple(read_items(folder / ITEMS))
    rows = json.loads((folder / SCORES).read_text("utf-8"))
    protocols = {row["benchmark"]: row["protocol"] for row in rows if row.get("protocol")}
    return EvaluationRun(folder, items, manifest.config, protocols)


def compare(
    first: EvaluationRun, second: EvaluationRun, *, modes: Sequence[Mode] = ("greedy", "sampled"), seed: int = 0
) -> list[Difference]:
    """`second` against `first`, by benchmark, split and mode, for every split that either of them ran.

    Raises UserError where the two differ in protocol, in a setting that changes answers, or in items.
    """
    result: list[Difference] = []
    for mode in modes:
        one, two = _splits(first, mode), _splits(second, mode)
        if one or two:
            _check_settings(first, second, mode)
        for key in sorted({*one, *two}):
            result.append(_difference(first, second, key, mode, one.get(key, []), two.get(key, []), seed))
    return result


def _splits(run: EvaluationRun, mode: Mode) -> dict[tuple[str, str], list[Item]]:
    found: dict[tuple[str, str], list[Item]] = {}
    for item in run.items:
        if (item.sample == GREEDY) == (mode == "greedy"):
            found.setdefault((item.benchmark, item.split), []).append(item)
    return found


def _check_settings(first: EvaluationRun, second: EvaluationRun, mode: Mode) -> None:
    for key in _SETTINGS[mode]:
        if first.settings.get(key) != second.settings.get(key):
            raise UserError(
                f"cannot compare {first.folder} and {second.folder}: {key} is {first.settings.get(key)} in one and "
                f"{second.settings.get(key)} in the other; evaluate both with the same settings"
            )
    for benchmark in sorted(first.protocols.keys() & second.protocols.keys()):
        if first.protocols[benchmark] != second.protocols[benchmark]:
            raise UserError(
                f"cannot compare {first.folder} and {second.folder}: protocol of {benchmark} is "
                f"{first.protocols[benchmark]!r} in one and {second.protocols[benchmark]!r} in the other"
            )


def _difference(
    first: EvaluationRun,
    second: EvaluationRun,
    key: tuple[str, str],
    mode: Mode,
    one: list[Item],
    two: list[Item],
    seed: int,
) -> Difference:
    left, right = by_item(one), by_item(two)
    if left.keys() != right.keys():
        shared = len(left.keys() & right.keys())
        raise UserError(
            f"cannot compare {first.folder} and {second.folder}: of {'/'.join(key)} they answered {len(left)} and "
            f"{len(right)} items, {shared} of them the same; evaluate both on the same items (same instances and seed)"
        )
    names = list(left)
    before = [mean_correct(left[name]) for name in names]
    after = [mean_correct(right[name]) for name in names]
    estimate = paired_difference(before, after, [left[name][0].dialogue_id for name in names], seed=seed)
    return Difference(
        benchmark=key[0],
        split=key[1],
        mode=mode,
        first=sum(before) / len(before),
        second=sum(after) / len(after),
        difference=estimate.value,
        low=estimate.low,
        high=estimate.high,
        items=estimate.items,
        dialogues=estimate.clusters,
    )
