"""BFCL as parts of an evaluation: generate greedily, decode with our parser, ask the official checker.

Decoding follows the package's handler of Qwen models: a completion with a call that cannot be read counts as no
call at all, and calls become [{name: {argument: value}}]. Our parser is more lenient in one way: a missing
closing tag does not lose a call that is whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from awpo.chat import parse_completion
from awpo.config import EvaluationConfig
from awpo.events import Progress, silent
from awpo.types import Completion
from evaluation.bfcl.data import LIVE_AST, NON_LIVE_AST, SOURCE, VERSION, BfclItem
from evaluation.bfcl.process import CheckerProcess
from evaluation.items import GREEDY, Item, ScoreRow, is_empty, score_rows
from evaluation.statistics import weighted_mean

if TYPE_CHECKING:
    from evaluation.generate import Generated, Generator

BENCHMARK = "bfcl"
PROTOCOL = f"bfcl-eval {VERSION}, single turn, native template, JSON Schema tools, dotted names"


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
    answers = generator.generate(
        [generator.render(item.instance()) for item in items],
        max_tokens=config.max_completion_length,
        batch_size=config.batch_size,
        seed=config.seed,
        progress=progress,
    )
    with CheckerProcess() as checker:
        found = [_item(checker, item, completions[0]) for item, completions in zip(items, answers, strict=True)]
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


def _item(checker: CheckerProcess, item: BfclItem, answer: Generated) -> Item:
    completion = parse_completion(answer.text)
    verdict = checker.check(item, decoded_calls(completion))
    return Item(
        benchmark=BENCHMARK,
        split=item.category,
        item_id=item.id,
        dialogue_id=item.id,
        source=SOURCE,
        step=0,
        steps=1,
        kind=item.kind,
        sample=GREEDY,
        correct=verdict["valid"],
        completion=answer.text,
        response_tokens=answer.tokens,
        empty=is_empty(completion),
        finish=answer.finish,
        detail=f"{verdict['error_type']} {verdict['error']}".strip()[:300],
    )


def summary_rows(rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """The leaderboard's averages, each only where all of its categories were run.

    `non_live_ast` is the plain mean over categories, `live_ast` is weighted by the categories' full sizes, as in the
    package's `eval_runner_helper`; but "simple" is Python alone here (the leaderboard averages it over Python, Java
    and JavaScript), hence "python" in the names.
    """
    known = {row["split"]: row for row in rows if row["benchmark"] == BENCHMARK and row["group"] == "all"}
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
        head = {"benchmark": BENCHMARK, "split": name, "mode": "greedy", "group": "average"}
        interval = {"accuracy": accuracy, "low": low, "high": high}
        result.append({**head, **interval, **mixed, **added, "protocol": PROTOCOL, "categories": list(categories)})
    return result
