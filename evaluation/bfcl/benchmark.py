"""BFCL as parts of an evaluation: ask greedily, decode with our parser, execute and check with the official code."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from awpo.chat import parse_completion
from awpo.config import EvaluationConfig
from awpo.events import Progress, silent
from evaluation.benchmarks import GoldVerdict, Part, PartResult
from evaluation.bfcl.averages import MEMORY, MULTI_TURN
from evaluation.bfcl.conversation import MOST_STEPS, Conversation, answer_text, converse
from evaluation.bfcl.data import BfclItem, choose, read_category
from evaluation.bfcl.decode import decoded_calls, ends_turn, executable, without_thought
from evaluation.bfcl.golds import completion_text, final_words, reference_calls, reference_turns
from evaluation.bfcl.memory import converse_with_memory
from evaluation.bfcl.package import find_package
from evaluation.bfcl.process import CheckerProcess, Verdict
from evaluation.bfcl.tools import tools
from evaluation.bfcl.versions import V3, V4, Version
from evaluation.generate import Finish, Generated, Generator, Question, Sampling
from evaluation.items import Item, ScoreRow, make_item, score_rows
from evaluation.statistics import weighted_mean

Output = str | Sequence[Sequence[str]]


class _Bfcl:
    """The Berkeley Function Calling Leaderboard in one of its versions."""

    version: Version
    data_files: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.name = self.version.name

    def identity(self, config: EvaluationConfig) -> dict[str, str]:
        find_package(self.version)
        return {"bfcl-eval" if self.version is V3 else f"bfcl-eval of {self.name}": self.version.release}

    def parts(self, instances: Path | None, config: EvaluationConfig) -> tuple[list[Part], dict[str, str]]:
        several = (*MULTI_TURN, *self.version.agentic)
        asked = {"all": self.version.categories, "one": self.version.single_turn, "several": several}[config.bfcl_turns]
        cannot = self.version.not_supported
        parts = [_part(category, self.version, config) for category in asked if category not in cannot]
        return parts, {f"{self.name}/{category}": cannot[category] for category in asked if category in cannot}

    def summary(self, rows: Sequence[ScoreRow]) -> list[ScoreRow]:
        return summary_rows(rows, self.version)

    def gold_verdicts(self, data: Path | None, config: EvaluationConfig) -> Iterator[GoldVerdict]:
        """The reference answers of the categories that have them; relevance and irrelevance have none."""
        with CheckerProcess(version=self.version) as checker:
            for category in self.version.categories:
                for item in read_category(category, self.version):
                    if item.answer is not None:
                        verdict = gold_verdict(checker, item)
                        yield GoldVerdict(category, item.id, verdict.valid, verdict.reason)


class BfclV3(_Bfcl):
    """The Berkeley Function Calling Leaderboard, version 3."""

    version = V3


class BfclV4(_Bfcl):
    """The Berkeley Function Calling Leaderboard, version 4: what of it can be run without a network."""

    version = V4


def protocol(version: Version, category: str) -> str:
    """How a category was asked and scored, in words."""
    asked = f"bfcl-eval {version.release}, native calls, JSON Schema tools, dotted names"
    return asked if category in version.single_turn else f"{asked}, {MOST_STEPS} steps a turn"


def _part(category: str, version: Version, config: EvaluationConfig) -> Part:
    known = read_category(category, version)
    chosen = choose(known, config.bfcl_items_per_category, config.seed)

    def run(generator: Generator, progress: Progress) -> PartResult:
        return evaluate_category(generator, chosen, config, available=len(known), progress=progress)

    return Part(f"{version.name}/{category}", len(chosen), run)


def evaluate_category(
    generator: Generator,
    items: Sequence[BfclItem],
    config: EvaluationConfig,
    *,
    available: int,
    progress: Progress = silent,
) -> tuple[list[Item], list[ScoreRow]]:
    """Items and rows of one category, at least one; `available` is the number of items that the category has in all.

    The row's `checker_failures` counts items on which the official code gave no verdict; they are wrong.
    `isolation` says in words what the process that executed calls had given up.
    """
    start = time.monotonic()
    sampling = Sampling(max_tokens=config.max_completion_length, seed=config.seed)
    numbers: dict[str, int] = {}
    first = items[0]
    with CheckerProcess(version=first.version) as checker:
        if first.category in MEMORY:
            held, numbers = converse_with_memory(generator, items, sampling, checker, progress=progress)
            found = _judged(items, held, checker)
        elif first.multi_turn:
            found = _judged(items, converse(generator, items, sampling, checker, progress=progress), checker)
        else:
            found = _ask(generator, items, sampling, checker, progress)
        failures, isolation = checker.failures, checker.isolation
    rows = score_rows(
        found,
        protocol=protocol(first.version, first.category),
        available=available,
        checker_failures=failures,
        isolation=isolation,
        seconds=round(time.monotonic() - start, 3),
    )
    return found, [row | numbers for row in rows]


def _ask(
    generator: Generator, items: Sequence[BfclItem], sampling: Sampling, checker: CheckerProcess, progress: Progress
) -> list[Item]:
    questions = [Question(item.turns[0], tools(item.functions, item.language)) for item in items]
    answers = [answer for (answer,) in generator.answer(questions, sampling, progress=progress)]
    found = verdicts(checker, [(item, answer_text(answer)) for item, answer in zip(items, answers, strict=True)])
    return [_item(*parts) for parts in zip(items, questions, answers, found, strict=True)]


def _judged(items: Sequence[BfclItem], held: Sequence[Conversation], checker: CheckerProcess) -> list[Item]:
    """The conversations held about items, as items with the verdicts on them."""
    questions = [Conversation(item).question for item in items]
    whole = [conversation for conversation in held if conversation.ending in ("done", "cut_off")]
    found = verdicts(checker, [(conversation.item, conversation.texts) for conversation in whole])
    known = {conversation.item.id: verdict for conversation, verdict in zip(whole, found, strict=True)}
    return [
        _conversation_item(question, conversation, known.get(conversation.item.id) or _broken_off(conversation))
        for question, conversation in zip(questions, held, strict=True)
    ]


def verdicts(checker: CheckerProcess, outputs: Sequence[tuple[BfclItem, Output]]) -> list[Verdict]:
    """The verdict on each item's output, from its text alone.

    An output is a completion's text; that of an item of several steps a list of turns, each a list of the texts of its
    steps. Steps without a call are passed over, but for those of an agentic item, of which the last one is judged.
    """
    return checker.check([(item, _decoded(item, output)) for item, output in outputs])


def _decoded(item: BfclItem, output: Output) -> Any:
    if isinstance(output, str):
        return decoded_calls(parse_completion(output), item.version)
    steps = [[executable(_decoded(item, text)) for text in turn] for turn in output]
    if item.agentic:
        (texts,), (calls,) = output, steps
        said = [without_thought(text) for text, called in zip(texts, calls, strict=True) if ends_turn(called)]
        return said[-1] if said else None
    return [[calls for calls in turn if not ends_turn(calls)] for turn in steps]


def _broken_off(conversation: Conversation) -> Verdict:
    if conversation.ending == "not_executed":
        return Verdict(False, conversation.problem)
    return Verdict(False)  # no answer, or no room for one, of which the item tells


def _item(item: BfclItem, question: Question, answer: Generated, verdict: Verdict) -> Item:
    return make_item(
        question,
        answer,
        benchmark=item.version.name,
        split=item.category,
        item_id=item.id,
        # Questions about one memory stand and fall with what the model wrote there.
        dialogue_id=f"{item.category}-{item.scenario}" if item.scenario else None,
        source=item.version.source,
        kind=item.kind,
        correct=verdict.valid,
        error_type=verdict.error_type,
        detail=verdict.reason[:300],
    )


def _conversation_item(question: Question, conversation: Conversation, verdict: Verdict) -> Item:
    """One item for a whole conversation: its text is JSON, the texts of each turn's steps in lists."""
    answers = [answer for turn in conversation.answers for answer in turn]
    completions = [answer.completion() for answer in answers]
    cut: Finish = next((answer.finish for answer in answers if answer.finish != "stop"), "stop")
    if conversation.ending in ("failed", "no_room"):  # which an earlier answer that was cut off must not hide
        cut = answers[-1].finish
    whole = Generated(
        text=json.dumps(conversation.texts, ensure_ascii=False),
        tokens=sum(answer.tokens for answer in answers),
        finish=cut,
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        seconds=sum(answer.seconds for answer in answers),
        tool_calls=tuple(call for completion in completions for call in completion.tool_calls),
        failure=answers[-1].failure,
    )
    item = _item(conversation.item, question, whole, verdict)
    return dataclasses.replace(item, empty=all(not text.strip() for turn in conversation.texts for text in turn))


