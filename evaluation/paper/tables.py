"""Our scores in tables like the paper's Tables 1 to 5, with the paper's figures in rows of their own.

The paper's tables themselves could not be had in text form: what their columns are follows from the benchmarks and
from the figures that its text names (BFCL v3 as a whole, its multi-turn categories, API-Bank's levels, MMLU-Pro, and
the ablations). Cells that the text does not state stay empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.bfcl.averages import OVERALL
from evaluation.comparison_tables import Subject
from evaluation.items import SCORES
from evaluation.paper.figures import ABLATIONS, Figure, paper_figures
from evaluation.statistics import mean_over_seeds
from evaluation.text_tables import Table

NOT_STATED, NOT_RUN, PARTIAL = "–", "not run", "partial"
SLICE, IMPLIED = "†", "*"
PAPER = "paper"

Scores = Mapping[tuple[str, str], Mapping[str, Any]]
"""Rows of scores.json by benchmark and split: greedy, over all items or averages of splits."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: the split whose score it shows, or several that are pooled by their items; the paper's subset."""

    name: str
    benchmark: str
    splits: tuple[str, ...]
    figures: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Cell:
    """A number in percent with what it is: "ours", "partial", "not run", "text" or "implied"; None without one."""

    status: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    items: int = 0
    available: int = 0
    detail: str = ""

    @property
    def text(self) -> str:
        if self.value is None:
            return self.status or NOT_STATED
        if self.status in ("text", "implied"):
            return f"{self.value:.2f}{IMPLIED if self.status == 'implied' else ''}"
        interval = "" if self.low is None or self.high is None else f" [{self.low:.1f}, {self.high:.1f}]"
        return f"{self.value:.1f}{SLICE if self.items < self.available else ''}{interval}"


def _bfcl(name: str, split: str, subset: str = "") -> Column:
    return Column(name, "bfcl_v3", (split,), ("BFCL", subset))


MULTI_TURN = _bfcl("Multi-turn", "Multi Turn Acc", "multi_turn")
LAYOUT: tuple[tuple[str, tuple[Column, ...]], ...] = (
    (
        "Table 1: BFCL v3",
        (
            _bfcl("Overall", OVERALL, "overall"),
            _bfcl("Non-live", "Non-Live Overall Acc"),
            _bfcl("Live", "Live Acc"),
            MULTI_TURN,
            _bfcl("Relevance", "live_relevance"),
            _bfcl("Irrelevance", "Irrelevance Detection"),
        ),
    ),
    (
        "Table 2: BFCL v3, multi-turn",
        (
            _bfcl("Overall", "Multi Turn Acc", "multi_turn"),
            _bfcl("Base", "multi_turn_base"),
            _bfcl("Missing functions", "multi_turn_miss_func", "miss_func"),
            _bfcl("Missing parameters", "multi_turn_miss_param", "miss_param"),
            _bfcl("Long context", "multi_turn_long_context"),
        ),
    ),
    (
        "Table 3: API-Bank (ToolRL's protocol)",
        (
            Column("Overall", "api_bank", ("toolrl-compat/overall",), ("API-Bank", "overall")),
            Column("Level 1", "api_bank", ("toolrl-compat/level-1",), ("", "")),
            Column("Level 2", "api_bank", ("toolrl-compat/level-2",), ("", "")),
            Column("Level 3", "api_bank", ("toolrl-compat/level-3",), ("API-Bank", "L3")),
            Column(
                "Levels 1 and 2",
                "api_bank",
                ("toolrl-compat/level-1", "toolrl-compat/level-2"),
                ("API-Bank", "L1+L2"),
            ),
        ),
    ),
    (
        "Table 4: MMLU-Pro",
        (
            Column("Overall", "mmlu_pro", ("overall",), ("MMLU-Pro", "overall")),
            Column("Overall, official fallback", "mmlu_pro", ("compat/overall",), ("", "")),
        ),
    ),
)
ABLATION_TITLE = "Table 5: Ablations, BFCL v3 multi-turn"
_EXPLAINED = (
    f"Accuracies in %, with 95% intervals of ours (over seeds where there are several). {SLICE}: of a slice of the "
    f'items. "{PARTIAL}": parts were not run or have no verdict, so that there is no total. Rows of the paper hold '
    f"what its text states, {IMPLIED} what that implies; {NOT_STATED}: it states nothing. The columns are reconstructed."
)


def paper_tables(subjects: Sequence[Subject], figures: Sequence[Figure] | None = None) -> list[Table]:
    """Tables 1 to 5 with a row per subject, then the paper's. Every figure of the paper is in a cell or a note."""
    known = paper_figures() if figures is None else figures
    scores = {subject.label: [_scores(run.folder / SCORES) for run in subject.runs.values()] for subject in subjects}
    tables = [_table(title, columns, scores, known) for title, columns in LAYOUT]
    return [*tables, _ablations(scores, known)]


def _scores(path: Any) -> Scores:
    rows = json.loads(path.read_text("utf-8"))
    return {
        (row["benchmark"], row["split"]): row
        for row in rows
        if row["mode"] == "greedy" and row["group"] in ("all", "average")
    }


