"""How good is a judge? Measured on pairs of right and wrong completions (`awpo.judge_perturbations`).

Stage "judge-evaluation": `summary.json` with the figures and what identifies the judge, `judgements.jsonl` with every
score. The figures say whether AWPO can work with a judge: it gates by how the judge's scores go with the outcome.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from awpo.artifacts import input_identity, open_stage
from awpo.config import JudgeConfig
from awpo.data import store
from awpo.errors import UserError
from awpo.events import Progress, silent
from awpo.files import write_atomically
from awpo.judge import grade, judge_identity, make_judge
from awpo.judge_endpoint import EndpointJudge
from awpo.judge_measures import Evaluation, centred, columns, correlation, kind_result, mean, sign, verdict
from awpo.judge_perturbations import KINDS, Pair, make_pairs, padded, reworded, right_completion, text_values
from awpo.judgement import Grades, Judge, Judgement
from awpo.rewards import outcome_reward
from awpo.types import Completion, Instance

VERSION = 2
SUMMARY, JUDGEMENTS = "summary.json", "judgements.jsonl"
LENGTHS = (1.0, 1.5, 2.0, 3.0)
"""Lengths, as multiples of the right thought's, of the equals that length bias is measured on."""
CROSSED = ("wrong_tool", "wrong_value", "right_thought_wrong_action", "wrong_thought_right_action")
"""Kinds that, with the right completion, cross right and wrong thoughts with right and wrong actions: what is
correlated with the outcome, as the other kinds' actions are all right or all wrong."""
BATCH = 256
"""Thoughts that are judged at once; an endpoint judge's deadline holds for as many."""


class _Scores:
    """The scores of completions, asked for once each, in the order in which they were first named."""

    def __init__(self) -> None:
        self.items: dict[str, Judgement] = {}
        self.found: dict[str, Grades] = {}

    @staticmethod
    def key(instance: Instance, completion: Completion) -> str:
        action = [call.to_json() for call in completion.tool_calls]
        return json.dumps([instance.id, completion.thought, action, completion.content], default=str)

    def add(self, instance: Instance, completion: Completion) -> None:
        self.items.setdefault(self.key(instance, completion), Judgement(instance, completion))

    async def ask(self, judge: Judge, progress: Progress) -> None:
        items = list(self.items.items())
        for start in range(0, len(items), BATCH):
            batch = items[start : start + BATCH]
            grades = await grade(judge, [item for _, item in batch])
            self.found |= {key: found for (key, _), found in zip(batch, grades, strict=True)}
            progress(min(start + BATCH, len(items)), len(items), "judgements")

    def of(self, instance: Instance, completion: Completion) -> float:
        return self.found[self.key(instance, completion)].score


def reordered(instance: Instance) -> Instance:
    """The same instance with its tools in reversed order; it keeps its id."""
    return replace(instance, tools=instance.tools[::-1])


def evaluate_judge(
    make: Callable[[int], Judge],
    instances: Sequence[Instance],
    thoughts: dict[str, str],
    seed: int,
    progress: Progress = silent,
) -> tuple[Evaluation, list[dict[str, Any]]]:
    """Measures the judge that `make(draw)` makes; another draw is the same judge asked anew.

    `thoughts` are the right thoughts by instance id. Returns the figures and a row per completion judged.
    """
    texts = text_values(instances)
    pairs = [pair for item in instances for pair in make_pairs(item, thoughts[item.id], texts, seed)]
    equals = {item.id: _equals(item, thoughts[item.id], seed) for item in instances}
    checked = [pair for pair in pairs if pair.kind in ("wrong_tool", "wrong_value")]

    first, again, order = _Scores(), _Scores(), _Scores()
    for pair in pairs:
        for completion in (pair.right, pair.wrong, *([pair.bare] if pair.bare else [])):
            first.add(pair.instance, completion)
    for item in instances:
        for completion in equals[item.id]:
            first.add(item, completion)
    for pair in checked:
        for completion in (pair.right, pair.wrong):
            again.add(pair.instance, completion)
            order.add(reordered(pair.instance), completion)

    async def ask_all() -> None:
        judge = make(0)
        await first.ask(judge, progress)
        await order.ask(judge, progress)
        await again.ask(make(1), progress)

    asyncio.run(ask_all())
    kinds = tuple(
        kind_result(
            kind,
            [
                (
                    first.of(pair.instance, pair.right),
                    first.of(pair.instance, pair.wrong),
                    first.of(pair.instance, pair.bare) if pair.bare else None,
                )
                for pair in pairs
                if pair.kind == kind
            ],
        )
        for kind in KINDS
    )
    accuracies = [kind.accuracy for kind in kinds if kind.accuracy is not None]
    outcome_within, outcome_pooled = _outcome(first, pairs)
    found = Evaluation(
        items=len(instances),
        judged=len(first.items) + len(order.items) + len(again.items),
        failed=sum(math.isnan(one.score) for scores in (first, order, again) for one in scores.found.values()),
        accuracy=mean(accuracies),
        kinds=kinds,
        length_padded=correlation(*centred(_lengths(first, item, equals[item.id]) for item in instances)),
        length_right=correlation(*columns([_lengths(first, item, equals[item.id][:1])[:1] for item in instances])),
        again=_difference(first, again, checked, lambda item: item),
        again_same=_same(first, again, checked, lambda item: item),
        order=_difference(first, order, checked, reordered),
        order_same=_same(first, order, checked, reordered),
        outcome_within=outcome_within,
        outcome_pooled=outcome_pooled,
    )
    return found, _rows(first, pairs)


