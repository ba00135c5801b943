"""The report: one HTML file without anything outside of it, readable in light and dark.

What was not measured says so ("not run", "partial"); it is never a zero and never left out in silence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from awpo.artifacts import code_version
from awpo.errors import UserError
from awpo.files import write_atomically
from evaluation.charts import COLOURS, LineChart, interval_chart, line_chart, smooth
from evaluation.tables import (
    Key,
    RunSummary,
    benchmark_tables,
    group_table,
    key_of,
    labels_of,
    method_cells,
    metric_values,
    score_row,
    seed_rows,
    splits_of,
    styles_of,
)

__all__ = ["RunSummary", "write_report"]

TEMPLATES = Path(__file__).parent / "templates"
# Training curves: metric, title, unit, fixed bounds of the axis.
CURVES: tuple[tuple[str, str, str, tuple[float, float] | None], ...] = (
    ("reward/total", "Reward, total", "what the method is trained on", None),
    ("reward/correct", "Reward, correctness", "mean over rollouts", None),
    ("reward/reasoning", "Reward, reasoning", "mean over rollouts", None),
    ("gate/open_share", "Gate open", "share of groups", (0.0, 1.0)),
    ("clip/radius_mean", "Clip radius", "mean over groups", None),
    ("clip/clipped_share", "Clipped", "share of tokens", None),
    ("difficulty/mean", "Difficulty weight", "mean over groups", None),
    ("response_length", "Response length", "tokens", None),
    ("response_cut_share", "Cut off by the limit", "share of rollouts", (0.0, 1.0)),
    ("saturated_share", "Groups that are all right", "share", (0.0, 1.0)),
    ("judge/failure_rate", "Judge failed", "share of judgements", (0.0, 1.0)),
    ("entropy", "Entropy", "mean over tokens", None),
    ("gradient_norm", "Gradient norm", "before clipping", None),
)


def write_report(
    out: Path,
    runs: Sequence[RunSummary],
    *,
    title: str = "Methods compared",
    reference: str = "sft",
    notes: Sequence[str] = (),
) -> Path:
    """Writes the report to `out` (a file; a folder gets report.html) and returns the file.

    `reference` is the method with whose run of the same model, and same seed where there is one, the others are
    compared. `notes` are paragraphs put on top. Raises UserError without a run, or where two have the same name.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    names = [run.name for run in runs]
    if not runs:
        raise UserError("a report needs at least one run")
    if len(set(names)) != len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise UserError(f"two runs of the report are named {double!r}; give each a name of its own")
    path = out / "report.html" if out.is_dir() or not out.suffix else out
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    styles, labels = styles_of(runs), labels_of(runs)
    splits = splits_of(runs)
    text = environment.get_template("report.html.jinja").render(
        title=title,
        notes=notes,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        code=code_version(),
        runs=runs,
        reference=reference,
        legend=[
            (label, styles[key] % COLOURS, styles[key] // COLOURS % 3)
            for key, label in labels.items()
            if any(run.metrics for run in runs if key_of(run) == key)
        ],
        splits=splits,
        intervals=[_interval_chart(split, runs, styles) for split in splits],
        methods=[method_cells(run, runs, splits, reference) for run in runs],
        seeds=seed_rows(runs, splits, labels),
        curves=_curves(runs, styles, labels),
        groups=group_table(runs, splits),
        benchmarks=benchmark_tables(runs),
        protocols=sorted(
            {f"{row['benchmark']}: {row['protocol']}" for run in runs for row in run.scores if row.get("protocol")}
        ),
        provenance=[(run.name, list(_flat(run.provenance))) for run in runs],
    )
    write_atomically(path, text)
    return path


def _curves(runs: Sequence[RunSummary], styles: Mapping[Key, int], labels: Mapping[Key, str]) -> list[LineChart | str]:
    """A chart per metric, or a line that says which was not logged.

    Runs that differ in seed alone are one line, their mean, within a band from the lowest to the highest of them.
    """
    charts: list[LineChart | str] = []
    for name, heading, unit, bounds in CURVES:
        by_key: dict[Key, list[list[tuple[float, float]]]] = defaultdict(list)
        for run in runs:
            if points := metric_values(run.metrics, name):
                by_key[key_of(run)].append(points)
        series, bands = [], {}
        for key, found in by_key.items():
            steps: dict[float, list[float]] = defaultdict(list)
            for points in found:
                for step, value in smooth(points, len(points) // 20):
                    steps[step].append(value)
            in_order = sorted(steps.items())
            series.append((labels[key], styles[key], [(step, sum(values) / len(values)) for step, values in in_order]))
            if len(found) > 1:
                bands[labels[key]] = [(step, min(values), max(values)) for step, values in in_order]
        chart = line_chart(heading, unit, series, bands=bands, bounds=bounds)
        charts.append(chart or f"{heading}: logged by no run")
    return charts


def _interval_chart(split: str, runs: Sequence[RunSummary], styles: Mapping[Key, int]) -> Any:
    rows = []
    for run in runs:
        row = score_row(run, "held_out", split, "sampled")
        found = (row["accuracy"], row["low"], row["high"]) if row else None
        rows.append((run.name, styles[key_of(run)], found))
    return interval_chart(split, rows)


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, str(value)
