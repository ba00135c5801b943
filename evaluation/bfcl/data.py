"""BFCL's items, read from the release of the package `bfcl-eval` that a version asks for, as our nouns.

Version 3 has 4,441 items in 17 categories, version 4 has 5,106 in 22.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from awpo.types import Message
from evaluation.bfcl.averages import MEMORY, MULTI_TURN
from evaluation.bfcl.package import prompt_texts, read_rows
from evaluation.bfcl.versions import V3, Version

Language = Literal["Python", "Java", "JavaScript"]
Document = dict[str, Any]

# Which file of `multi_turn_func_doc` describes a class that items of several steps involve.
_CLASS_FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
    "WebSearchAPI": "web_search",
    **{f"MemoryAPI_{name.removeprefix('memory_')}": name for name in MEMORY},
}
_ANSWER_FORMAT = "ADDITIONAL_SYSTEM_PROMPT_FOR_AGENTIC_RESPONSE_FORMAT"


@dataclass(frozen=True, slots=True)
class BfclItem:
    """One question of one or more turns.

    `turns` holds the messages that open each turn; that of a turn with held-out functions is empty. `functions` are
    the documents on offer from the start, `held_out` those that join at a turn, by its number from 0. `answer` is
    the reference as the checker takes it (calls with lists of accepted values; in several turns, the calls of each
    turn as Python text; of an agentic item, the accepted answers), or None where there is none. `initial_config` and
    `involved_classes` set up what the calls of an item of several steps act on. `scenario` names whose memory is asked.
    """

    id: str
    category: str
    turns: tuple[tuple[Message, ...], ...]
    functions: tuple[Document, ...]
    answer: list[Any] | None
    held_out: Mapping[int, tuple[Document, ...]] = field(default_factory=dict)
    initial_config: Mapping[str, Any] = field(default_factory=dict)
    involved_classes: tuple[str, ...] = ()
    scenario: str = ""
    version: Version = V3

    @property
    def kind(self) -> str:
        return "reply" if "irrelevance" in self.category or self.agentic else "call"

    @property
    def language(self) -> Language:
        return language(self.category)

    @property
    def multi_turn(self) -> bool:
        return self.category in MULTI_TURN

    @property
    def agentic(self) -> bool:
        """Of one question and many steps, judged by the last words."""
        return self.category in self.version.agentic


def language(category: str) -> Language:
    """The language that a category's function documents are written in."""
    if category.endswith("javascript"):
        return "JavaScript"
    return "Java" if category.endswith("java") else "Python"


def read_category(category: str, version: Version = V3) -> list[BfclItem]:
    """All items of a category in the package's order. Raises UserError where it has no such file."""
    if category in version.agentic:
        return _agentic(category, version)
    questions = read_rows(version, f"{version.prefix}_{category}.json")
    answers: dict[str, Any] = {}
    if "relevance" not in category:
        rows = read_rows(version, f"possible_answer/{version.prefix}_{category}.json")
        answers = {row["id"]: row["ground_truth"] for row in rows}
    return [_item(row, category, answers.get(row["id"]), version) for row in questions]


def _item(row: Mapping[str, Any], category: str, answer: list[Any] | None, version: Version) -> BfclItem:
    involved = tuple(row.get("involved_classes", ()))
    functions = (
        list(row["function"]) if "function" in row else [doc for name in involved for doc in _class(name, version)]
    )
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
        scenario=row.get("scenario", ""),
        version=version,
    )


def _agentic(category: str, version: Version) -> list[BfclItem]:
    """Questions of web search or memory: one file for the categories of a kind, whose ids get the category's name."""
    kind = "memory" if category in MEMORY else "web_search"
    answers = {
        row["id"]: row["ground_truth"] for row in read_rows(version, f"possible_answer/{version.prefix}_{kind}.json")
    }
    asked = Message("system", prompt_texts(version, (_ANSWER_FORMAT,))[_ANSWER_FORMAT])
    found = []
    for row in read_rows(version, f"{version.prefix}_{kind}.json"):
        made = _item(_as_category(row, category, kind), category, answers[row["id"]], version)
        found.append(replace(made, turns=((asked, *made.turns[0]), *made.turns[1:])))
    return found


def read_sessions(category: str, scenario: str, version: Version) -> list[BfclItem]:
    """The conversations, in their order, in which a model may fill the memory that a scenario's questions are about."""
    rows = read_rows(version, f"memory_prereq_conversation/memory_{scenario}.json")
    return [_item(_as_category(row, category, "memory"), category, None, version) for row in rows]


def _as_category(row: Mapping[str, Any], category: str, kind: str) -> dict[str, Any]:
    changed = {**row, "id": row["id"].replace(kind, category)}
    if kind == "memory":
        changed["involved_classes"] = [f"MemoryAPI_{category.removeprefix('memory_')}"]
    return changed


@cache
def _class(name: str, version: Version) -> tuple[Document, ...]:
    """The documents of a class's functions."""
    return tuple(read_rows(version, f"multi_turn_func_doc/{_CLASS_FILES[name]}.json"))


def choose(items: list[BfclItem], count: int | None, seed: int) -> list[BfclItem]:
    """At most `count` items (None: all), by a hash of seed and id: a smaller choice is the beginning of a larger one."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed}\0{item.id}".encode()).digest())[:count]
