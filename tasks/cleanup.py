"""What of the runs folder nobody refers to: the decision, apart from looking and removing (`tasks.cleanup_folders`).

A result goes only where its run was deleted in MLflow, nothing else refers to it, and nothing that stays was made from
it. What cannot be told, stays: results that no run ever told of, and those whose run is in another store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Kind = Literal["result", "checkpoints", "temporary", "answers"]
RunState = Literal["active", "deleted", "unknown"]


@dataclass(frozen=True)
class Item:
    """Something that might go; paths are absolute.

    Of a result (a stage's folder, finished or not): `run_id` of the run that tells of it, None where none ever did; the
    `identities` by which manifests of what was made from it name it, and its own `inputs`. `busy`: a process works in it.
    `reason`: of everything but results, why it is of no more use.
    """

    kind: Kind
    path: Path
    bytes: int
    reason: str = ""
    run_id: str | None = None
    identities: frozenset[str] = frozenset()
    inputs: frozenset[str] = frozenset()
    busy: bool = False


@dataclass(frozen=True)
class References:
    """Who refers to what: folders by who names them, the states of runs, inputs of results outside of the runs folder."""

    folders: Mapping[Path, str] = field(default_factory=dict)
    runs: Mapping[str, RunState] = field(default_factory=dict)
    inputs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Decision:
    """Whether an item goes, and why it goes or stays."""

    item: Item
    goes: bool
    reason: str


def decide(items: Sequence[Item], known: References) -> list[Decision]:
    """What goes and what stays, in the order of `items`."""
    results = [item for item in items if item.kind == "result"]
    stays = {item.path: reason for item in results if (reason := _referred_to(item, known))}
    grown = True
    while grown:  # what stays may be made from what would go, or lie in it, which then stays, too
        needed = {name: item.path for item in results if item.path in stays for name in item.inputs}
        more = {
            item.path: reason
            for item in results
            if item.path not in stays and (reason := _held(item, needed, known.inputs, stays))
        }
        stays |= more
        grown = bool(more)
    going = {item.path for item in results if item.path not in stays}
    return [_decision(item, stays, going) for item in items]


def _decision(item: Item, stays: Mapping[Path, str], going: set[Path]) -> Decision:
    if item.kind == "result":
        stay = stays.get(item.path)
        return Decision(item, stay is None, stay or "its run was deleted in MLflow, and nothing else refers to it")
    if item.busy:
        return Decision(item, False, "a process works there")
    if going.intersection(item.path.parents):
        return Decision(item, False, "it goes with the folder that it lies in")
    return Decision(item, True, item.reason)


def _referred_to(item: Item, known: References) -> str:
    """Why a result stays for its own sake; empty where nothing holds it."""
    if item.busy:
        return "a process works in it"
    for folder, who in known.folders.items():
        if folder.is_relative_to(item.path):
            return f"{who} refers to it"
    if item.run_id is None:
        return "no run ever told of it"
    state = known.runs.get(item.run_id, "unknown")
    if state == "active":
        return "its run stands in MLflow"
    return "" if state == "deleted" else "its run is not in this store"


def _held(item: Item, needed: Mapping[str, Path], elsewhere: Iterable[str], stays: Mapping[Path, str]) -> str:
    """Why a result stays for the sake of another one that does; empty where none needs it."""
    if found := sorted(str(needed[name]) for name in item.identities if name in needed and needed[name] != item.path):
        return f"{found[0]} is made from it"
    if item.identities.intersection(elsewhere):
        return "a result outside of the runs folder is made from it"
    if inside := sorted(str(path) for path in stays if item.path in path.parents):
        return f"{inside[0]} lies in it"
    return ""
