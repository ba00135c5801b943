"""Paired comparison of two evaluations: the same items, answered by two checkpoints.

Comparing the two accuracies' own intervals would throw away that the items are the same; the difference is taken
item by item and resampled by dialogue. Runs that did not answer the same questions in the same way are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from awpo.artifacts import read_manifest
from awpo.errors import UserError
from evaluation.items import GREEDY, ITEMS, Item, by_item, mean_correct, read_items, read_scores
from evaluation.statistics import paired_difference

Mode = Literal["greedy", "sampled"]
# What must be equal for two runs to be comparable, beside the items themselves and the benchmark's protocol.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "greedy": ("max_completion_length",),
    "sampled": ("max_completion_length", "samples", "temperature"),
}


@dataclass(frozen=True, slots=True)
class EvaluationRun:
    """A finished evaluation, read back: its items, the settings that it ran with, the protocol by "benchmark/split"."""

    folder: Path
    items: tuple[Item, ...]
    settings: dict[str, Any]
    protocols: dict[str, str]


@dataclass(frozen=True, slots=True)
class PairedItems:
    """Verdicts of two runs on the same items, all (items,): shares of right answers over an item's samples.

    `missing` items have an answer without a verdict in one of the runs, and are left out.
    """

    items: tuple[str, ...]
    dialogues: tuple[str, ...]
    first: tuple[float, ...]
    second: tuple[float, ...]
    missing: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Accuracy of `second` minus that of `first` on the same items, with a 95% interval over dialogues.

    `missing` items have no verdict in one of the runs, and are in none of the numbers.
    """

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
    missing: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_run(folder: Path) -> EvaluationRun:
    """Raises UserError where `folder` is not a finished evaluation, or has an answer twice."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"{folder} is not a finished evaluation (no manifest.json); run the evaluation first")
    items = tuple(read_items(folder / ITEMS))
    _check_single(items, folder / ITEMS)
    protocols = {
        f"{row['benchmark']}/{row['split']}": row["protocol"] for row in read_scores(folder) if row.get("protocol")
    }
    return EvaluationRun(folder, items, manifest.config, protocols)


def _check_single(items: Sequence[Item], path: Path) -> None:
    """Raises UserError where an item has an answer more than once: it would count more than others."""
    times = Counter((item.benchmark, item.split, item.item_id, item.sample) for item in items)
    twice = [key for key, number in times.items() if number > 1]
    if twice:
        benchmark, split, name, sample = twice[0]
        which = "greedy answer" if sample == GREEDY else f"sample {sample}"
        raise UserError(
            f"{path} has the {which} of the item {name} of {benchmark}/{split} {times[twice[0]]} times"
            f"{f' ({len(twice)} answers stand there more than once)' if len(twice) > 1 else ''}; evaluate again into "
            "another folder"
        )


def compare(
    first: EvaluationRun, second: EvaluationRun, *, modes: Sequence[Mode] = ("greedy", "sampled"), seed: int = 0
) -> list[Difference]:
    """`second` against `first`, by benchmark, split and mode, for every split that either of them ran.

    Raises UserError where the two differ in protocol, in a setting that changes answers, or in items.
    """
    result: list[Difference] = []
    for mode in modes:
        for benchmark, split in splits_of(mode, first, second):
            result.append(_difference(first, second, benchmark, split, mode, seed))
    return result


def splits_of(mode: Mode, *runs: EvaluationRun) -> list[tuple[str, str]]:
    """Benchmark and split of everything that any of the runs answered in this mode, sorted."""
    return sorted({key for run in runs for key in _splits(run, mode)})


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
    for part in sorted(first.protocols.keys() & second.protocols.keys()):
        if first.protocols[part] != second.protocols[part]:
            raise UserError(
                f"cannot compare {first.folder} and {second.folder}: protocol of {part} is "
                f"{first.protocols[part]!r} in one and {second.protocols[part]!r} in the other"
            )


def pair_items(first: EvaluationRun, second: EvaluationRun, benchmark: str, split: str, mode: Mode) -> PairedItems:
    """The verdicts of both runs on the items of one split.

    Raises UserError where they did not answer the same items by the same protocol and settings.
    """
    _check_settings(first, second, mode)
    key = benchmark, split
    left, right = (by_item(_splits(run, mode).get(key, [])) for run in (first, second))
    if left.keys() != right.keys():
        shared = len(left.keys() & right.keys())
        raise UserError(
            f"cannot compare {first.folder} and {second.folder}: of {'/'.join(key)} they answered {len(left)} and "
            f"{len(right)} items, {shared} of them the same; evaluate both on the same items (same instances and seed)"
        )
    judged = [name for name in left if all(item.correct is not None for item in (*left[name], *right[name]))]
    return PairedItems(
        items=tuple(judged),
        dialogues=tuple(left[name][0].dialogue_id for name in judged),
        first=tuple(mean_correct(left[name]) for name in judged),
        second=tuple(mean_correct(right[name]) for name in judged),
        missing=len(left) - len(judged),
    )


def _difference(
    first: EvaluationRun, second: EvaluationRun, benchmark: str, split: str, mode: Mode, seed: int
) -> Difference:
    pairs = pair_items(first, second, benchmark, split, mode)
    if not pairs.items:
        raise UserError(
            f"cannot compare {first.folder} and {second.folder}: no item of {benchmark}/{split} has a verdict in both; "
            "evaluate again the one whose requests failed"
        )
    estimate = paired_difference(pairs.first, pairs.second, pairs.dialogues, seed=seed)
    return Difference(
        benchmark=benchmark,
        split=split,
        mode=mode,
        first=sum(pairs.first) / len(pairs.first),
        second=sum(pairs.second) / len(pairs.second),
        difference=estimate.value,
        low=estimate.low,
        high=estimate.high,
        items=estimate.items,
        dialogues=estimate.clusters,
        missing=pairs.missing,
    )
