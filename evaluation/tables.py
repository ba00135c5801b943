"""The tables of the report: what is known of each run, as cells of text."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from awpo.errors import UserError
from evaluation.bfcl.versions import V3, V4
from evaluation.charts import number, percent
from evaluation.compare import Difference, compare, read_run

NOT_RUN = "not run"

# A reported reward is the mean over this last share of the steps, since a single step's is noise.
LAST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What the report knows of one run.

    `metrics` are rows {"step", "metrics": {name: number}} of training, empty where nothing was logged; `scores`
    the rows of scores.json; `seconds` the wall time of training; `provenance` whatever tells where the run comes
    from (hashes, config, code version), nested as it likes. `evaluation` is the folder of the finished evaluation:
    with it the run is compared item by item with the reference run.
    """

    name: str
    method: str
    model: str
    seed: int
    init: str
    metrics: Sequence[Mapping[str, Any]] = ()
    scores: Sequence[Mapping[str, Any]] = ()
    seconds: float | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Path | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: its text, one or two lines of small print, an explanation for the pointer, and a class."""

    text: str
    small: str = ""
    title: str = ""
    more: str = ""
    style: str = ""


Key = tuple[str, str, str]


def key_of(run: RunSummary) -> Key:
    """What runs share that differ in their seed alone."""
    return run.method, run.init, run.model


def labels_of(runs: Iterable[RunSummary]) -> dict[Key, str]:
    """A name for each key: the method, and whatever else it takes to tell the keys apart."""
    keys = list(dict.fromkeys(map(key_of, runs)))
    varying = [part for part in (1, 2) if len({key[part] for key in keys if key[part]}) > 1]
    labels = {}
    for key in keys:
        rest = ", ".join(key[part] for part in varying if key[part])
        labels[key] = f"{key[0]} ({rest})" if rest else key[0]
    return labels


def styles_of(runs: Iterable[RunSummary]) -> dict[Key, int]:
    """A style number per key, in order of appearance, the same in every figure."""
    return {key: index for index, key in enumerate(labels_of(runs))}


def splits_of(runs: Iterable[RunSummary]) -> list[str]:
    found: dict[str, None] = {}
    for run in runs:
        found |= dict.fromkeys(row["split"] for row in run.scores if row["benchmark"] == "held_out")
    return list(found)


def score_row(run: RunSummary, benchmark: str, split: str, mode: str, group: str = "all") -> Mapping[str, Any] | None:
    for row in run.scores:
        if (row["benchmark"], row["split"], row["mode"], row["group"]) == (benchmark, split, mode, group):
            return row
    return None


def _accuracy(row: Mapping[str, Any] | None) -> Cell:
    if row is None:
        return Cell(NOT_RUN, style="none")
    items = f"{row['items']} items"
    if row.get("available", row["items"]) > row["items"]:
        items = f"{row['items']} of {row['available']} items"
    return Cell(percent(row["accuracy"]), f"{100 * row['low']:.1f} – {100 * row['high']:.1f}", items)


def method_cells(run: RunSummary, runs: Sequence[RunSummary], splits: Sequence[str], reference: str) -> list[Cell]:
    # The outcome is the part that all methods are rewarded for; their totals are not comparable.
    reward = _last(run.metrics, "reward/outcome")
    lengths = [row["response_tokens"] for split in splits if (row := score_row(run, "held_out", split, "sampled"))]
    cells = [
        Cell(run.name),
        Cell(run.method),
        Cell(run.model),
        Cell(run.init or "–"),
        Cell(str(run.seed)),
        Cell(number(reward) if reward is not None else "–", title="" if run.metrics else "no training metrics"),
    ]
    differences, problem = _differences(run, runs, reference)
    for split in splits:
        cells.append(_accuracy(score_row(run, "held_out", split, "sampled")))
        cells.append(_accuracy(score_row(run, "held_out", split, "greedy")))
        cells.append(_difference_cell(differences.get(split), problem))
    cells.append(Cell(number(sum(lengths) / len(lengths)) if lengths else NOT_RUN, style="" if lengths else "none"))
    cells.append(Cell(duration(run.seconds)))
    return cells


def _differences(run: RunSummary, runs: Sequence[RunSummary], reference: str) -> tuple[dict[str, Difference], str]:
    """Differences in sampled held-out accuracy by split, or why there are none."""
    if run.method == reference:
        return {}, "the reference itself"
    others = [other for other in runs if other.method == reference and other.model == run.model]
    if not others:
        return {}, f"no run of {reference} with this model"
    other = next((one for one in others if one.seed == run.seed), others[0])
    if run.evaluation is None or other.evaluation is None:
        return {}, "the items of one of the two evaluations are not at hand"
    try:
        found = compare(read_run(other.evaluation), read_run(run.evaluation), modes=("sampled",))
    except UserError as error:
        return {}, str(error)
    return {row.split: row for row in found if row.benchmark == "held_out"}, f"{NOT_RUN} on this split"


def _difference_cell(found: Difference | None, problem: str) -> Cell:
    if found is None:
        return Cell("–", title=problem, style="none")
    sign = "better" if found.low > 0 else "worse" if found.high < 0 else ""
    return Cell(
        f"{100 * found.difference:+.1f}",
        f"{100 * found.low:+.1f} to {100 * found.high:+.1f}",
        f"percentage points over {found.items} items of {found.dialogues} dialogues",
        style=sign,
    )


def metric_values(metrics: Iterable[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """(step, value) where the value is a finite number; the last row of a step counts."""
    found: dict[float, float] = {}
    for row in metrics:
        value = row["metrics"].get(name)
        if isinstance(value, (int, float)) and math.isfinite(value):
            found[float(row["step"])] = float(value)
    return sorted(found.items())


def _last(metrics: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean over the last tenth of the steps."""
    values = [value for _, value in metric_values(metrics, name)]
    tail = values[-max(1, round(len(values) * LAST_SHARE)) :]
    return sum(tail) / len(tail) if tail else None


