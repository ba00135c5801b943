"""A study in words and figures: tables as Markdown, plots as PNG files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from awpo.files import write_atomically
from evaluation.statistics import MeanOverSeeds
from evaluation.study import BASELINE, MEASURES, Arm, Comparison, arms_of, compare_arms, gain, speed, summarise
from evaluation.study_cells import NO_JUDGE, CellResult

CURVES, DIFFERENCES = "curves.png", "differences.png"
_COLUMNS = (
    "arm",
    "seeds",
    "accuracy, %",
    "held-out tools, %",
    "reward",
    "steps to grpo's reward",
    "gradient norm variation",
    "answer, tokens",
    "gate open, %",
    "judge's correlation",
)


def write_study(cells: Sequence[CellResult], folder: Path) -> list[Path]:
    """Writes study.json, study.md and the figures into `folder`; returns the files."""
    value, text = folder / "study.json", folder / "study.md"
    write_atomically(value, json.dumps(study_json(cells), indent=2) + "\n")
    write_atomically(text, study_markdown(cells))
    return [value, text, *draw_study(cells, folder)]


def study_json(cells: Sequence[CellResult]) -> dict[str, Any]:
    """Means and comparisons as JSON values; what is undefined is null."""
    arms = arms_of(cells)
    return _finite(
        {
            "arms": [_arm_json(arm, _baseline(arms)) for arm in arms],
            "comparisons": [
                {
                    "question": found.question,
                    "measure": found.measure,
                    "first": found.first,
                    "second": found.second,
                    "difference": found.test.difference,
                    "low": found.test.low,
                    "high": found.test.high,
                    "p": found.test.p,
                    "p_holm": found.adjusted,
                    "seeds": found.test.pairs,
                }
                for found in compare_arms(arms)
            ],
        }
    )


def _arm_json(arm: Arm, baseline: Arm | None) -> dict[str, Any]:
    means = {measure: summarise(arm, measure) for measure in (*MEASURES, "gate_open_share", "judge_correlation")}
    reached = speed(arm, baseline) if baseline else None
    return {
        "method": arm.method,
        "judge": arm.judge,
        "seeds": list(arm.cells),
        **{
            name: {"mean": found.mean, "low": found.low, "high": found.high} if found else None
            for name, found in means.items()
        },
        "steps_to_grpo": {"median": reached[0], "reached": reached[1], "of": reached[2]} if reached else None,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def study_markdown(cells: Sequence[CellResult]) -> str:
    """The tables: every arm with its means, then every question with its tests."""
    arms = arms_of(cells)
    baseline = _baseline(arms)
    lines = [
        "Means over seeds with 95% t intervals. Steps: median over seeds until the running mean of the outcome reward",
        "is at the final reward of grpo with the same seed; in brackets how many seeds got there.",
        "",
        _row(_COLUMNS),
        _row(["---"] * len(_COLUMNS)),
        *(_row(_arm_row(arm, baseline)) for arm in arms),
    ]
    comparisons = compare_arms(arms)
    for measure, meaning in MEASURES.items():
        lines += ["", f"**{measure}** ({meaning}): second less first, paired by seed", ""]
        lines += [_row(("question", "first", "second", "difference (95%)", "p", "p, Holm", "seeds")), _row(["---"] * 7)]
        lines += [_row(_test_row(found)) for found in comparisons if found.measure == measure]
    return "\n".join(lines) + "\n"


def _baseline(arms: Sequence[Arm]) -> Arm | None:
    return next((arm for arm in arms if arm.method == BASELINE), None)


def _row(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def _arm_row(arm: Arm, baseline: Arm | None) -> list[str]:
    reached = speed(arm, baseline) if baseline else None
    steps = f"{reached[0]:.0f} ({reached[1]}/{reached[2]})" if reached else "-"
    return [
        arm.name,
        str(len(arm.cells)),
        _mean(summarise(arm, "accuracy"), 100, 1),
        _mean(summarise(arm, "accuracy_tools"), 100, 1),
        _mean(summarise(arm, "reward"), 1, 2),
        steps.replace("inf", "never"),
        _mean(summarise(arm, "gradient_norm_variation"), 1, 2),
        _mean(summarise(arm, "response_length"), 1, 1),
        _mean(summarise(arm, "gate_open_share"), 100, 0, interval=False) if arm.judge != NO_JUDGE else "-",
        _mean(summarise(arm, "judge_correlation"), 1, 2, interval=False) if arm.judge != NO_JUDGE else "-",
    ]


def _mean(found: MeanOverSeeds | None, factor: float, digits: int, *, interval: bool = True) -> str:
    if found is None:
        return "-"
    text = f"{found.mean * factor:.{digits}f}"
    if not interval or math.isnan(found.low):
        return text
    return f"{text} [{found.low * factor:.{digits}f}, {found.high * factor:.{digits}f}]"


def _test_row(found: Comparison) -> list[str]:
    test = found.test
    factor, digits = (100, 1) if found.measure.startswith("accuracy") else (1, 2)
    return [
        found.question,
        found.first,
        found.second,
        f"{test.difference * factor:+.{digits}f} [{test.low * factor:+.{digits}f}, {test.high * factor:+.{digits}f}]",
        f"{test.p:.3f}",
        f"{found.adjusted:.3f}",
        str(test.pairs),
    ]


def draw_study(cells: Sequence[CellResult], folder: Path) -> list[Path]:
    """Draws the differences to grpo in accuracy, and in reward batch by batch; returns the files."""
    arms = arms_of(cells)
    folder.mkdir(parents=True, exist_ok=True)
    asked = ("against grpo", "against sft")
    tests = [found for found in compare_arms(arms, ["accuracy"]) if found.question in asked]
    written = [_draw_differences(tests, folder / DIFFERENCES)] if tests else []
    baseline = _baseline(arms)
    curves = [(arm, curve) for arm in arms if baseline and (curve := _gain_curve(arm, baseline))]
    return [*written, _draw_curves(curves, folder / CURVES)] if curves else written


def _draw_differences(tests: Sequence[Comparison], path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 0.8 + 0.26 * len(tests)), layout="constrained")
    axes = figure.add_subplot()
    for place, found in enumerate(reversed(tests)):
        test, colour = found.test, "C1" if found.adjusted < 0.05 else "C0"
        axes.plot([100 * test.low, 100 * test.high], [place, place], color=colour, linewidth=1.5)
        axes.plot(100 * test.difference, place, "o", color=colour, markersize=5)
    names = [found.second if found.first != "sft" else f"{found.second} (against sft)" for found in tests]
    axes.set_yticks(range(len(tests)), list(reversed(names)), fontsize=8)
    axes.axvline(0, color="0.6", linewidth=1)
    axes.set_xlabel("points of sampled accuracy against grpo\n95% over seeds; orange: p < 0.05 after Holm")
    return _saved(figure, path)


def _draw_curves(curves: Sequence[tuple[Arm, list[tuple[int, float]]]], path: Path) -> Path:
    from matplotlib.figure import Figure

    judges = list(dict.fromkeys(arm.judge for arm, _ in curves))
    columns = min(3, len(judges))
    rows = math.ceil(len(judges) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.9 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    colours = {name: f"C{place}" for place, name in enumerate(dict.fromkeys(arm.method for arm, _ in curves))}
    drawn: dict[str, Any] = {}
    for place, axes in enumerate(grid.flat):
        if place >= len(judges):
            axes.set_visible(False)
            continue
        axes.axhline(0, color="0.6", linewidth=1)
        for arm, curve in curves:
            if arm.judge == judges[place]:
                steps, means = zip(*curve, strict=True)
                (drawn[arm.method],) = axes.plot(steps, means, color=colours[arm.method], linewidth=1.2)
        axes.set_title(judges[place], fontsize=9)
    figure.legend(list(drawn.values()), list(drawn), loc="outside lower center", ncols=5, fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel("optimiser steps", fontsize=9)
    figure.supylabel("outcome reward less grpo's, same prompts", fontsize=9)
    return _saved(figure, path)


def _gain_curve(arm: Arm, baseline: Arm) -> list[tuple[int, float]]:
    """(step, gain over the baseline, averaged over seeds), as far as every seed goes; empty for the baseline."""
    shared = [seed for seed, cell in arm.cells.items() if cell.reward_curve and seed in baseline.cells]
    if not shared or arm is baseline:
        return []
    curves = [gain(arm.cells[seed], baseline.cells[seed]) for seed in shared]
    each = arm.cells[shared[0]].steps_per_rollout
    return [(place * each, sum(values) / len(values)) for place, values in enumerate(zip(*curves, strict=False))]


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path
