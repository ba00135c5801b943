"""What a study remembers of each of its cells: one row of a CSV file, from which it goes on and is summed up.

A cell is one method under one judge with one seed, trained and evaluated. The file is small enough to be kept under
version control, so that a study can be continued on another machine.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from awpo.artifacts import write_atomically
from awpo.errors import UserError

NO_JUDGE = "none"
"""The judge of a method that reads no reasoning reward."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell. What was not measured, or has no meaning for the method, is NaN (an empty field in the file).

    `settings` is the hash of everything that the result depends on but method, judge and seed; `code` the commit.
    Accuracies are shares of exact actions in [0, 1], of sampled answers unless called greedy, on held-out phrasings
    and on held-out tools. `reward` is the mean outcome reward of training rollouts over the last quarter of rollout
    batches, `reward_curve` that of each batch, `steps_per_rollout` optimiser steps apart. Gradient norms are over
    all steps, before clipping; `gradient_norm_variation` is their standard deviation over their mean. Lengths are in
    tokens: `response_length` of held-out answers, `training_length` of the last quarter's rollouts. Shares, ratio,
    correlation and radius are means over rollout batches (of medians, for ratio and correlation over groups);
    `judge_correlation` is the reasoning reward's with the outcome.
    """

    method: str
    judge: str
    correlation: float
    scale: float
    seed: int
    settings: str
    code: str
    accuracy: float
    accuracy_tools: float
    greedy: float
    response_length: float
    steps: int = 0
    steps_per_rollout: int = 0
    reward: float = math.nan
    gradient_norm: float = math.nan
    gradient_norm_variation: float = math.nan
    training_length: float = math.nan
    gate_open_share: float = math.nan
    saturated_share: float = math.nan
    ratio: float = math.nan
    advantage_correlation: float = math.nan
    judge_correlation: float = math.nan
    clip_radius: float = math.nan
    clipped_share: float = math.nan
    seconds: float = math.nan
    reward_curve: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[str, str, int]:
        return self.method, self.judge, self.seed

    @property
    def whole_reward(self) -> float:
        """Mean outcome reward of the rollouts of all batches: the area under the reward curve; NaN without one.

        Methods of one seed see the same prompts in the same order, so that a difference of two is paired by prompt.
        """
        return sum(self.reward_curve) / len(self.reward_curve) if self.reward_curve else math.nan


def read_cells(path: Path) -> list[CellResult]:
    """The rows of a cells file; none where there is no file. Raises UserError for a file that is something else."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return []
    rows = csv.DictReader(io.StringIO(text))
    names = [field.name for field in fields(CellResult)]
    if rows.fieldnames is None or list(rows.fieldnames) != names:
        raise UserError(
            f"{path} is no file of study cells: its first line must be {','.join(names[:5])},... as `awpo study` writes it"
        )
    found = []
    for number, row in enumerate(rows, start=2):
        try:
            found.append(_cell(row))
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}, line {number}: {error}; mend or remove the line") from None
    return found


def _cell(row: dict[str, str]) -> CellResult:
    values: dict[str, Any] = {}
    for field in fields(CellResult):
        text = row[field.name]
        if field.name == "reward_curve":
            values[field.name] = tuple(float(value) for value in text.split())
        elif field.type == "int":
            values[field.name] = int(text)
        elif field.type == "float":
            values[field.name] = float(text) if text else math.nan
        else:
            values[field.name] = text
    return CellResult(**values)


def add_cell(path: Path, cell: CellResult) -> None:
    """Writes the file anew with `cell` in it, in the place of one with the same method, judge and seed."""
    kept = [other for other in read_cells(path) if other.key != cell.key]
    write_cells(path, [*kept, cell])


def write_cells(path: Path, cells: list[CellResult]) -> None:
    """Writes the cells, sorted, so that the same cells give the same bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(CellResult)])
    for cell in sorted(cells, key=lambda cell: cell.key):
        writer.writerow([_text(value) for value in asdict(cell).values()])
    write_atomically(path, text.getvalue())


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(_text(part) for part in value)
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.5g}"
    return str(value)
