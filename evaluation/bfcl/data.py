"""BFCL v3's single-turn Python items, read from the installed package `bfcl-eval`, as our nouns.

The package is never imported here: its data files are found beside it and read. Function documents become tools
with JSON Schema types by the package's own table (`GORILLA_TO_OPENAPI`), at every depth. Names keep their dots:
that is what the package's handler of Qwen models with native function calling does, and what its checker
expects when `underscore_to_dot` is off.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from awpo.errors import UserError
from awpo.types import Instance, Message, Tool

VERSION = "2025.8.6.2"
INSTALL = f"pip install --no-deps bfcl-eval=={VERSION}"
SOURCE = "bfcl-v3"

NON_LIVE_AST = ("simple", "multiple", "parallel", "parallel_multiple")
LIVE_AST = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
CATEGORIES = (*NON_LIVE_AST, "irrelevance", *LIVE_AST, "live_relevance", "live_irrelevance")

_TYPES = {
    "dict": "object",
    "float": "number",
    "tuple": "array",
    "list": "array",
    "any": "string",
    "bool": "boolean",
}


@dataclass(frozen=True, slots=True)
class BfclItem:
    """One question. `answer` is the reference as the checker takes it, or None where the category has none."""

    id: str
    category: str
    question: tuple[Message, ...]
    functions: tuple[dict[str, Any], ...]
    answer: list[dict[str, Any]] | None

    @property
    def kind(self) -> str:
        return "reply" if "irrelevance" in self.category else "call"

    def instance(self) -> Instance:
        """The item as a one-step instance; its target is empty, since the checker alone knows what is right."""
        return Instance(
            source=SOURCE,
            dialogue_id=self.id,
            step=0,
            steps=1,
            split="test",
            tools=tuple(tool(function) for function in self.functions),
            prompt=self.question,
            target=Message("assistant", ""),
            id=self.id,
        )


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


def _folder() -> Path:
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
    return [
        BfclItem(
            id=row["id"],
            category=category,
            question=tuple(Message.from_json(message) for message in row["question"][0]),
            functions=tuple(row["function"]),
            answer=answers.get(row["id"]),
        )
        for row in questions
    ]


def _read(name: str) -> list[dict[str, Any]]:
    path = _folder() / name
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}); reinstall the package: {INSTALL} --force-reinstall") from None


def choose(items: list[BfclItem], count: int | None, seed: int) -> list[BfclItem]:
    """At most `count` items (None: all), by a hash of seed and id: a smaller choice is the beginning of a larger one."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed}\0{item.id}".encode()).digest())[:count]


def tool(function: Mapping[str, Any]) -> Tool:
    """A function document as a tool; parameters of unknown type become strings, as in the package."""
    return Tool(function["name"], function.get("description") or "", schema(function.get("parameters") or {}) | _OBJECT)


_OBJECT = {"type": "object"}


def schema(document: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's document as JSON Schema: only types change, in properties and items of any depth."""
    result = dict(document)
    declared = str(document.get("type", "string"))
    result["type"] = _TYPES.get(declared, declared)
    if isinstance(document.get("properties"), Mapping):
        result["properties"] = {name: schema(inner) for name, inner in document["properties"].items()}
    if isinstance(document.get("items"), Mapping):
        result["items"] = schema(document["items"])
    return result
