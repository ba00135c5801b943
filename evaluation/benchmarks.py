"""What a benchmark is, and which there are.

A benchmark is cut into parts (a split, a category), the units in which an evaluation is resumed and reported. Names
are the public ones: they stand in settings, results and tables.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from awpo.config import EvaluationConfig
from awpo.errors import UserError
from awpo.events import Progress
from evaluation.generate import Generator
from evaluation.items import Item, ScoreRow

BENCHMARKS = {
    "held_out": "evaluation.held_out:HeldOut",
    "bfcl_v3": "evaluation.bfcl.benchmark:BfclV3",
    "bfcl_v4": "evaluation.bfcl.benchmark:BfclV4",
    "api_bank": "evaluation.api_bank.benchmark:ApiBank",
    "mmlu_pro": "evaluation.mmlu_pro.benchmark:MmluPro",
}
"""Where each benchmark's class is; it is made without arguments."""

PartResult = tuple[list[Item], list[ScoreRow]]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a benchmark: `name` is "benchmark/split", `size` the completions that it reports as its progress.

    `run` asks the generator, scores, and returns items and rows. A dialogue of several turns calls `answer` round
    after round, with all its items that still go on and their grown histories. A failed answer becomes an item
    whose `correct` is None (`evaluation.items.make_item` sees to it).
    """

    name: str
    size: int
    run: Callable[[Generator, Progress], PartResult]


@dataclass(frozen=True, slots=True)
class GoldVerdict:
    """What the scoring path says of one reference answer; `reason` says why where it is not valid."""

    split: str
    id: str
    valid: bool
    reason: str = ""


class Benchmark(Protocol):
    """One benchmark. Its methods raise UserError where data, a package or a setting is missing or wrong."""

    name: str
    data_files: tuple[str, ...]
    """Names that its files may have below a data folder (`evaluation.benchmark_data`); none: it takes no such folder."""

    def identity(self, config: EvaluationConfig) -> dict[str, str]:
        """What the scores depend on beside settings and model: versions of packages, hashes of data files, by name.

        The instances are not among it: they are an input of the stage.
        """
        ...

    def parts(self, instances: Path | None, config: EvaluationConfig) -> tuple[list[Part], dict[str, str]]:
        """The parts in order, and by name those that cannot be run with the reason.

        `instances` is a folder that the stage decompose wrote. Which items are chosen depends on `config` alone.
        """
        ...

    def summary(self, rows: Sequence[ScoreRow]) -> list[ScoreRow]:
        """Further rows made from this benchmark's rows: averages over categories."""
        ...

    def gold_verdicts(self, data: Path | None, config: EvaluationConfig) -> Iterable[GoldVerdict]:
        """Every reference answer, run through the whole scoring path; `data` is where they are, None the usual place."""
        ...


def get_benchmark(name: str) -> Benchmark:
    """The benchmark of a name. Raises UserError for a name that is none."""
    if name not in BENCHMARKS:
        raise UserError(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    module, _, attribute = BENCHMARKS[name].partition(":")
    return cast(Benchmark, getattr(importlib.import_module(module), attribute)())


def identities(config: EvaluationConfig) -> Mapping[str, str]:
    """What the scores of the config's benchmarks depend on beside settings, instances and model."""
    return {key: value for name in config.benchmarks for key, value in get_benchmark(name).identity(config).items()}
