"""What commands print: the last screen of a pipeline, and small tables."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NUMBERS = ("reward", "accuracy (95%)", "greedy", "tools", "BFCL", "tokens", "time")


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """Seconds as minutes:seconds, or hours:minutes:seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def methods_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The table of methods: reward, accuracy with interval, response length, wall time; 80 columns wide at most.

    Model and seed stand in the title where they are the same for all rows.
    """
    split = next((row["split"] for row in rows if row.get("split")), "held-out")
    cells = {(row["model"], row["seed"]) for row in rows}
    several = len(cells) > 1
    title = f"Held-out split {split}" + ("" if several else " · {} · seed {}".format(*next(iter(cells))))
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold")
    # With several models or seeds the width goes to them; the report has the rest.
    names = ("model", "seed", *NUMBERS[:2], *NUMBERS[3:4], *NUMBERS[5:]) if several else NUMBERS
    table.add_column("method", no_wrap=True)
    for name in names:
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for row in rows:
        cells_of_row = {
            "model": str(row["model"]),
            "seed": str(row["seed"]),
            "reward": number(row["reward"], 2),
            "accuracy (95%)": f"{number(row['accuracy'])} {number(row['accuracy_low'], 2)}-{number(row['accuracy_high'], 2)}",
            "greedy": number(row["greedy"]),
            "tools": number(row["test_tools"]),
            "BFCL": number(row["bfcl_v3"]),
            "tokens": number(row["response_length"], 1),
            "time": duration(row["seconds"]),
        }
        start = "" if row["method"] in ("base", "sft") or row["init"] == "sft" else f" from {row['init']}"
        table.add_row(row["method"] + start, *(cells_of_row[name] for name in names))
    return table


def plain_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table of names and numbers; print it with `print_whole`."""
    found = list(rows)
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for place, column in enumerate(columns):
        numeric = any(isinstance(row[place], int | float) for row in found)
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for row in found:
        table.add_row(*[number(cell) if isinstance(cell, float) else str(cell) for cell in row])
    return table


def text_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose last column is prose, wrapped to the terminal's width."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, no_wrap=place < len(columns) - 1)
    for row in rows:
        table.add_row(*row)
    return table


def shown_path(path: Path | str) -> str:
    """A path as short as it can be from here."""
    try:
        return os.path.relpath(path)
    except ValueError:
        return str(path)


def print_whole(console: Console, table: Table) -> None:
    """Prints a table without cutting anything: wider than the terminal rather than with half numbers."""
    needed = console.measure(table, options=console.options.update(max_width=400)).maximum
    if needed > console.width:
        console = Console(file=console.file, width=needed, force_terminal=console.is_terminal)
    console.print(table)


def last_screen(console: Console, result: dict[str, Any], store: str, seconds: float) -> None:
    """What is left to say when a pipeline has ended."""
    console.print()
    print_whole(console, methods_table(result["methods"]))
    for line in (
        "reward: mean outcome reward of sampled answers (ToolRL's, -3 to 4)",
        "accuracy: exact action, sampled; greedy: the same, greedy; tools: sampled, on held-out tools",
        "tokens: mean length of an answer; time: wall time of its training stage, minutes",
    ):
        console.print(line, style="dim", highlight=False)
    if any(row["bfcl_v3"] is not None for row in result["methods"]):
        console.print("BFCL: the official checker; so small a model scores near zero there", style="dim")
    console.print()
    runs = store.removeprefix("sqlite:///")
    console.print(f"Report        {shown_path(result['report'])}", soft_wrap=True, highlight=False)
    console.print(f"MLflow store  {shown_path(runs) if runs != store else store}", soft_wrap=True, highlight=False)
    console.print(f"Open the UI   {ui_command(store)}", soft_wrap=True, highlight=False)
    console.print(f"All in {duration(seconds)}", style="dim", highlight=False)


def ui_command(store: str) -> str:
    """The command that opens the UIs on the store."""
    return f"the MLflow UI at {shlex.quote(store)}" if store.startswith("http") else "awpo serve"
