"""The command `awpo study`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli_support import Json, Out, Verbose, flow_session, print_json

if TYPE_CHECKING:
    from flows.parameters import StudySettings


def study(
    out: Out = Path("runs/study"),
    preset: Annotated[str, typer.Option(help="Preset of infra/presets/studies, or a YAML file.")] = "judge-noise",
    quick: Annotated[bool, typer.Option("--quick", help="A corner: 3 methods, the first judge, 2 seeds.")] = False,
    cells: Annotated[
        Path | None, typer.Option(help="File of finished cells to go on from; none: OUT/cells.csv.")
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="Only this method; give it again for more.")] = None,
    judge: Annotated[list[str] | None, typer.Option(help="Only this judge, by its label in the tables.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Only the first so many seeds.")] = None,
    sum_up: Annotated[bool, typer.Option("--sum-up", help="Run nothing: tables and figures of what there is.")] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Methods under judges of set quality over several seeds: what does a noisy judge do? Goes on where it stood."""
    from awpo.errors import UserError
    from flows.parameters import check_policy_method, read_study
    from flows.preflight import check_out

    settings = read_study(preset)
    settings = settings.quick() if quick else settings
    changes: dict[str, Any] = {}
    if method:
        changes["methods"] = tuple(check_policy_method(name) for name in method)
    if judge:
        known = {entry.label: entry for entry in settings.judges}
        if unknown := [label for label in judge if label not in known]:
            raise UserError(f"the study has no judge {unknown[0]!r}; it has {', '.join(map(repr, known))}")
        changes["judges"] = tuple(known[label] for label in judge)
    if seeds:
        changes["seeds"] = settings.seeds[:seeds]
    settings = settings.model_copy(update=changes)
    settings.pipeline(settings.seeds[0])
    check_out(out)
    store = cells or out / "cells.csv"
    result = _sum_up(settings, store, out) if sum_up else _run(settings, store, out, verbose)
    if as_json:
        print_json(result)
    else:
        typer.echo((out / "study.md").read_text("utf-8"))
        typer.echo(f"{out / 'study.md'}, study.json and figures beside it; cells in {store}")


def _sum_up(settings: StudySettings, store: Path, out: Path) -> dict[str, Any]:
    import flows.prefect_home  # noqa: F401 - before what comes with Prefect

    # isort: split
    from awpo.errors import UserError
    from evaluation.study_cells import read_cells
    from evaluation.study_report import study_json, write_study
    from tasks.study import plan_cells

    wanted = {
        cell.key: place for place, cell in enumerate(plan_cells(settings.methods, settings.judges, settings.seeds))
    }
    found = sorted((cell for cell in read_cells(store) if cell.key in wanted), key=lambda cell: wanted[cell.key])
    if not found:
        raise UserError(f"{store} holds none of the cells asked for; give the file of a study by --cells, or run one")
    write_study(found, out)
    return study_json(found)


def _run(settings: StudySettings, store: Path, out: Path, verbose: bool) -> dict[str, Any]:
    from evaluation.study_cells import read_cells

    read_cells(store)  # a wrong file is told before servers start
    with flow_session(verbose):
        from flows.study import study as flow

        values = {name: getattr(settings, name) for name in type(settings).model_fields}
        listed = {name: list(values[name]) for name in ("methods", "judges", "seeds")}
        return dict(flow(out=str(out), cells=str(store), **{**values, **listed}))
