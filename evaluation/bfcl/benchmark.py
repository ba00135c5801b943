"""BFCL as parts of an evaluation: generate greedily, decode with our parser, ask the official checker.

Decoding follows the package's handler of Qwen models: a completion with a call that cannot be read counts as no
call at all, and calls become [{name: {argument: value}}]. Our parser is more lenient in one way: a missing
closing tag does not lose a call that is whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from awpo.config import EvaluationConfig
from awpo.events import Progress, silent
from awpo.types import Completion
from evaluation.benchmarks import GoldVerdict, Part, PartResult
from evaluation.bfcl.data import (
    CATEGORIES,
    LIVE_AST,
    NON_LIVE_AST,
    SOURCE,
    VERSION,
    BfclItem,
    choose,
    installed_version,
    read_category,
)
from evaluation.bfcl.process import CheckerProcess
from evaluation.generate import Generated, Generator, Question, Sampling
from evaluation.items import Item, ScoreRow, make_item, score_rows
from evaluation.statistics import weighted_mean

NAME = "bfcl_v3"
PROTOCOL = f"bfcl-eval {VERSION}, single turn, native template, JSON Schema tools, dotted names"


class BfclV3:
    """The Berkeley Function Calling Leaderboard, version 3."""

    name = NAME

    def identity(self, config: EvaluationConfig) -> dict[str, str]:
        return {"bfcl-eval": installed_version()}

    def parts(self, instances: Path | None, config: EvaluationConfig) -> tuple[list[Part], dict[str, str]]:
        return [_part(category, config) for category in CATEGORIES], {}

    def summary(self, rows: Sequence[ScoreRow]) -> list[ScoreRow]:
        return summary_rows(rows)

    def gold_verdicts(self, data: Path | None, config: EvaluationConfig) -> Iterator[GoldVerdict]:
        """The reference answers of the categories that have them: of each parameter the first value allowed."""
        for category in CATEGORIES:
            items = [item for item in read_category(category) if item.answer is not None]
            with CheckerProcess() as checker:
                for item in items:
                    verdict = checker.check(item, first_values(item.answer or []))
                    reason = f"{verdict['error_type']} {verdict['error']}".strip()
                    yield GoldVerdict(category, item.id, verdict["valid"], reason)


def first_values(answer: Sequence[dict[str, dict[str, list[Any]]]]) -> list[dict[str, Any]]:
    """Calls made from a reference: the first allowed value of each parameter; an empty text means it may be left out."""
    return [
        {name: {key: values[0] for key, values in parameters.items() if values[0] != ""}}
        for call in answer
        for name, parameters in call.items()
    ]


def _part(category: str, config: EvaluationConfig) -> Part:
    known = read_category(category)
    chosen = choose(known, config.bfcl_items_per_category, config.seed)

    def run(generator: Generator, progress: Progress) -> PartResult:
        return evaluate_category(generator, chosen, config, available=len(known), progress=progress)

    return Part(f"{NAME}/{category}", len(chosen), run)


def decoded_calls(completion: Completion) -> list[dict[str, Any]]:
    """What the checker gets for a completion; empty where a call cannot be read."""
    if completion.calls_malformed:
        return []
    return [{call.name: call.arguments} for call in completion.tool_calls]


def evaluate_category(
    generator: Generator,
    items: Sequence[BfclItem],
    config: EvaluationConfig,
    *,
    available: int,
    progress: Progress = silent,
) -> tuple[list[Item], list[ScoreRow]]:
    """Items and rows of one category; `available` is the number of items that the category has in all.

    The row's `checker_failures` counts items on which the official checker gave no verdict; they are wrong.
    """
    start = time.monotonic()
    questions = [Question.of(item.instance()) for item in items]
    sampling = Sampling(max_tokens=config.max_completion_length, seed=config.seed)
    answers = generator.answer(questions, sampling, progress=progress)
    with CheckerProcess() as checker:
        found = [
            _item(checker, item, question, answer)
            for item, question, (answer,) in zip(items, questions, answers, strict=True)
        ]
        failures = checker.failures
    rows = score_rows(
        found,
        seed=config.seed,
        protocol=PROTOCOL,
        available=available,
        checker_failures=failures,
        seconds=round(time.monotonic() - start, 3),
    )
    return found, rows


def _item(checker: CheckerProcess, item: BfclItem, question: Question, answer: Generated) -> Item:
    verdict = checker.check(item, decoded_calls(answer.completion()))
    return make_item(
        question,
        answer,
        benchmark=NAME,
        split=item.category,
        item_id=item.id,
        source=SOURCE,
        kind=item.kind,
        correct=verdict["valid"],
        error_type=verdict["error_type"],
        detail=f"{verdict['error_type']} {verdict['error']}".strip()[:300],
    )


def summary_rows(rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """The leaderboard's averages, each only where all of its categories were run.

    `non_live_ast` is the plain mean over categories, `live_ast` is weighted by the categories' full sizes, as in the
    package's `eval_runner_helper`; but "simple" is Python alone here (the leaderboard averages it over Python, Java
    and JavaScript), hence "python" in the names.
    """
    known = {row["split"]: row for row in rows if row["benchmark"] == NAME and row["group"] == "all"}
    result: list[ScoreRow] = []
    for name, categories, by_size in (
        ("non_live_ast (python)", NON_LIVE_AST, False),
        ("live_ast (python)", LIVE_AST, True),
    ):
        if not all(category in known for category in categories):
            continue
        parts = [known[category] for category in categories]
        weights = [part["available"] if by_size else 1.0 for part in parts]
        accuracy, low, high = weighted_mean([(part["accuracy"], part["items"]) for part in parts], weights)
        total = sum(weights)
        mixed = {
            key: sum(weight * part[key] for weight, part in zip(weights, parts, strict=True)) / total
            for key in ("empty_rate", "response_tokens", "cut_rate")
        }
        added = {key: sum(part[key] for part in parts) for key in ("items", "dialogues", "available", "seconds")}
        head = {"benchmark": NAME, "split": name, "mode": "greedy", "group": "average"}
        interval = {"accuracy": accuracy, "low": low, "high": high}
        result.append({**head, **interval, **mixed, **added, "protocol": PROTOCOL, "categories": list(categories)})
    return result
