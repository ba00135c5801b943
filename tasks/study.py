"""Statistics over seeds: means with intervals, and differences of methods paired by seed and item."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from awpo.artifacts import write_atomically
from tasks.comparison import Subject, main_split
from tasks.evaluation import find_score, read_scores
from tasks.stage_run import show_table


@dataclass(frozen=True)
class OverSeeds:
    """A mean over seeds with a two-sided 95% t interval; the bounds are None for a single seed."""

    mean: float
    low: float | None
    high: float | None


def over_seeds(values: Sequence[float]) -> OverSeeds:
    """Student's t interval of a mean, by the sample standard deviation over seeds."""
    from scipy import stats

    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return OverSeeds(mean, None, None)
    deviation = (sum((value - mean) ** 2 for value in values) / (count - 1)) ** 0.5
    half = float(stats.t.ppf(0.975, count - 1)) * deviation / count**0.5
    return OverSeeds(mean, mean - half, mean + half)


@task(name="study-statistics", task_run_name="statistics over seeds", cache_policy=NO_CACHE)
def study_table(subjects: list[Subject], out: Path) -> dict[str, list[dict[str, Any]]]:
    """Statistics of sampled accuracy on the main split: per method over seeds, and per pair of methods.

    `accuracy` holds mean and interval over seeds per method; `differences` the paired difference of each pair per
    seed, its mean over seeds, and the difference pooled over all seeds' items with an interval by dialogue. Only
    seeds for which both methods have a result are paired.
    """
    by_method: dict[str, dict[int, Subject]] = {}
    for subject in subjects:
        by_method.setdefault(subject.method, {})[subject.seed] = subject
    accuracy = []
    for method, cells in by_method.items():
        values = {seed: _sampled_accuracy(cell) for seed, cell in sorted(cells.items())}
        accuracy.append(
            {
                "method": method,
                "seeds": list(values),
                "values": list(values.values()),
                **asdict(over_seeds(list(values.values()))),
            }
        )
    methods = list(by_method)
    differences = [
        _paired(first, second, by_method[first], by_method[second])
        for place, first in enumerate(methods)
        for second in methods[place + 1 :]
        if by_method[first].keys() & by_method[second].keys()
    ]
    result = {"accuracy": accuracy, "differences": differences}
    write_atomically(out, json.dumps(result, indent=2) + "\n")
    show_table("study accuracy", [{key: str(value) for key, value in row.items()} for row in accuracy])
    show_table("study differences", [{key: str(value) for key, value in row.items()} for row in differences])
    return result


def _sampled_accuracy(subject: Subject) -> float:
    scores = read_scores(subject.evaluation)
    row = find_score(scores, "held_out", main_split(scores) or "", "sampled")
    if row is None:
        raise RuntimeError(f"{subject.evaluation} has no sampled accuracy")
    return float(row["accuracy"])


def _paired(first: str, second: str, ones: dict[int, Subject], twos: dict[int, Subject]) -> dict[str, Any]:
    from evaluation.compare import compare as compare_runs
    from evaluation.compare import read_run
    from evaluation.items import by_item, mean_correct
    from evaluation.statistics import paired_difference

    before: list[float] = []
    after: list[float] = []
    clusters: list[str] = []
    by_seed: dict[int, float] = {}
    for seed in sorted(ones.keys() & twos.keys()):
        split = main_split(read_scores(ones[seed].evaluation))
        one, two = read_run(ones[seed].evaluation), read_run(twos[seed].evaluation)
        found = [row for row in compare_runs(one, two, modes=("sampled",)) if row.split == split]  # refuses unlike runs
        by_seed[seed] = found[0].difference
        left, right = (
            by_item(
                item for item in run.items if item.benchmark == "held_out" and item.split == split and item.sample >= 0
            )
            for run in (one, two)
        )
        for name in left:
            before.append(mean_correct(left[name]))
            after.append(mean_correct(right[name]))
            clusters.append(left[name][0].dialogue_id)  # the same dialogue of two seeds is one cluster
    pooled = paired_difference(before, after, clusters)
    return {
        "first": first,
        "second": second,
        "by_seed": by_seed,
        **asdict(over_seeds(list(by_seed.values()))),
        "pooled": pooled.value,
        "pooled_low": pooled.low,
        "pooled_high": pooled.high,
    }
