"""API-Bank as parts of an evaluation. One answer to ToolRL's prompt gets two verdicts, `compat` and `strict`.

Splits are named by protocol and level ("toolrl-compat/level-1"), the totals over levels "toolrl-compat/overall".
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from awpo.config import EvaluationConfig
from awpo.events import Progress, silent
from awpo.types import ToolCall
from evaluation.api_bank import dialogues, toolrl
from evaluation.api_bank.data import DIALOGUES, FILES, SOURCE, TOOLRL, ApiBankItem, read_level
from evaluation.benchmarks import GoldVerdict, Part, PartResult
from evaluation.generate import Generated, Generator, Sampling
from evaluation.golds import ReferenceAnswers, gold_verdicts
from evaluation.items import Item, ScoreRow, make_item, score_rows
from evaluation.slices import pooled, sliced

NAME = "api_bank"
COMPAT, STRICT = "toolrl-compat", "toolrl-strict"
PROTOCOLS = {
    COMPAT: "ToolRL's prompt (system and user message) and published scoring: any call equals the reference",
    STRICT: "ToolRL's prompt (system and user message); a finished answer with the reference's call and no other, "
    "values as typed JSON",
    DIALOGUES: "original dialogue up to a call (instruction as system message, dialogue as user message); the first "
    "[Name(key='value', ..)] has the reference's name and typed parameters; tools are not run",
}
_VERDICTS = {TOOLRL: (COMPAT, STRICT), DIALOGUES: (DIALOGUES,)}
"""The protocols by which the answers to each set of prompts are judged."""


class ApiBank:
    """API-Bank by ToolRL's protocol, in two forms, and call accuracy on the original dialogues."""

    name = NAME
    data_files = tuple(file.name for file in FILES.values())

    def identity(self, config: EvaluationConfig) -> dict[str, str]:
        return {file.name: file.sha256 for file in FILES.values()}

    def parts(self, instances: Path | None, config: EvaluationConfig) -> tuple[list[Part], dict[str, str]]:
        return [_part(prompts, level, config) for prompts, level in FILES], {}

    def summary(self, rows: Sequence[ScoreRow]) -> list[ScoreRow]:
        totals = []
        for prompts, protocols in _VERDICTS.items():
            levels = [level for known, level in FILES if known == prompts]
            for protocol in protocols:
                due = [f"{protocol}/level-{level}" for level in levels]
                totals.append(pooled(rows, due, split=f"{protocol}/overall"))
        return [row for row in totals if row is not None]

    def gold_verdicts(self, data: Path | None, config: EvaluationConfig) -> Iterator[GoldVerdict]:
        for prompts, level in FILES:
            items = read_level(prompts, level, data or config.benchmark_data)
            answers = ReferenceAnswers([reference_text(prompts, item) for item in items])
            yield from gold_verdicts(evaluate_level(answers, prompts, level, items, config)[0])


def _part(prompts: str, level: int, config: EvaluationConfig) -> Part:
    def evaluate(generator: Generator, items: Sequence[ApiBankItem], progress: Progress) -> PartResult:
        return evaluate_level(generator, prompts, level, items, config, progress=progress)

    known = read_level(prompts, level, config.benchmark_data)
    return sliced(f"{NAME}/{prompts}/level-{level}", known, config.api_bank_items_per_level, config.seed, evaluate)


def reference_text(prompts: str, item: ApiBankItem) -> str:
    """The reference as a model would write it, in the form that the prompt asks for."""
    call = item.reference
    if prompts == DIALOGUES:
        parameters = ", ".join(f"{key}='{value}'" for key, value in call.arguments.items())
        return f"API-Request: [{call.name}({parameters})]"
    line = json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False)
    return f"<think>\nA call is due.\n</think>\n<tool_call>\n{line}\n</tool_call>"


def evaluate_level(
    generator: Generator,
    prompts: str,
    level: int,
    items: Sequence[ApiBankItem],
    config: EvaluationConfig,
    *,
    progress: Progress = silent,
) -> PartResult:
    """Answers and scores items of one level greedily."""
    start = time.monotonic()
    sampling = Sampling(max_tokens=config.max_completion_length, seed=config.seed)
    answers = generator.answer([item.question for item in items], sampling, progress=progress)
    seconds = round(time.monotonic() - start, 3)
    found: list[Item] = []
    rows: list[ScoreRow] = []
    for protocol in _VERDICTS[prompts]:
        split = f"{protocol}/level-{level}"
        judged = [_item(protocol, split, item, answer) for item, (answer,) in zip(items, answers, strict=True)]
        rows += score_rows(judged, protocol=PROTOCOLS[protocol], seconds=seconds)
        found += judged
    return found, rows


def mistake(protocol: str, reference: ToolCall, answer: Generated) -> tuple[str, str]:
    """What is wrong with an answer by a protocol, as (kind, detail); ("", "") for a hit."""
    if protocol == DIALOGUES:
        return dialogues.mistake(reference, answer.completion().content)
    if protocol == STRICT:
        return toolrl.strict_mistake(reference, answer)
    return toolrl.compat_mistake(reference, answer)


def _item(protocol: str, split: str, item: ApiBankItem, answer: Generated) -> Item:
    kind, detail = mistake(protocol, item.reference, answer)
    return make_item(
        item.question,
        answer,
        benchmark=NAME,
        split=split,
        item_id=item.id,
        dialogue_id=item.dialogue_id,
        source=SOURCE,
        kind="call",
        correct=not kind,
        error_type=kind,
        detail=detail,
    )
