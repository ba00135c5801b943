"""BFCL v3's 4,441 items in 17 categories, read from the installed package `bfcl-eval`, as our nouns.

The package is never imported here: its data files are found beside it and read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import orjson

from awpo.errors import UserError
from awpo.types import Message

VERSION = "2025.8.6.2"
INSTALL = f"pip install --no-deps bfcl-eval=={VERSION}"
SOURCE = "bfcl-v3"

NON_LIVE_AST = ("simple", "java", "javascript", "multiple", "parallel", "parallel_multiple")
LIVE_AST = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
MULTI_TURN = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
SINGLE_TURN = (*NON_LIVE_AST, "irrelevance", *LIVE_AST, "live_relevance", "live_irrelevance")
CATEGORIES = (*SINGLE_TURN, *MULTI_TURN)

Language = Literal["Python", "Java", "JavaScript"]
Document = dict[str, Any]

# Which file of `multi_turn_func_doc` describes a class that the multi-turn items involve.
_CLASS_FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}


@dataclass(frozen=True, slots=True)
class BfclItem:
    """One question of one or more turns.

    `turns` holds the messages that open each turn; that of a turn with held-out functions is empty. `functions` are
    the documents on offer from the start, `held_out` those that join at a turn, by its number from 0. `answer` is
    the reference as the checker takes it (calls with lists of accepted values; in several turns, the calls of each
    turn as Python text), or None where the category has none. `initial_config` and `involved_classes` set up what
    the calls of a multi-turn item act on.
    """

    id: str
    category: str
    turns: tuple[tuple[Message, ...], ...]
    functions: tuple[Document, ...]
    answer: list[Any] | None
    held_out: Mapping[int, tuple[Document, ...]] = field(default_factory=dict)
    initial_config: Mapping[str, Any] = field(default_factory=dict)
    involved_classes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "reply" if "irrelevance" in self.category else "call"

    @property
    def language(self) -> Language:
        return language(self.category)

    @property
    def multi_turn(self) -> bool:
        return self.category in MULTI_TURN


def language(category: str) -> Language:
    """The language that a category's function documents are written in."""
    return {"java": "Java", "javascript": "JavaScript"}.get(category, "Python")  # type: ignore[return-value]


def installed_version() -> str:
    """The version of the installed package; UserError where it is missing or another one."""
    try:
        version = importlib.metadata.version("bfcl-eval")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version != VERSION:
        have = f"bfcl-eval {version} is installed" if version else "the package bfcl-eval is not installed"
        raise UserError(f"{have}, the benchmark bfcl_v3 needs {VERSION}: {INSTALL}; or take it out of 'benchmarks'")
    return version


def data_folder() -> Path:
    """The package's folder of data; UserError where the package is missing or another version."""
    installed_version()
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise UserError(f"bfcl-eval is installed without its files; reinstall it: {INSTALL} --force-reinstall")
    return Path(spec.origin).parent / "data"


def read_category(category: str) -> list[BfclItem]:
    """All items of a category in the package's order. Raises UserError where it has no such file."""
    questions = _read(f"BFCL_v3_{category}.json")
    answers: dict[str, Any] = {}
    if "relevance" not in category:
        rows = _read(f"possible_answer/BFCL_v3_{category}.json")
        answers = {row["id"]: row["ground_truth"] for row in rows}
    return [_item(row, category, answers.get(row["id"])) for row in questions]


def _item(row: Mapping[str, Any], category: str, answer: list[Any] | None) -> BfclItem:
    involved = tuple(row.get("involved_classes", ()))
    functions = list(row["function"]) if "function" in row else [doc for name in involved for doc in _class(name)]
    held_out: dict[int, tuple[Document, ...]] = {}
    for turn, names in row.get("missed_function", {}).items():
        found = [next(document for document in functions if document["name"] == name) for name in names]
        held_out[int(turn)] = tuple(found)
        functions = [document for document in functions if not any(document is taken for taken in found)]
    return BfclItem(
        id=row["id"],
        category=category,
        turns=tuple(tuple(Message.from_json(message) for message in turn) for turn in row["question"]),
        functions=tuple(functions),
        answer=answer,
        held_out=held_out,
        initial_config=row.get("initial_config", {}),
        involved_classes=involved,
    )


@cache
def _class(name: str) -> tuple[Document, ...]:
    """The documents of a class's functions."""
    return tuple(_read(f"multi_turn_func_doc/{_CLASS_FILES[name]}.json"))


def _read(name: str) -> list[dict[str, Any]]:
    path = data_folder() / name
    try:
        with open(path, "rb") as file:
            return [orjson.loads(line) for line in file if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}); reinstall the package: {INSTALL} --force-reinstall") from None


def choose(items: list[BfclItem], count: int | None, seed: int) -> list[BfclItem]:
    """At most `count` items (None: all), by a hash of seed and id: a smaller choice is the beginning of a larger one."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed}\0{item.id}".encode()).digest())[:count]
