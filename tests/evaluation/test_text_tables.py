"""Tables as Markdown, LaTeX and CSV, whatever their cells hold."""

from __future__ import annotations

import csv
import io

from evaluation.text_tables import Table, render

TABLE = Table(
    "50% & more_of_it",
    ("", "a|b", "c"),
    (("x\ny", "1.0†", "–"), ("<b>", "2 ± 1", "*")),
    ("See [this].",),
    ({"row": "x,y", "value": 1.25}, {"row": "b", "value": None}),
)


def test_markdown_cells_stay_cells() -> None:
    lines = render([TABLE], "markdown").splitlines()
    assert lines[0] == r"**50% & more\_of\_it**"
    assert lines[2:4] == [r"|  | a\|b | c |", "| :--- | ---: | ---: |"]
    assert lines[4:6] == ["| x y | 1.0† | – |", r"| \<b\> | 2 ± 1 | \* |"]
    assert lines[-1] == r"See \[this\]."


def test_latex_is_escaped_and_balanced() -> None:
    text = render([TABLE, TABLE], "latex")
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 2
    assert text.count(r"\begin{tabular}{lrr}") == text.count(r"\end{tabular}") == 2
    assert r"\caption{50\% \& more\_of\_it}" in text
    assert r"x y & 1.0$^\dagger$ & -- \\" in text
    assert r"2 $\pm$ 1" in text


def test_csv_has_the_records_of_all_tables_under_one_header() -> None:
    rows = list(csv.DictReader(io.StringIO(render([TABLE, TABLE], "csv"))))
    assert rows == [{"row": "x,y", "value": "1.25"}, {"row": "b", "value": ""}] * 2
    assert render([], "csv") == ""
