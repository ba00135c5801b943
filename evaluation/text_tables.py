"""Tables as text: Markdown, LaTeX (booktabs) and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

TableFormat = Literal["markdown", "latex", "csv"]

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "†": r"$^\dagger$",
    "±": r"$\pm$",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text cells, the first column left, the others right aligned.

    `records` are its numbers as CSV has them, unrounded and one fact a row, all with the same keys.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    records: tuple[Mapping[str, Any], ...] = ()


def render(tables: Sequence[Table], form: TableFormat) -> str:
    """All tables one after the other; as CSV the records of all under one header."""
    if form == "csv":
        return _csv([record for table in tables for record in table.records])
    each = _markdown if form == "markdown" else _latex
    return "\n".join(each(table) for table in tables)


def _markdown(table: Table) -> str:
    lines = [f"**{_in_markdown(table.title)}**", ""]
    lines += [_row(table.columns), "| " + " | ".join([":---", *["---:"] * (len(table.columns) - 1)]) + " |"]
    lines += [_row(row) for row in table.rows]
    for note in table.notes:
        lines += ["", _in_markdown(note)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_in_markdown(cell) for cell in cells)} |"


def _in_markdown(text: str) -> str:
    return re.sub(r"([\\|*_<>`\[\]])", r"\\\1", " ".join(text.split()))


def _latex(table: Table) -> str:
    lines = [r"\begin{table}[t]", r"\centering", rf"\caption{{{_in_latex(table.title)}}}"]
    lines += [rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}", r"\toprule"]
    lines += [_latex_row(table.columns), r"\midrule", *map(_latex_row, table.rows), r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\footnotesize {_in_latex(note)}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(_in_latex, cells)) + r" \\"


def _in_latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))


def _csv(records: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    if records:
        writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    return text.getvalue()
