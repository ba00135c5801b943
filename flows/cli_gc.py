"""`awpo gc`: removes what of the runs folder nobody refers to; by default it only shows it."""

from __future__ import annotations

from typing import Annotated

import typer

from awpo.errors import UserError
from flows.cli_support import Json, print_json

UNITS = ("B", "kB", "MB", "GB", "TB")


def gc(
    delete: Annotated[bool, typer.Option("--delete", help="Remove it; without, it is only shown.")] = False,
    older_than: Annotated[
        float, typer.Option(min=0, help="Answers of endpoints go that are older than so many days.")
    ] = 90.0,
    as_json: Json = False,
) -> None:
    """Shows, or removes, what nobody refers to: results of deleted runs, checkpoints of finished trainings, leftovers.

    What a run, a registered model, or a result that stays refers to is never removed, nor what a process works in.
    """
    from tasks.cleanup import decide
    from tasks.cleanup_folders import find, identified, references, remove
    from tasks.layout import runs_root
    from tasks.tracking_store import connect

    root = runs_root()
    if not root.is_dir():
        raise UserError(f"there is no runs folder {root}; set AWPO_RUNS to it")
    tracking = connect()
    items = find(root, older_than)
    known = references(tracking, items)
    decisions = decide(identified(items, known), known)
    failed: list[str] = []
    gone = []
    for decision in decisions:
        if not decision.goes:
            continue
        try:
            if delete:
                remove(decision, older_than)
            gone.append(decision)
        except UserError as error:
            failed.append(str(error))
    stay: dict[str, int] = {}
    for decision in decisions:
        if not decision.goes and decision.item.kind == "result":
            stay[_kind_of(decision.reason)] = stay.get(_kind_of(decision.reason), 0) + 1
    if as_json:
        rows = [
            {
                "path": str(one.item.path),
                "kind": one.item.kind,
                "bytes": one.item.bytes,
                "goes": one.goes,
                "reason": one.reason,
            }
            for one in decisions
        ]
        total = sum(one.item.bytes for one in gone)
        print_json(
            {
                "runs": str(root),
                "store": tracking.store,
                "deleted": delete,
                "bytes": total,
                "items": rows,
                "failed": failed,
            }
        )
    else:
        for one in gone:
            typer.echo(f"{size(one.item.bytes):>8}  {one.item.path.relative_to(root)}: {one.reason}")
        verb = "removed" if delete else "would go; `awpo gc --delete` removes it"
        typer.echo(
            f"{size(sum(one.item.bytes for one in gone)):>8}  {len(gone)} in {root} {verb}"
            if gone
            else f"nothing to remove in {root}"
        )
        for reason, count in sorted(stay.items()):
            typer.echo(f"results that stay: {count}, as {reason}")
    for line in failed:
        typer.echo(f"error: {line}", err=True)
    if failed:
        raise typer.Exit(1)


def size(count: float) -> str:
    """Bytes as a short text: 1.2 GB."""
    for unit in UNITS[:-1]:
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} {UNITS[-1]}"


def _kind_of(reason: str) -> str:
    """A reason without whom or what it names."""
    for end in ("refers to it", "is made from it", "lies in it"):
        if reason.endswith(end):
            return f"another {end}" if end != "refers to it" else "a run or a registered model refers to it"
    return reason
