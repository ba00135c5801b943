"""Exact accuracy on held-out instances: the next action given the true history, by split, step depth and kind.

An answer is correct where it has ended by itself and `awpo.rewards.is_exact` says so: the reference's calls, all
and only those, with equal values; where no call is due, a reply and no call. An answer cut off at the token limit
is no answer: a model that never ends its turn would otherwise score wherever only a reply is due.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from awpo.chat import parse_completion
from awpo.config import EvaluationConfig
from awpo.data.store import iterate_instances
from awpo.errors import UserError
from awpo.events import Progress, silent
from awpo.rewards import is_exact
from awpo.types import Instance
from evaluation.items import GREEDY, Item, ScoreRow, by_kind, by_step, is_empty, score_rows

if TYPE_CHECKING:
    from evaluation.generate import Generated, Generator

BENCHMARK = "held_out"
PROTOCOL = "next action, reference history, exact match of a finished answer"


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
    answers = generator.generate(
        [generator.render(instance) for instance in instances],
        samples=config.samples,
        temperature=config.temperature,
        max_tokens=config.max_completion_length,
        seed=config.seed,
        batch_size=config.batch_size,
        with_greedy=True,
        progress=progress,
    )
    items = [
        _item(instance, number, answer)
        for instance, completions in zip(instances, answers, strict=True)
        for number, answer in enumerate(completions, start=GREEDY)
    ]
    seconds = round(time.monotonic() - start, 3)
    rows = score_rows(items, groupings=(by_step, by_kind), seed=config.seed, protocol=PROTOCOL, seconds=seconds)
    return items, rows


def _item(instance: Instance, sample: int, answer: Generated) -> Item:
    completion = parse_completion(answer.text)
    return Item(
        benchmark=BENCHMARK,
        split=instance.split,
        item_id=instance.id,
        dialogue_id=instance.dialogue_id,
        source=instance.source,
        step=instance.step,
        steps=instance.steps,
        kind=instance.kind,
        sample=sample,
        correct=answer.finish == "stop" and is_exact(instance.target, completion),
        completion=answer.text,
        response_tokens=answer.tokens,
        empty=is_empty(completion),
        finish=answer.finish,
        detail="; ".join(completion.errors[:2]),
    )
