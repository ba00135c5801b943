"""`awpo compare`: evaluations side by side, and beside the paper's figures."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from flows.cli_support import Json, print_json

Tables = Literal["differences", "paper"]
TextFormat = Literal["screen", "markdown", "latex", "csv"]


def compare(
    evaluations: Annotated[
        list[str],
        typer.Argument(
            help="Folders of finished evaluations of the same items, FOLDER or LABEL=FOLDER; all are compared with the "
            "first. Those of one label (else of one name) are seeds of one method: 'seed-N' in the path says which."
        ),
    ],
    tables: Annotated[
        Tables, typer.Option(help="differences: all against the first; paper: scores in the paper's tables.")
    ] = "differences",
    form: Annotated[TextFormat, typer.Option("--format", help="What the tables are written as.")] = "screen",
    as_json: Json = False,
) -> None:
    """Compares evaluations item by item: differences of accuracy with intervals, tests, Holm's correction."""
    from evaluation.comparison_tables import compare_all, differences_table, read_subjects

    subjects = read_subjects(evaluations)
    if tables == "differences":
        rows = compare_all(subjects)
        found = [differences_table(rows)]
        value = {"differences": [row.to_json() for row in rows]}
    else:
        from evaluation.paper.tables import paper_tables

        found = paper_tables(subjects)
        value = {"cells": [dict(record) for table in found for record in table.records]}
    if as_json:
        print_json(value)
    elif form == "screen":
        from rich.console import Console

        from flows.screen import plain_table, print_whole

        console = Console()
        for table in found:
            print_whole(console, plain_table(table.title, table.columns, [list(row) for row in table.rows]))
            for note in table.notes:
                console.print(note, markup=False, highlight=False)
    else:
        from evaluation.text_tables import render

        typer.echo(render(found, form), nl=False)