def seed_rows(runs: Sequence[RunSummary], splits: Sequence[str], labels: Mapping[Key, str]) -> list[list[Cell]]:
    """Sampled accuracy over the seeds of one method, model and start; none where no method has two."""
    by_key: dict[Key, list[RunSummary]] = defaultdict(list)
    for run in runs:
        by_key[key_of(run)].append(run)
    if all(len(members) < 2 for members in by_key.values()):
        return []
    table = []
    for key, members in by_key.items():
        cells = [Cell(labels[key]), Cell(str(len(members)))]
        for split in splits:
            found = [row["accuracy"] for run in members if (row := score_row(run, "held_out", split, "sampled"))]
            if not found:
                cells.append(Cell(NOT_RUN, style="none"))
                continue
            spread = f"{100 * min(found):.1f} – {100 * max(found):.1f}" if len(found) > 1 else ""
            partial = f"partial: {len(found)} of {len(members)} seeds" if len(found) < len(members) else ""
            cells.append(
                Cell(percent(sum(found) / len(found)), partial or spread, "mean; least and greatest of the seeds")
            )
        table.append(cells)
    return table


def group_table(runs: Sequence[RunSummary], splits: Sequence[str]) -> list[tuple[str, list[str], list[list[Cell]]]]:
    """By split: the groups (step depth, kind) as columns, sampled accuracy of each run."""
    tables = []
    for split in splits:
        groups: dict[str, None] = {}
        for run in runs:
            groups |= dict.fromkeys(
                row["group"]
                for row in run.scores
                if row["benchmark"] == "held_out" and row["split"] == split and row["group"] != "all"
            )
        body = [
            [
                Cell(run.name),
                *(_accuracy(score_row(run, "held_out", split, "sampled", group)) for group in groups),
                *_rates(score_row(run, "held_out", split, "sampled")),
            ]
            for run in runs
        ]
        if groups:
            tables.append((split, [*groups, "pass@8", "empty", "cut off"], body))
    return tables


def _rates(row: Mapping[str, Any] | None) -> list[Cell]:
    """pass@8, and the shares of samples that were empty or cut off at the token limit."""
    if row is None:
        return [Cell(NOT_RUN, style="none")] * 3
    shares = (row.get("pass_at", {}).get("8"), row.get("empty_rate"), row.get("cut_rate"))
    return [Cell("–", style="none") if share is None else Cell(percent(share)) for share in shares]


BENCHMARKS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{
        version.name: (version.title, (*version.categories, *(average.name for average in version.averages)))
        for version in (V3, V4)
    },
    "api_bank": ("API-Bank", ()),
    "mmlu_pro": ("MMLU-Pro", ()),
}
"""Heading of each benchmark's table, and the rows that are shown even where they were not run."""


def benchmark_tables(runs: Sequence[RunSummary]) -> list[tuple[str, list[list[Cell]]]]:
    """By benchmark its heading and, where any run has it, its table: splits and averages as rows, runs as columns.

    A cell holds accuracy, interval, items and the share of empty outputs, or says what is lacking.
    """
    return [(title, _benchmark_table(name, due, runs)) for name, (title, due) in BENCHMARKS.items()]


def _benchmark_table(benchmark: str, due: Sequence[str], runs: Sequence[RunSummary]) -> list[list[Cell]]:
    found: dict[str, None] = {}
    for group in ("all", "average"):
        for run in runs:
            its = (row for row in run.scores if (row["benchmark"], row["mode"]) == (benchmark, "greedy"))
            found |= dict.fromkeys(row["split"] for row in its if row["group"] == group)
    if not found:
        return []
    table = []
    for split in dict.fromkeys((*due, *found)):
        rows = [score_row(run, benchmark, split, "greedy", group) for run in runs for group in ("all", "average")]
        table.append([Cell(split), *(_score_cell(one or two) for one, two in zip(rows[::2], rows[1::2], strict=True))])
    return table


def _score_cell(row: Mapping[str, Any] | None) -> Cell:
    if row is not None and row["accuracy"] is None:
        due = row.get("categories") or row["splits"]
        lost = sum(row["missing"].values())
        unanswered = f", {lost} items without an answer" if lost else ""
        return Cell(f"partial: {len(due) - len(row['not_run'])} of {len(due)} categories{unanswered}", style="none")
    cell = _accuracy(row)
    if row is None:
        return cell
    more = f"{cell.title}, empty {percent(row['empty_rate'], 0)}"
    more += f", {row['missing']} without an answer" if row.get("missing") else ""
    more += f", {row['checker_failures']} without a verdict" if row.get("checker_failures") else ""
    return Cell(cell.text, cell.small, more=more)


def duration(seconds: float | None) -> str:
    """Seconds as people say them: 42 s, 3 min 5 s, 2 h 10 min."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
