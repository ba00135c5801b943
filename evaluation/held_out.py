"""Exact accuracy on held-out instances: the next action given the true history, by split, step depth and kind.

An answer is correct where it has ended by itself and `awpo.rewards.is_exact` says so: the reference's calls, all
and only those, with equal values; where no call is due, a reply and no call. An answer cut off at the token limit
is no answer: a model that never ends its turn would otherwise score wherever only a reply is due.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from awpo.chat import render_target
from awpo.config import CorpusConfig, EvaluationConfig
from awpo.data.decompose import decompose
from awpo.data.store import iterate_instances, write_instances
from awpo.embedded.corpus import dialogues
from awpo.errors import UserError
from awpo.events import Progress, silent
from awpo.rewards import is_exact
from awpo.types import Instance
from evaluation.benchmarks import GoldVerdict, Part, PartResult
from evaluation.generate import Generated, Generator, Question, Sampling
from evaluation.golds import ReferenceAnswers, gold_verdicts
from evaluation.items import GREEDY, Item, ScoreRow, by_kind, by_source, by_step, make_item, score_rows
from evaluation.target import needed

NAME = "held_out"
PROTOCOL = "next action, reference history, exact match of a finished answer"


class HeldOut:
    """The held-out splits of the instances that a policy was trained on."""

    name = NAME
    data_files = ()

    def identity(self, config: EvaluationConfig) -> dict[str, str]:
        return {}

    def parts(self, instances: Path | None, config: EvaluationConfig) -> tuple[list[Part], dict[str, str]]:
        parts: list[Part] = []
        missing: dict[str, str] = {}
        for split, found in read_splits(needed(instances), config.splits).items():
            if found:
                parts.append(_part(split, found, config))
            else:
                missing[f"{NAME}/{split}"] = "the instances hold none of this split"
        return parts, missing

    def summary(self, rows: Sequence[ScoreRow]) -> list[ScoreRow]:
        return []

    def gold_verdicts(self, data: Path | None, config: EvaluationConfig) -> Iterator[GoldVerdict]:
        """The targets of all instances but those to train on; of the embedded corpus where there is no `data`."""
        with tempfile.TemporaryDirectory(prefix="awpo-golds-") as temporary:
            folder = data or write_corpus(Path(temporary))
            for split in held_out_splits(folder):
                found = list(iterate_instances(folder, {split}))
                answers = ReferenceAnswers([render_target(instance.target, None) for instance in found])
                items, _ = evaluate_split(answers, found, config.model_copy(update={"samples": 1}))
                yield from gold_verdicts(item for item in items if item.sample == GREEDY)


def write_corpus(folder: Path) -> Path:
    """The held-out splits of the embedded corpus as instances in `folder`, which is returned."""
    config = CorpusConfig(train_dialogues=1)
    write_instances(folder, [instance for dialogue in dialogues(config) for instance in decompose(dialogue)])
    return folder


def held_out_splits(folder: Path) -> list[str]:
    """The splits of the instances in a folder, sorted, without "train" unless that is all there is."""
    present = {instance.split for instance in iterate_instances(folder)}
    return sorted(present - {"train"} or present)


def _part(split: str, found: Sequence[Instance], config: EvaluationConfig) -> Part:
    chosen = choose(found, config.instances_per_split, config.seed)

    def run(generator: Generator, progress: Progress) -> PartResult:
        items, rows = evaluate_split(generator, chosen, config, progress=progress)
        return items, [row | {"available": len(found)} for row in rows]

    return Part(f"{NAME}/{split}", len(chosen) * (config.samples + 1), run)


def choose(instances: Sequence[Instance], count: int, seed: int) -> list[Instance]:
    """At most `count` instances, the same for the same seed however the list is ordered.

    Ordered by a hash of seed and id: a smaller choice is the beginning of a larger one, and an instance added to
    the split moves no other. An instance that occurs twice (equal tools, prompt and target) counts once.
    """
    unique = {instance.id: instance for instance in sorted(instances, key=lambda i: (i.dialogue_id, i.step))}

    def rank(instance: Instance) -> bytes:
        return hashlib.sha256(f"{seed}\0{instance.id}".encode()).digest()

    return sorted(unique.values(), key=rank)[:count]


def read_splits(folder: Path, splits: Collection[str]) -> dict[str, list[Instance]]:
    """The instances of the given splits, from one pass over the stored ones; a split may be empty.

    Raises UserError where no split has any, naming those that are there.
    """
    found: dict[str, list[Instance]] = {split: [] for split in splits}
    for instance in iterate_instances(folder, splits):
        found[instance.split].append(instance)
    if not any(found.values()):
        present = sorted({instance.split for instance in iterate_instances(folder)})
        raise UserError(
            f"{folder} holds no instance of {', '.join(splits)} (splits there: {', '.join(present) or 'none'}); "
            "set 'splits' of the evaluation to one of those"
        )
    return found


def evaluate_split(
    generator: Generator, instances: Sequence[Instance], config: EvaluationConfig, *, progress: Progress = silent
) -> tuple[list[Item], list[ScoreRow]]:
    """Generates greedily and `config.samples` times for each instance of one split, and scores.

    `instances` are those to evaluate, in full; `choose` picks them.
    """
    start = time.monotonic()
    sampling = Sampling(config.samples, config.temperature, config.max_completion_length, config.seed, with_greedy=True)
    questions = [Question.of(instance) for instance in instances]
    answers = generator.answer(questions, sampling, progress=progress)
    items = [
        _item(instance, question, number, answer)
        for instance, question, completions in zip(instances, questions, answers, strict=True)
        for number, answer in enumerate(completions, start=GREEDY)
    ]
    seconds = round(time.monotonic() - start, 3)
    rows = score_rows(items, groupings=(by_step, by_kind, by_source), protocol=PROTOCOL, seconds=seconds)
    return items, rows


def _item(instance: Instance, question: Question, sample: int, answer: Generated) -> Item:
    completion = answer.completion()
    return make_item(
        question,
        answer,
        benchmark=NAME,
        split=instance.split,
        item_id=instance.id,
        dialogue_id=instance.dialogue_id,
        source=instance.source,
        step=instance.step,
        steps=instance.steps,
        kind=instance.kind,
        sample=sample,
        correct=answer.finish == "stop" and is_exact(instance.target, completion),
        detail="; ".join(completion.errors[:2]),
    )
