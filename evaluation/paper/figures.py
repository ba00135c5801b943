"""The figures that the paper's text states, from paper_numbers.csv, each with its section."""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

ABLATIONS = {
    "AWPO": "awpo",
    "AWPO w/o variance-aware gating": "awpo_no_gating",
    "AWPO w/o difficulty-aware weighting": "awpo_no_difficulty",
    "AWPO fixed clip": "awpo_fixed_clip",
}
"""Our name of each method of the paper's ablations."""

# A method by these words is a statement about two systems, not a system's accuracy.
_RELATIONS = (" minus ", " vs ", " improvement")


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the paper. `value` is in `unit` (accuracies in %).

    `status` is "text" where the paper's text states it, "implied" where it follows from what the text states.
    `fraction` is the number of right answers of all that it amounts to, "" where none does; `section` where it stands.
    """

    benchmark: str
    subset: str
    model: str
    method: str
    value: float
    unit: str
    status: Literal["text", "implied"]
    fraction: str
    section: str

    @property
    def is_accuracy(self) -> bool:
        """Whether it is a system's accuracy, and not a difference or a length."""
        return self.unit == "%" and not any(word in f"{self.method} " for word in _RELATIONS)

    @property
    def is_ablation(self) -> bool:
        return self.method in ABLATIONS and self.method != "AWPO"

    def sentence(self) -> str:
        """The figure as a note: what, how much, and where the paper says so."""
        digits = f"{self.value:.2f}".rstrip("0").rstrip(".")
        where = "section" if self.status == "text" else "implied by section"
        return f"{self.method}, {self.benchmark} {self.subset}, {self.model}: {digits} {self.unit} ({where} {self.section})"


@functools.cache
def paper_figures() -> tuple[Figure, ...]:
    """All figures, in the file's order."""
    text = files("evaluation.paper").joinpath("paper_numbers.csv").read_text("utf-8")
    found = []
    for row in csv.DictReader(text.splitlines()):
        status = row["status"]
        if status not in ("text", "implied"):
            raise ValueError(f"paper_numbers.csv: status {status!r} is neither text nor implied")
        found.append(Figure(**{**row, "value": float(row["value"])}))  # type: ignore[arg-type]
    return tuple(found)