def gold_verdict(checker: CheckerProcess, item: BfclItem) -> Verdict:
    """The reference answer of an item, written as completions, through parser, decoding, execution and checker.

    An agentic item's reference has no calls: it is a model's last words.
    """
    if item.agentic:
        return verdicts(checker, [(item, [[final_words(item)]])])[0]
    if not item.multi_turn:
        return verdicts(checker, [(item, completion_text(reference_calls(item)))])[0]
    texts = [
        [completion_text(calls), "That is done."] if calls else ["I cannot do that."] for calls in reference_turns(item)
    ]
    conversation = Conversation(item)
    for text in (text for turn in texts for text in turn):
        if not conversation.ending:
            conversation.take(Generated(text, 0), checker)
    if conversation.ending != "done":
        return Verdict(False, f"conversation:{conversation.ending}", conversation.problem)
    # All turns of the reference, as the package would be given them: multi_turn_base_154 has one more than it asks.
    return verdicts(checker, [(item, texts)])[0]


def summary_rows(rows: Sequence[ScoreRow], version: Version = V3) -> list[ScoreRow]:
    """The leaderboard's averages, from the rows of the categories.

    Categories of which a slice was run count by their full size where size counts. An average of which a category
    was not run, or has items without a verdict, is "partial": its accuracy is None and "not_run" and "missing" say
    what it lacks. No row where none of its categories was run.
    """
    known = {row["split"]: row for row in rows if row["mode"] == "greedy" and row["group"] == "all"}
    result: list[ScoreRow] = []
    for average in version.averages:
        parts = {name: known[name] for name in average.categories if name in known}
        if not parts:
            continue
        row: ScoreRow = {"benchmark": version.name, "split": average.name, "mode": "greedy", "group": "average"}
        row |= {
            key: sum(part[key] for part in parts.values()) for key in ("items", "dialogues", "available", "seconds")
        }
        row["protocol"] = max((protocol(version, name) for name in parts), key=len)
        row["categories"] = list(average.categories)
        not_run = [name for name in average.categories if name not in known]
        missing = {name: part["missing"] for name, part in parts.items() if part.get("missing")}
        if not_run or missing:
            row |= {"accuracy": None, "low": None, "high": None, "partial": True}
            result.append(row | {"not_run": not_run, "missing": missing})
            continue
        sizes = {name: part["available"] for name, part in parts.items()}
        weights = average.weights(sizes)
        strata = [(parts[name]["accuracy"], parts[name]["effective_items"]) for name in weights]
        _, row["low"], row["high"] = weighted_mean(strata, list(weights.values()))
        row["accuracy"] = average.value({name: part["accuracy"] for name, part in parts.items()}, sizes)
        for key in ("empty_rate", "response_tokens", "cut_rate"):
            row[key] = sum(weight * parts[name][key] for name, weight in weights.items())
        result.append(row)
    return result
