"""MMLU-Pro's questions and exemplars, from files on this machine or from the hub at a pinned commit."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from awpo.data.hub import HubSource
from awpo.errors import UserError
from awpo.types import content_hash
from evaluation.benchmark_data import find_any, find_on_hub
from evaluation.mmlu_pro.extraction import LETTERS

HUB = HubSource("TIGER-Lab/MMLU-Pro", "3373e0b32277875b8db2aa555a333b78a08477ea")
"""The set at the commit of October 2024 that other evaluations pin, too (lighteval, HELM)."""
QUESTIONS = 12_032
EXEMPLARS_PER_CATEGORY = 5
CATEGORIES = (
    "biology",
    "business",
    "chemistry",
    "computer science",
    "economics",
    "engineering",
    "health",
    "history",
    "law",
    "math",
    "other",
    "philosophy",
    "physics",
    "psychology",
)
_ON_HUB = "data/{}-00000-of-00001.parquet"
_NAMES = ("{}.jsonl.gz", "{}.jsonl", "{}-00000-of-00001.parquet", _ON_HUB)


@dataclass(frozen=True, slots=True)
class MmluItem:
    """A question. `answer` is the letter that is right. `answer_index` is the set's own column, which the official
    fallback compares with: of question 3983 it is another option's than the letter (1 for C)."""

    id: str
    question: str
    options: tuple[str, ...]
    answer: str
    answer_index: int
    category: str


@dataclass(frozen=True, slots=True)
class Exemplar:
    """A worked question; `reasoning` is its chain of thought with the answer at its end, without the leading "A: "."""

    question: str
    options: tuple[str, ...]
    reasoning: str


@dataclass(frozen=True, slots=True)
class MmluPro:
    """All questions by category, in the set's order, and the exemplars of each; `digest` hashes both."""

    questions: Mapping[str, Sequence[MmluItem]]
    exemplars: Mapping[str, Sequence[Exemplar]]
    digest: str


def read(data: Path | None = None) -> MmluPro:
    """The whole set; `data` is the setting `benchmark_data`.

    Looked for are mmlu-pro/test and mmlu-pro/validation as .jsonl.gz, .jsonl or the hub's parquet. Raises UserError
    where they are nowhere and cannot be fetched, or aren't the whole set.
    """
    questions, exemplars = _find("test", data), _find("validation", data)
    try:
        items = [_item(row) for row in _rows(questions)]
        worked = [(str(row["category"]), _exemplar(row)) for row in _rows(exemplars)]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise UserError(f"{questions.parent} holds rows that are not MMLU-Pro's ({error!r:.100})") from None
    if len(items) != QUESTIONS or {item.category for item in items} != set(CATEGORIES):
        raise UserError(
            f"{questions} holds {len(items)} questions, not MMLU-Pro's {QUESTIONS} of {len(CATEGORIES)} categories"
        )
    if Counter(category for category, _ in worked) != dict.fromkeys(CATEGORIES, EXEMPLARS_PER_CATEGORY):
        raise UserError(f"{exemplars} does not hold {EXEMPLARS_PER_CATEGORY} exemplars of each category")
    return MmluPro(
        {category: [item for item in items if item.category == category] for category in CATEGORIES},
        {category: [exemplar for found, exemplar in worked if found == category] for category in CATEGORIES},
        content_hash([[_plain(item) for item in items], [[category, _plain(found)] for category, found in worked]]),
    )


def names_of(split: str) -> list[str]:
    """What the file of a split, test or validation, may be called below a data folder."""
    return [f"mmlu-pro/{name.format(split)}" for name in _NAMES]


def _plain(record: MmluItem | Exemplar) -> list[Any]:
    return [getattr(record, name) for name in record.__slots__]


def _find(split: str, data: Path | None) -> Path:
    names, source = names_of(split), HubSource(HUB.name, HUB.revision, split)
    return find_any(names, data) or find_on_hub(source, _ON_HUB.format(split), data, names[-2])


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    return _json_lines(path)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.strip())


def _options(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The options in use; "N/A" fills a list up and is left out, as the official scripts do."""
    options = tuple(option for option in row["options"] if option != "N/A")
    if not 1 <= len(options) <= len(LETTERS):
        raise ValueError(f"{len(options)} options")
    return options


def _item(row: Mapping[str, Any]) -> MmluItem:
    return MmluItem(
        str(row["question_id"]),
        row["question"],
        _options(row),
        row["answer"],
        int(row["answer_index"]),
        row["category"],
    )


def _exemplar(row: Mapping[str, Any]) -> Exemplar:
    return Exemplar(row["question"], _options(row), row["cot_content"].removeprefix("A: "))
