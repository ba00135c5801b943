"""The command `awpo methods`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli_support import Json, print_json

if TYPE_CHECKING:
    from awpo.methods import Method


def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method, to see all of its settings; none: every method.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Lists the methods that can be trained by, with settings and sources, or tells all of one."""
    from awpo.methods import METHODS, get_method

    found = [get_method(name)] if name else list(METHODS.values())
    if as_json:
        print_json(found[0].to_json() if name else {"methods": [method.to_json() for method in found]})
        return
    from rich.console import Console

    from flows.screen import text_table

    console = Console(highlight=False)
    if name:
        for table in _whole(found[0]):
            console.print(table)
        return
    rows = [(method.name, "\n".join([*_told(method), ""])) for method in found]
    console.print(text_table("Methods", ("name", "what it does; settings; sources"), rows))
    console.print("`awpo methods NAME` explains each setting; docs/method.md has the formulas.")


def _told(method: Method) -> list[str]:
    settings = ", ".join(f"{key} {_shown(value)}" for key, value in method.in_force().items())
    lines = [method.summary, f"stages: {_shown(method.stages) or 'none'}"]
    lines += [f"settings: {settings}"] if settings else []
    return [*lines, *(f"source: {source}" for source in method.sources)]


def _whole(method: Method) -> list[Any]:
    """Two tables: what the method is, and every setting with its meaning, those that nothing reads in brackets."""
    from awpo.methods import TOLD
    from flows.screen import text_table

    told = [("what it does", method.summary), ("stages", _shown(method.stages) or "none")]
    told += [("source", source) for source in method.sources]
    told += [("reading", method.reading)] if method.reading else []
    in_force = method.in_force()
    rows = []
    for key, field in type(method).model_fields.items():
        if key in TOLD:
            continue
        value = _shown(getattr(method, key))
        rows.append((key, value if key in in_force else f"({value})", field.description or ""))
    tables = [text_table(method.name, ("", ""), told)]
    if method.trains:
        tables.append(
            text_table("Settings; in brackets, what this method doesn't use", ("key", "value", "meaning"), rows)
        )
    return tables


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " + ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