def _equals(item: Instance, thought: str, seed: int) -> list[Completion]:
    """One right completion at several lengths, the plain one first."""
    right = right_completion(item, thought)
    chance = random.Random(f"{seed}/{item.id}/length")
    return [right, *(replace(right, thought=padded(thought, times, chance)) for times in LENGTHS[1:])]


def _lengths(scores: _Scores, item: Instance, equals: Sequence[Completion]) -> list[tuple[float, float]]:
    points = [(math.log(len((one.thought or "x").split()) or 1), scores.of(item, one)) for one in equals]
    return [point for point in points if not math.isnan(point[1])]


def _outcome(scores: _Scores, pairs: Sequence[Pair]) -> tuple[float | None, float | None]:
    """Correlation of score and outcome reward, within instances and pooled; each completion counts once."""
    groups: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for pair in pairs:
        if pair.kind in CROSSED:
            for completion in (pair.right, pair.wrong):
                score = scores.of(pair.instance, completion)
                if not math.isnan(score):
                    point = (outcome_reward(pair.instance, completion), score)
                    groups[pair.instance.id][scores.key(pair.instance, completion)] = point
    points = [list(group.values()) for group in groups.values()]
    return correlation(*centred(points)), correlation(*columns(points))


def _difference(
    first: _Scores, other: _Scores, pairs: Sequence[Pair], changed: Callable[[Instance], Instance]
) -> float | None:
    points = [
        abs(first.of(pair.instance, completion) - other.of(changed(pair.instance), completion))
        for pair in pairs
        for completion in (pair.right, pair.wrong)
    ]
    return mean([value for value in points if not math.isnan(value)])


def _same(
    first: _Scores, other: _Scores, pairs: Sequence[Pair], changed: Callable[[Instance], Instance]
) -> float | None:
    kept = []
    for pair in pairs:
        before = first.of(pair.instance, pair.right) - first.of(pair.instance, pair.wrong)
        item = changed(pair.instance)
        after = other.of(item, pair.right) - other.of(item, pair.wrong)
        if not math.isnan(before + after):
            kept.append(float(sign(before) == sign(after)))
    return mean(kept)


