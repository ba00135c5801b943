"""MMLU-Pro as parts of an evaluation, a category each.

An answer without a letter is wrong, and the rate of such answers is reported ("unparsed_rate"). What the official
script would report, which draws a letter for them at random, stands in rows of its own ("compat/..").
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from awpo.config import EvaluationConfig
from awpo.events import Progress, silent
from evaluation.benchmarks import GoldVerdict, Part, PartResult
from evaluation.generate import Generated, Generator, Question, Sampling
from evaluation.golds import ReferenceAnswers, gold_verdicts
from evaluation.items import NO_ROOM, Item, ScoreRow, make_item, score_rows
from evaluation.mmlu_pro.data import CATEGORIES, Exemplar, MmluItem, names_of, read
from evaluation.mmlu_pro.extraction import extract, random_credit
from evaluation.mmlu_pro.prompt import fitting
from evaluation.slices import pooled, sliced
from evaluation.statistics import wilson

NAME = "mmlu_pro"
SOURCE = "mmlu-pro"
COMPAT = "compat/"
UNPARSED, WRONG = "unparsed", "wrong_answer"
PROTOCOL = "five exemplars with a chain of thought in one user message, official extraction, no credit without a letter"
COMPAT_PROTOCOL = f"{PROTOCOL.rpartition(',')[0]}, a letter drawn at random (official seed) where there is none"


class MmluPro:
    """The 12,032 questions of MMLU-Pro."""

    name = NAME
    data_files = tuple(names_of("test"))

    def identity(self, config: EvaluationConfig) -> dict[str, str]:
        return {SOURCE: read(config.benchmark_data).digest}

    def parts(self, instances: Path | None, config: EvaluationConfig) -> tuple[list[Part], dict[str, str]]:
        data = read(config.benchmark_data)
        return [_part(data.questions[name], data.exemplars[name], config) for name in CATEGORIES], {}

    def summary(self, rows: Sequence[ScoreRow]) -> list[ScoreRow]:
        compat = compat_rows(rows)
        totals = (
            pooled(rows, CATEGORIES, split="overall"),
            pooled(compat, [COMPAT + name for name in CATEGORIES], split=f"{COMPAT}overall"),
        )
        if totals[0] is not None:
            judged = [row for row in rows if "unparsed" in row]
            totals[0]["unparsed_rate"] = sum(len(row["unparsed"]) for row in judged) / sum(
                row["items"] for row in judged
            )
        return [*compat, *(row for row in totals if row is not None)]

    def gold_verdicts(self, data: Path | None, config: EvaluationConfig) -> Iterator[GoldVerdict]:
        known = read(data or config.benchmark_data)
        for name in CATEGORIES:
            items = known.questions[name]
            answers = ReferenceAnswers([f"The answer is ({item.answer})." for item in items])
            yield from gold_verdicts(evaluate_category(answers, items, known.exemplars[name], config)[0])


def _part(known: Sequence[MmluItem], exemplars: Sequence[Exemplar], config: EvaluationConfig) -> Part:
    def evaluate(generator: Generator, items: Sequence[MmluItem], progress: Progress) -> PartResult:
        return evaluate_category(generator, items, exemplars, config, progress=progress)

    return sliced(f"{NAME}/{known[0].category}", known, config.mmlu_pro_items_per_category, config.seed, evaluate)


def evaluate_category(
    generator: Generator,
    items: Sequence[MmluItem],
    exemplars: Sequence[Exemplar],
    config: EvaluationConfig,
    *,
    progress: Progress = silent,
) -> PartResult:
    """Answers and scores questions of one category greedily.

    The row says how many prompts had fewer than five exemplars ("shortened"), and holds of each unparsed answer the
    number of options and the answer's index ("unparsed"), from which the official fallback is worked out.
    """
    start = time.monotonic()
    limit = config.mmlu_pro_completion_length
    prompts = [fitting(item, exemplars, generator.room, limit) for item in items]
    sampling = Sampling(max_tokens=limit, seed=config.seed)
    answers = generator.answer([question for question, _ in prompts], sampling, progress=progress)
    found = [
        _item(item, question, answer) for item, (question, _), (answer,) in zip(items, prompts, answers, strict=True)
    ]
    unparsed = [
        (len(item.options), item.answer_index)
        for item, judged in zip(items, found, strict=True)
        if judged.error_type in (UNPARSED, NO_ROOM)
    ]
    rows = score_rows(
        found,
        protocol=PROTOCOL,
        shortened=sum(count < len(exemplars) for _, count in prompts),
        unparsed=unparsed,
        unparsed_rate=len(unparsed) / max(1, sum(item.correct is not None for item in found)),
        seconds=round(time.monotonic() - start, 3),
    )
    return found, rows


def _item(item: MmluItem, question: Question, answer: Generated) -> Item:
    read_as = extract(answer.completion().content)
    if read_as is None:
        error, detail = UNPARSED, f"no letter; {item.answer} is right"
    else:
        letter, rule = read_as
        error = "" if letter == item.answer else WRONG
        detail = f"{letter} by the rule {rule!r}; {item.answer} is right"
    return make_item(
        question,
        answer,
        benchmark=NAME,
        split=item.category,
        item_id=item.id,
        source=SOURCE,
        kind="choice",
        correct=not error,
        error_type=error,
        detail=detail,
    )


def compat_rows(rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """Each category's row as evaluate_from_local.py would score it, a random letter for each unparsed answer."""
    known = sorted((row for row in rows if "unparsed" in row and row["group"] == "all"), key=lambda row: row["split"])
    result = []
    for row, credit in zip(known, random_credit([row["unparsed"] for row in known]), strict=True):
        correct = round(row["accuracy"] * row["items"]) + credit
        low, high = wilson(correct, row["items"])
        changed = {"split": COMPAT + row["split"], "accuracy": correct / row["items"], "low": low, "high": high}
        kept = {key: value for key, value in row.items() if key not in ("unparsed", "unparsed_rate")}
        result.append(kept | changed | {"protocol": COMPAT_PROTOCOL})
    return result
