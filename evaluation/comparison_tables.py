"""Several evaluations against the first: paired differences, tests, and what is left of them after Holm's correction.

Evaluations of one method under several seeds of training are one subject. Against a reference of as many seeds its
difference is tested by a paired t over the seeds; with a single shared seed, over the items.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from awpo.errors import UserError
from evaluation.compare import EvaluationRun, Mode, PairedItems, pair_items, read_run, splits_of
from evaluation.statistics import holm, mcnemar, paired_difference, paired_test
from evaluation.text_tables import Table

MCNEMAR, OVER_SEEDS = "McNemar", "t over seeds"
_COLUMNS = (
    *("subject", "benchmark", "split", "mode", "reference %", "subject %", "difference", "95%"),
    *("p", "p, Holm", "test", "seeds", "items"),
)
_SEED = re.compile(r"seed-\w+")


@dataclass(frozen=True, slots=True)
class Subject:
    """A method's evaluations by seed of training. The seed is "seed-N" of the folder's path, else a number."""

    label: str
    runs: dict[str, EvaluationRun]


@dataclass(frozen=True, slots=True)
class Row:
    """`subject` less `reference` on one split: accuracies, their difference with its 95% interval, and its test.

    Numbers are None where one of the two has no answers there (`note` says which). With one seed the interval is the
    bootstrap's over dialogues, and the test McNemar's, of greedy answers only; with several both are Student's, over
    seeds. `adjusted` is Holm's p over all tests of the same mode. `missing` items have no verdict and are left out.
    """

    benchmark: str
    split: str
    mode: Mode
    reference: str
    subject: str
    first: float | None = None
    second: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    adjusted: float | None = None
    test: str = ""
    seeds: int = 0
    items: int = 0
    dialogues: int = 0
    missing: int = 0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_subjects(arguments: Sequence[str]) -> list[Subject]:
    """Subjects from folders of evaluations, each "FOLDER" or "LABEL=FOLDER", in order of first appearance.

    Without a label it is the folder's name (pipelines name it by the method). Where that would make all of them one
    subject, the paths tell them apart. Raises UserError for a folder that is no evaluation, or is given twice.
    """
    named = [_named(argument) for argument in arguments]
    labels = {label or folder.name for label, folder in named}
    if len(labels) == 1 and len(named) > 1 and not any(label for label, _ in named):
        named = [(str(folder), folder) for _, folder in named]
    subjects: dict[str, dict[str, EvaluationRun]] = {}
    seen: set[Path] = set()
    for label, folder in named:
        if folder.resolve() in seen:
            raise UserError(f"{folder} is given twice; give each evaluation once")
        seen.add(folder.resolve())
        runs = subjects.setdefault(label or folder.name, {})
        found = [part for part in folder.parts if _SEED.fullmatch(part)]
        seed = found[-1] if found else str(len(runs))
        if seed in runs:
            raise UserError(
                f"{runs[seed].folder} and {folder} are both {label or folder.name} with {seed}; "
                "give them labels of their own: LABEL=FOLDER"
            )
        runs[seed] = read_run(folder)
    return [Subject(label, runs) for label, runs in subjects.items()]


def _named(argument: str) -> tuple[str, Path]:
    label, equals, rest = argument.partition("=")
    if equals and label and rest and "/" not in label and not Path(argument).exists():
        return label, Path(rest)
    return "", Path(argument)


def compare_all(subjects: Sequence[Subject], *, seed: int = 0) -> list[Row]:
    """Every subject after the first against the first, by mode, benchmark and split.

    Raises UserError for fewer than two, for subjects without a seed in common, and where `pair_items` does.
    """
    if len(subjects) < 2:
        raise UserError("a comparison needs two evaluations or more; give the folder of another one")
    reference, *others = subjects
    modes: tuple[Mode, ...] = ("greedy", "sampled")
    rows: list[Row] = []
    for mode in modes:
        found = [
            _row(reference, other, benchmark, split, mode, seed)
            for other in others
            for benchmark, split in splits_of(mode, *reference.runs.values(), *other.runs.values())
        ]
        tested = [row.p for row in found if row.p is not None]
        adjusted = iter(holm(tested))
        rows += [row if row.p is None else replace(row, adjusted=next(adjusted)) for row in found]
    return rows


def _row(reference: Subject, other: Subject, benchmark: str, split: str, mode: Mode, seed: int) -> Row:
    empty = Row(benchmark, split, mode, reference.label, other.label)
    shared = [name for name in reference.runs if name in other.runs]
    if not shared:
        raise UserError(
            f"{reference.label} ({', '.join(reference.runs)}) and {other.label} ({', '.join(other.runs)}) have no seed "
            "in common; give evaluations of the same seeds"
        )
    pairs: list[PairedItems] = []
    for name in shared:
        both = reference.runs[name], other.runs[name]
        lacking = [run.folder for run in both if (benchmark, split) not in splits_of(mode, run)]
        if lacking:
            return replace(empty, note=f"not run in {' and '.join(map(str, lacking))}")
        pairs.append(pair_items(*both, benchmark, split, mode))
    missing = sum(found.missing for found in pairs)
    if not all(found.items for found in pairs):
        return replace(empty, missing=missing, note="no item has a verdict in both")
    unpaired = sorted({*reference.runs, *other.runs} - {*shared})
    return replace(
        _over_items(empty, pairs[0], seed) if len(pairs) == 1 else _over_seeds(empty, pairs),
        seeds=len(pairs),
        items=sum(len(found.items) for found in pairs),
        dialogues=len({label for found in pairs for label in found.dialogues}),
        missing=missing,
        note=f"without a partner: {', '.join(unpaired)}" if unpaired else "",
    )


def _over_items(row: Row, pairs: PairedItems, seed: int) -> Row:
    found = paired_difference(pairs.first, pairs.second, pairs.dialogues, seed=seed)
    return replace(
        row,
        first=_mean(pairs.first),
        second=_mean(pairs.second),
        difference=found.value,
        low=found.low,
        high=found.high,
        p=mcnemar(pairs.first, pairs.second, pairs.dialogues) if row.mode == "greedy" else None,
        test=MCNEMAR if row.mode == "greedy" else "",
    )


def _over_seeds(row: Row, pairs: Sequence[PairedItems]) -> Row:
    first, second = [_mean(found.first) for found in pairs], [_mean(found.second) for found in pairs]
    found = paired_test(first, second)
    return replace(
        row,
        first=_mean(first),
        second=_mean(second),
        difference=found.difference,
        low=found.low,
        high=found.high,
        p=found.p,
        test=OVER_SEEDS,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def differences_table(rows: Sequence[Row]) -> Table:
    """The rows as text, in percent and points; CSV has them unrounded, as shares."""
    reference = rows[0].reference if rows else ""
    notes = [f"{row.subject}, {row.benchmark}/{row.split}, {row.mode}: {row.note}" for row in rows if row.note]
    notes += [
        f"{row.subject}, {row.benchmark}/{row.split}, {row.mode}: {row.missing} items without a verdict left out"
        for row in rows
        if row.missing
    ]
    return Table(
        title=f"Differences to {reference}",
        columns=_COLUMNS,
        rows=tuple(_cells(row) for row in rows),
        notes=tuple(dict.fromkeys(notes)),
        records=tuple(row.to_json() for row in rows),
    )


def _cells(row: Row) -> tuple[str, ...]:
    head = row.subject, row.benchmark, row.split, row.mode
    if row.difference is None or row.first is None or row.second is None or row.low is None or row.high is None:
        return (*head, *["–"] * 7, str(row.seeds or "–"), str(row.items or "–"))
    return (
        *head,
        f"{100 * row.first:.1f}",
        f"{100 * row.second:.1f}",
        f"{100 * row.difference:+.1f}",
        f"{100 * row.low:+.1f} to {100 * row.high:+.1f}",
        "–" if row.p is None else f"{row.p:.3g}",
        "–" if row.adjusted is None else f"{row.adjusted:.3g}",
        row.test or "–",
        str(row.seeds),
        str(row.items),
    )
