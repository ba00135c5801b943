"""What commands print: the last screen of a pipeline, and small tables."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


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
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("method", *(("model", "seed") if several else ())):
        table.add_column(name)
    for name in ("reward", "accuracy (95%)", "greedy", "tools", "BFCL", "tokens", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        start = "" if row["method"] in ("base", "sft") or row["init"] == "sft" else f" from {row['init']}"
        table.add_row(
            row["method"] + start,
            *((str(row["model"]), str(row["seed"])) if several else ()),
            number(row["reward"], 2),
            f"{number(row['accuracy'])} {number(row['accuracy_low'], 2)}-{number(row['accuracy_high'], 2)}",
            number(row["greedy"]),
            number(row["test_tools"]),
            number(row["bfcl"]),
            number(row["response_length"], 1),
            duration(row["seconds"]),
        )
    return table


def plain_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table of texts and numbers."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*[number(cell) if isinstance(cell, float) else str(cell) for cell in row])
    return table


def shown_path(path: Path | str) -> str:
    """A path as short as it can be from here."""
    try:
        return os.path.relpath(path)
    except ValueError:
        return str(path)


def last_screen(console: Console, result: dict[str, Any], store: str, seconds: float) -> None:
    """What is left to say when a pipeline has ended."""
    console.print()
    console.print(methods_table(result["methods"]))
    for line in (
        "reward: mean outcome reward of sampled answers (ToolRL's, -3 to 4)",
        "accuracy: exact action, sampled; greedy: the same, greedy; tools: sampled, on held-out tools",
        "tokens: mean length of an answer; time: wall time of its training stage, minutes",
    ):
        console.print(line, style="dim", highlight=False)
    if any(row["bfcl"] is not None for row in result["methods"]):
        console.print("BFCL: the official checker; so small a model scores near zero there", style="dim")
    console.print()
    runs = store.removeprefix("sqlite:///")
    console.print(f"Report        {shown_path(result['report'])}", soft_wrap=True, highlight=False)
    console.print(f"MLflow store  {shown_path(runs) if runs != store else store}", soft_wrap=True, highlight=False)
    console.print(f"Open the UI   {ui_command(store)}", soft_wrap=True, highlight=False)
    console.print(f"All in {duration(seconds)}", style="dim", highlight=False)


def ui_command(store: str) -> str:
    """The command that opens the UIs on the store."""
    return "awpo serve" if store.startswith("sqlite:") else f"the MLflow UI at {shlex.quote(store)}"