def _table(
    title: str, columns: Sequence[Column], scores: Mapping[str, Sequence[Scores]], figures: Sequence[Figure]
) -> Table:
    rows: list[tuple[str, str, list[Cell]]] = [
        (label, "ours", [_ours(column, runs) for column in columns]) for label, runs in scores.items()
    ]
    subsets = [column.figures for column in columns]
    stated = [figure for figure in figures if (figure.benchmark, figure.subset) in subsets]
    shown = [figure for figure in stated if figure.is_accuracy and not figure.is_ablation]
    for model, method in dict.fromkeys((figure.model, figure.method) for figure in shown):
        its = {(f.benchmark, f.subset): f for f in shown if (f.model, f.method) == (model, method)}
        sections = ", ".join(dict.fromkeys(figure.section for figure in its.values()))
        cells = [_stated(its.get(subset)) for subset in subsets]
        label = model if method == "external" else f"{method}, {model}"
        rows.append((label, f"{PAPER}, section {sections}", cells))
    # What is told of a table's benchmark without being a cell: differences, and what it is told of.
    notes = [figure.sentence() for figure in stated if not figure.is_accuracy]
    return _rendered(title, [column.name for column in columns], rows, notes)


def _ablations(scores: Mapping[str, Sequence[Scores]], figures: Sequence[Figure]) -> Table:
    """Methods as rows, the paper's models and ours as columns."""
    stated = [
        figure
        for figure in figures
        if figure.is_accuracy and (figure.benchmark, figure.subset) == MULTI_TURN.figures and figure.method in ABLATIONS
    ]
    models = sorted({figure.model for figure in stated}, key=lambda model: float(model.split("-")[1].rstrip("B")))
    rows = []
    for name, ours in ABLATIONS.items():
        its = {figure.model: figure for figure in stated if figure.method == name}
        sections = ", ".join(dict.fromkeys(figure.section for figure in its.values()))
        mine = _ours(MULTI_TURN, scores[ours]) if ours in scores else Cell(NOT_RUN)
        rows.append(
            (f"{name} ({ours})", f"{PAPER}, section {sections}", [mine, *(_stated(its.get(m)) for m in models)])
        )
    notes = [figure.sentence() for figure in figures if figure.benchmark == "train"]
    return _rendered(ABLATION_TITLE, ["ours", *models], rows, notes)


def _ours(column: Column, runs: Sequence[Scores]) -> Cell:
    """A subject's cell; over several seeds the mean of theirs, where each has a whole number."""
    found = [_one(column, scores) for scores in runs]
    if len(found) == 1:
        return found[0]
    odd = next((cell for cell in found if cell.value is None), None)
    if odd:
        lacking = sum(cell.value is None for cell in found)
        return Cell(odd.status if lacking == len(found) else PARTIAL, detail=f"{lacking} of {len(found)} seeds lack it")
    mean = mean_over_seeds([cell.value for cell in found if cell.value is not None])
    return Cell("ours", mean.mean, mean.low, mean.high, found[0].items, found[0].available, f"{mean.seeds} seeds")


def _one(column: Column, scores: Scores) -> Cell:
    rows = [scores[column.benchmark, split] for split in column.splits if (column.benchmark, split) in scores]
    if not rows:
        return Cell(NOT_RUN)
    items, available = (sum(row.get(key, row["items"]) for row in rows) for key in ("items", "available"))
    lacking = [name for row in rows for name in row.get("not_run", [])]
    if len(rows) < len(column.splits) or any(row["accuracy"] is None or row.get("partial") for row in rows):
        return Cell(
            PARTIAL, items=items, available=available, detail=f"not run: {', '.join(lacking)}" if lacking else ""
        )
    if len(rows) == 1:
        row = rows[0]
        value, low, high = (100 * row[key] for key in ("accuracy", "low", "high"))
        return Cell("ours", value, low, high, items, available)
    # Pooled: each split by its full size, as if all of it had been run.
    sizes = [row.get("available", row["items"]) for row in rows]
    value = sum(size * row["accuracy"] for size, row in zip(sizes, rows, strict=True)) / sum(sizes)
    return Cell("ours", 100 * value, items=items, available=available)


def _stated(figure: Figure | None) -> Cell:
    return Cell("") if figure is None else Cell(figure.status, figure.value, detail=figure.fraction)


def _rendered(
    title: str, columns: Sequence[str], rows: Iterable[tuple[str, str, Sequence[Cell]]], notes: Iterable[str]
) -> Table:
    rows = list(rows)
    records = [
        {
            "table": title.partition(":")[0],
            "row": label,
            "column": column,
            "value": cell.value,
            "low": cell.low,
            "high": cell.high,
            "status": cell.status or "not stated",
            "items": cell.items or "",
            "available": cell.available or "",
            "source": source if cell.status in ("text", "implied") else "",
            "detail": cell.detail,
        }
        for label, source, cells in rows
        for column, cell in zip(columns, cells, strict=True)
    ]
    return Table(
        title=title,
        columns=("", *columns, "Source"),
        rows=tuple((label, *(cell.text for cell in cells), source) for label, source, cells in rows),
        notes=(_EXPLAINED, *(f"{PAPER.capitalize()}: {note}." for note in notes)),
        records=tuple(records),
    )
