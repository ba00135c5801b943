"""Which items flipped between two evaluations: right in one and wrong in the other, with what was said in both.

Greedy answers are compared; samples are draws, and that one of them turned out otherwise says nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from awpo.files import write_atomically
from evaluation.compare import EvaluationRun
from evaluation.items import GREEDY, Item

TEMPLATES = Path(__file__).parent / "templates"

Key = tuple[str, str, str]
"""Benchmark, split and item."""


@dataclass(frozen=True, slots=True)
class Flip:
    """An item whose verdict differs: the greedy answers of the first and the second evaluation."""

    first: Item
    second: Item

    @property
    def change(self) -> str:
        return "fixed" if self.second.correct else "broken"

    @property
    def same_question(self) -> bool:
        return self.first.prompt_hash == self.second.prompt_hash

    def to_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.first.benchmark,
            "split": self.first.split,
            "id": self.first.item_id,
            "kind": self.first.kind,
            "change": self.change,
            "same_question": self.same_question,
            "first": _told(self.first),
            "second": _told(self.second),
        }


@dataclass(frozen=True, slots=True)
class Diff:
    """Two evaluations item by item.

    `compared` items have a verdict in both; `unanswered` ones lack it in one at least; `only_first` and `only_second`
    are in one alone. Each counts by "benchmark/split".
    """

    first: Path
    second: Path
    flips: tuple[Flip, ...]
    compared: dict[str, int]
    unanswered: dict[str, int]
    only_first: dict[str, int]
    only_second: dict[str, int]

    def counts(self) -> list[dict[str, Any]]:
        """A row for each benchmark and split: what was compared, fixed, broken, and could not be compared."""
        names = dict.fromkeys([*self.compared, *self.unanswered, *self.only_first, *self.only_second])
        changes = Counter((_part(flip.first), flip.change) for flip in self.flips)
        return [
            {
                "part": name,
                "compared": self.compared.get(name, 0),
                "fixed": changes[name, "fixed"],
                "broken": changes[name, "broken"],
                "unanswered": self.unanswered.get(name, 0),
                "only_first": self.only_first.get(name, 0),
                "only_second": self.only_second.get(name, 0),
            }
            for name in names
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "first": str(self.first),
            "second": str(self.second),
            "parts": self.counts(),
            "flipped": [flip.to_json() for flip in self.flips],
        }


def find_flips(first: EvaluationRun, second: EvaluationRun) -> Diff:
    """The flips in the order of the first evaluation's parts and, within one, of its items."""
    one, two = _greedy(first.items), _greedy(second.items)
    shared = [key for key in one if key in two]
    judged = [key for key in shared if one[key].correct is not None and two[key].correct is not None]
    flips = [Flip(one[key], two[key]) for key in judged if one[key].correct != two[key].correct]
    return Diff(
        first.folder,
        second.folder,
        tuple(flips),
        _count([one[key] for key in judged]),
        _count([one[key] for key in shared if one[key].correct is None or two[key].correct is None]),
        _count([item for key, item in one.items() if key not in two]),
        _count([item for key, item in two.items() if key not in one]),
    )


def write_html(diff: Diff, path: Path) -> None:
    """The flips as one HTML file without anything outside of it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    write_atomically(path, environment.get_template("diff.html.jinja").render(diff=diff, parts=diff.counts()))


def _greedy(items: Sequence[Item]) -> dict[Key, Item]:
    return {(item.benchmark, item.split, item.item_id): item for item in items if item.sample == GREEDY}


def _part(item: Item) -> str:
    return f"{item.benchmark}/{item.split}"


def _count(items: Sequence[Item]) -> dict[str, int]:
    return dict(Counter(map(_part, items)))


def _told(item: Item) -> dict[str, Any]:
    return {
        "correct": item.correct,
        "output": item.completion,
        "error_type": item.error_type,
        "detail": item.detail,
        "finish": item.finish,
    }
