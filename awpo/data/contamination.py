"""Overlap of dialogues with the questions of benchmarks: words in a row that are the same.

Words are lower case, without punctuation. 13 in a row are usual for texts of the web; but the questions here are
short (half of BFCL's simple ones have fewer than 13 words), so the default is 8, and a question of fewer words counts
where it is there as a whole, from `shortest` words on. What users say is compared: a benchmark's tools are public
APIs and phrases of an assistant are common.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from awpo.data.near_duplicates import words_of
from awpo.data.rows import Rows
from awpo.data.settings import BenchmarkText, DecontaminationConfig
from awpo.errors import UserError

INSTALLED = "bfcl"
_USER_LINE = re.compile(r"^\s*User:(.*)$", re.MULTILINE)


def asked_in(value: Any) -> Iterator[str]:
    """What a user says in a field of a row: a text, its lines `User: ..` where it has some, or messages, nested or not."""
    if isinstance(value, str):
        yield from _USER_LINE.findall(value) or [value]
    elif isinstance(value, list):
        for part in value:
            yield from asked_in(part)
    elif isinstance(value, dict) and value.get("role", "user") == "user" and "content" in value:
        yield from asked_in(value["content"])


def _files(text: BenchmarkText) -> list[Path]:
    if text.path != INSTALLED:
        return [Path(text.path)]
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise UserError("the package bfcl-eval is not installed: install it, or give the path of BFCL's files")
    return sorted((Path(spec.origin).parent / "data").glob("BFCL_v3_*.json"))


def questions(name: str, text: BenchmarkText) -> Iterator[str]:
    """The questions of a benchmark. Raises UserError where a file cannot be read or has none of the fields."""
    for path in _files(text):
        found = False
        for row in Rows(path):
            if row.fault is not None:  # a question that is not looked for would be trained on
                raise UserError(
                    f"{path}, of benchmark {name!r}: row {row.number} cannot be read ({row.fault}); mend it"
                )
            field = next((field for field in text.fields if isinstance(row.value, dict) and field in row.value), None)
            if field is not None:
                found = True
                yield from asked_in(row.value[field])
        if not found:
            raise UserError(
                f"{path}, of benchmark {name!r}, has no row with {' or '.join(text.fields)}; set its fields"
            )


class Contamination:
    """Finds the benchmarks that a dialogue overlaps with. Memory: some 60 bytes for each n-gram of the benchmarks."""

    def __init__(self, config: DecontaminationConfig) -> None:
        self.config = config
        self.names = list(config.benchmarks)
        self.questions: dict[str, int] = {}
        # By length, the benchmarks (bits) of each n-gram, known by its hash in this process.
        self._grams: dict[int, dict[int, int]] = {}
        for bit, (name, text) in enumerate(config.benchmarks.items()):
            self.questions[name] = 0
            for question in questions(name, text):
                words = words_of(question)
                if len(words) < config.shortest:
                    continue
                self.questions[name] += 1
                size = min(config.words, len(words))
                known = self._grams.setdefault(size, {})
                for gram in _grams(words, size):
                    known[gram] = known.get(gram, 0) | 1 << bit
            if not self.questions[name]:
                raise UserError(
                    f"benchmark {name!r} has no question of {config.shortest} words or more in {' or '.join(text.fields)} "
                    f"of {text.path}, so nothing would be compared with it; set its fields"
                )

    def find(self, said: list[str]) -> list[str]:
        """The benchmarks whose questions a dialogue repeats; `said` are the texts of its users."""
        bits = 0
        for text in said:
            words = words_of(text)
            for size, known in self._grams.items():
                for gram in _grams(words, size):
                    bits |= known.get(gram, 0)
        return [name for bit, name in enumerate(self.names) if bits >> bit & 1]


def _grams(words: list[str], size: int) -> Iterator[int]:
    return (hash(" ".join(words[at : at + size])) for at in range(len(words) - size + 1))
