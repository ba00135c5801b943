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

from awpo.errors import UserError
from awpo.files import write_atomically

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
    """The rows of a cells file; none where there is no file.

    Raises UserError, with the line, for a file that is something else, for a row that is cut or holds what no cell can
    (a share outside [0, 1], an infinite number, a seed below 0), and for two rows of one cell.
    """
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a file of study cells: {error}") from None
    rows = csv.DictReader(io.StringIO(text))
    names = [field.name for field in fields(CellResult)]
    if rows.fieldnames is None or list(rows.fieldnames) != names:
        raise UserError(
            f"{path} is no file of study cells: its first line must be {','.join(names[:5])},... as `awpo study` writes it"
        )
    found: dict[tuple[str, str, int], CellResult] = {}
    for number, row in enumerate(rows, start=2):
        try:
            cell = _cell(row)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; mend or remove the line") from None
        if cell.key in found:
            raise UserError(
                f"{path}, line {number}: the cell {' · '.join(map(str, cell.key))} is there twice; keep one"
            )
        found[cell.key] = cell
    return list(found.values())


def _cell(row: dict[str | None, Any]) -> CellResult:
    """A cell from its row. Raises ValueError for what no cell can hold."""
    if None in row or None in row.values():  # as the csv module marks fields too many and too few
        raise ValueError(f"it has more or fewer than {len(fields(CellResult))} fields")
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
    cell = CellResult(**values)
    for name in ("accuracy", "accuracy_tools", "greedy"):
        share = getattr(cell, name)
        if share < 0 or share > 1:  # NaN, what was not measured, is neither
            raise ValueError(f"{name} is {share}, not a share in [0, 1]")
    numbers = [value for value in values.values() if isinstance(value, float)]
    if any(map(math.isinf, [*numbers, *cell.reward_curve])) or any(map(math.isnan, cell.reward_curve)):
        raise ValueError("it holds a number that is not finite")
    if cell.seed < 0:
        raise ValueError(f"its seed is {cell.seed}")
    return cell


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