def _rows(scores: _Scores, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    rows = []
    for pair in pairs:
        sides = {"right": pair.right, "wrong": pair.wrong, **({"bare": pair.bare} if pair.bare else {})}
        for side, completion in sides.items():
            grades = scores.found[scores.key(pair.instance, completion)]
            rows.append(
                {
                    "instance": pair.instance.id,
                    "kind": pair.kind,
                    "side": side,
                    "thought": completion.thought,
                    "calls": [{"name": call.name, "arguments": call.arguments} for call in completion.tool_calls],
                    "content": completion.content,
                    "score": None if math.isnan(grades.score) else grades.score,
                    "criteria": dict(grades.criteria),
                    "outcome": outcome_reward(pair.instance, completion),
                }
            )
    return rows


def sampled_instances(folder: Path, count: int, seed: int, splits: Sequence[str] = ()) -> list[Instance]:
    """At most `count` instances with a rationale, drawn by seed from a folder of any size (reservoir sampling).

    Raises UserError where the folder has none, and for an unknown name in `splits`.
    """
    chance = random.Random(f"{seed}/instances")
    kept: list[tuple[int, Instance]] = []
    read = store.iterate_instances(folder, splits or None)
    number = -1
    for number, item in enumerate(item for item in read if (item.rationale or "").strip()):
        if len(kept) < count:
            kept.append((number, item))
        elif (place := chance.randrange(number + 1)) < count:
            kept[place] = (number, item)
    if number < 0:
        among = f" in the split {' or '.join(splits)}" if splits else ""
        raise UserError(f"{folder} has no instance with a rationale{among}; write rationales first")
    return [item for _, item in sorted(kept, key=lambda pair: pair[0])]


def write_evaluation(
    instances_folder: Path,
    out: Path,
    config: JudgeConfig,
    *,
    items: int = 200,
    seed: int = 0,
    splits: Sequence[str] = (),
    thoughts_folder: Path | None = None,
    reword: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Stage "judge-evaluation": measures a judge on `items` instances; returns what summary.json holds.

    The right thoughts are the references themselves, which the judge may be shown, so its accuracy is at its best;
    `thoughts_folder` takes them from the same instances with rationales by another writer, and `reword` puts them in
    other words (`awpo.judge_perturbations.reworded`). A finished result of the same instances, judge and seed is
    returned as it is; one without a single score is not finished, since the endpoint may only have been away.
    `unusable` says why AWPO cannot work with the judge, where it cannot. Raises UserError where the instances cannot be
    read or the budget is used up.
    """
    inputs = {"instances": input_identity(instances_folder)}
    if thoughts_folder:
        inputs["thoughts"] = input_identity(thoughts_folder)
    settings = {
        "version": VERSION,
        "judge": judge_identity(config),
        "failure_limit": config.failure_limit,
        "items": items,
        "seed": seed,
        "splits": sorted(splits),
        "reword": reword,
    }
    with open_stage(out, "judge-evaluation", inputs, settings) as stage:
        if stage.finished:
            return _read_summary(out)
        instances = sampled_instances(instances_folder, items, seed, splits)
        thoughts = {item.id: item.rationale or "" for item in instances}
        without_thought = 0
        if thoughts_folder:
            others = {
                item.id: item.rationale
                for item in store.iterate_instances(thoughts_folder)
                if item.id in thoughts and (item.rationale or "").strip()
            }
            drawn = len(instances)
            instances = [item for item in instances if item.id in others]
            without_thought = drawn - len(instances)
            thoughts = {item.id: others[item.id] or "" for item in instances}
            if not instances:
                raise UserError(f"{thoughts_folder} has no rationale for the instances of {instances_folder}")
        if reword:
            thoughts = {key: reworded(thought) for key, thought in thoughts.items()}
        judges: list[Judge] = []
        # A judge that fails is measured, too: that it does is the finding, where training would stop.
        patient = config.model_copy(update={"failure_limit": 1.0})

        def make(draw: int) -> Judge:
            judges.append(make_judge(patient, seed, draw, stage.folder))
            return judges[-1]

        found, rows = evaluate_judge(make, instances, thoughts, seed, progress)
        usage: dict[str, float] = defaultdict(float)
        for judge in judges:
            if isinstance(judge, EndpointJudge):
                for name, value in judge.metrics().items():
                    usage[name] += 0.0 if name == "latency" else value
        if usage.get("answers"):
            usage["latency"] = usage["seconds"] / usage["answers"]
        summary = {
            "judge": judge_identity(config),
            "seed": seed,
            "thoughts": ("another writer's" if thoughts_folder else "the references")
            + (", reworded" if reword else ""),
            "without_thought": without_thought,
            **found.to_json(),
            "unusable": verdict(found, config.failure_limit),
            "last_error": next((judge.last_error for judge in judges if isinstance(judge, EndpointJudge)), None),
            "usage": dict(usage),
        }
        write_atomically(out / JUDGEMENTS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        write_atomically(out / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        if found.failed < found.judged or not summary["last_error"]:  # else: asked anew the next time
            stage.finish({"items": found.items, "judged": found.judged, "failed": found.failed, "usage": dict(usage)})
        return _read_summary(out)


def _read_summary(out: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((out / SUMMARY).read_text("utf-8"))
    return value
