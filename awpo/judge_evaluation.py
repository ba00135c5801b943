"""How good is a judge? Measured on pairs of right and wrong completions (`awpo.judge_perturbations`).

Stage "judge-evaluation": `summary.json` with the figures and what identifies the judge, `judgements.jsonl` with every
score. The figures say whether AWPO can work with a judge: it gates by how the judge's scores go with the outcome.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from awpo.artifacts import input_identity, open_stage, write_atomically
from awpo.config import JudgeConfig
from awpo.data import store
from awpo.errors import UserError
from awpo.events import Progress, silent
from awpo.judge import grade, judge_identity, make_judge
from awpo.judge_endpoint import EndpointJudge
from awpo.judge_perturbations import KINDS, Pair, make_pairs, padded, reworded, right_completion, text_values
from awpo.judgement import Grades, Judge, Judgement
from awpo.rewards import outcome_reward
from awpo.types import Completion, Instance

VERSION = 1
SUMMARY, JUDGEMENTS = "summary.json", "judgements.jsonl"
TIE = 1e-9
"""Scores no further apart are a tie: half a point for accuracy."""
LENGTHS = (1.0, 1.5, 2.0, 3.0)
"""Lengths, as multiples of the right thought's, of the equals that length bias is measured on."""
CROSSED = ("wrong_tool", "wrong_value", "right_thought_wrong_action", "wrong_thought_right_action")
"""Kinds that, with the right completion, cross right and wrong thoughts with right and wrong actions: what is
correlated with the outcome, as the other kinds' actions are all right or all wrong."""
BATCH = 256
"""Thoughts that are judged at once; an endpoint judge's deadline holds for as many."""


@dataclass(frozen=True, slots=True)
class KindResult:
    """One kind of pair: how often the judge prefers the right one (a tie counts half), with a 95% interval.

    `lift` is the mean of what talk adds to a wrong completion's score, for kinds that talk; `failed` pairs, of which
    a score is missing, are in no mean. Undefined is None.
    """

    kind: str
    pairs: int
    accuracy: float | None
    low: float | None
    high: float | None
    ties: int
    failed: int
    right: float | None
    wrong: float | None
    lift: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All figures. Correlations are Pearson's, in [-1, 1]; differences are means of absolute ones, in [0, 1].

    accuracy             mean over the kinds, so that each counts the same
    length_padded        correlation of score and log words among one thought padded to several lengths, within instances
    length_right         correlation of score and log words over the right thoughts of different instances
    again, again_same    the same judged again: difference; share of pairs whose order stays
    order, order_same    the same with its tools in reversed order
    outcome_within       correlation of score and outcome reward within instances, the rho of a group (method.md 2),
                         over the right completion and the `CROSSED` wrong ones
    outcome_pooled       the same over all instances at once
    """

    items: int
    judged: int
    failed: int
    accuracy: float | None
    kinds: tuple[KindResult, ...]
    length_padded: float | None
    length_right: float | None
    again: float | None
    again_same: float | None
    order: float | None
    order_same: float | None
    outcome_within: float | None
    outcome_pooled: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's correlation; None for fewer than 3 points, or where one of the two does not vary."""
    if len(x) < 3 or max(x) - min(x) <= TIE or max(y) - min(y) <= TIE:
        return None
    return statistics.correlation(x, y)


def centred(groups: Iterable[Sequence[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    """Both coordinates less their mean within each group; groups of one say nothing and are left out."""
    x: list[float] = []
    y: list[float] = []
    for group in groups:
        if len(group) > 1:
            mean_x, mean_y = (statistics.fmean(point[side] for point in group) for side in (0, 1))
            x += [point[0] - mean_x for point in group]
            y += [point[1] - mean_y for point in group]
    return x, y


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share of `count` trials (Wilson 1927)."""
    z = 1.959963984540054
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def kind_result(kind: str, scores: Sequence[tuple[float, float, float | None]]) -> KindResult:
    """The figures of a kind from (right, wrong, bare) scores; NaN for failed ones, bare None where there is none."""
    whole = [row for row in scores if not any(value is not None and math.isnan(value) for value in row)]
    failed = len(scores) - len(whole)
    if not whole:
        return KindResult(kind, len(scores), None, None, None, 0, failed, None, None)
    ties = sum(abs(right - wrong) <= TIE for right, wrong, _ in whole)
    share = (sum(right > wrong + TIE for right, wrong, _ in whole) + ties / 2) / len(whole)
    low, high = wilson(share, len(whole))
    lifts = [wrong - bare for _, wrong, bare in whole if bare is not None]
    return KindResult(
        kind,
        len(scores),
        share,
        low,
        high,
        ties,
        failed,
        _mean([right for right, _, _ in whole]),
        _mean([wrong for _, wrong, _ in whole]),
        _mean(lifts),
    )


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
        accuracy=_mean(accuracies),
        kinds=kinds,
        length_padded=correlation(*centred(_lengths(first, item, equals[item.id]) for item in instances)),
        length_right=correlation(*_columns([_lengths(first, item, equals[item.id][:1])[:1] for item in instances])),
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


def _columns(groups: Sequence[Sequence[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    points = [point for group in groups for point in group]
    return [point[0] for point in points], [point[1] for point in points]


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
    return correlation(*centred(points)), correlation(*_columns(points))


def _difference(
    first: _Scores, other: _Scores, pairs: Sequence[Pair], changed: Callable[[Instance], Instance]
) -> float | None:
    points = [
        abs(first.of(pair.instance, completion) - other.of(changed(pair.instance), completion))
        for pair in pairs
        for completion in (pair.right, pair.wrong)
    ]
    return _mean([value for value in points if not math.isnan(value)])


def _same(
    first: _Scores, other: _Scores, pairs: Sequence[Pair], changed: Callable[[Instance], Instance]
) -> float | None:
    kept = []
    for pair in pairs:
        before = first.of(pair.instance, pair.right) - first.of(pair.instance, pair.wrong)
        item = changed(pair.instance)
        after = other.of(item, pair.right) - other.of(item, pair.wrong)
        if not math.isnan(before + after):
            kept.append(float(_sign(before) == _sign(after)))
    return _mean(kept)


def _sign(value: float) -> int:
    return (value > TIE) - (value < -TIE)


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

    Raises UserError where the folder has none.
    """
    chance = random.Random(f"{seed}/instances")
    kept: list[tuple[int, Instance]] = []
    usable = (item for item in store.iterate_instances(folder) if (item.rationale or "").strip())
    number = -1
    for number, item in enumerate(item for item in usable if not splits or item.split in splits):
        if len(kept) < count:
            kept.append((number, item))
        elif (place := chance.randrange(number + 1)) < count:
            kept[place] = (number, item)
    if number < 0:
        raise UserError(f"{folder} has no instance with a rationale to make pairs from; write rationales first")
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
    returned as it is. Raises UserError where the instances cannot be read, the
    judge fails for good or on more than its `failure_limit` of a batch.
    """
    inputs = {"instances": input_identity(instances_folder)}
    if thoughts_folder:
        inputs["thoughts"] = input_identity(thoughts_folder)
    settings = {
        "version": VERSION,
        "judge": judge_identity(config),
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
        if thoughts_folder:
            others = {
                item.id: item.rationale
                for item in store.iterate_instances(thoughts_folder)
                if item.id in thoughts and (item.rationale or "").strip()
            }
            instances = [item for item in instances if item.id in others]
            thoughts = {item.id: others[item.id] or "" for item in instances}
            if not instances:
                raise UserError(f"{thoughts_folder} has no rationale for the instances of {instances_folder}")
        if reword:
            thoughts = {key: reworded(thought) for key, thought in thoughts.items()}
        judges: list[Judge] = []

        def make(draw: int) -> Judge:
            judges.append(make_judge(config, seed, draw, stage.folder))
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
            **found.to_json(),
            "usage": dict(usage),
        }
        write_atomically(out / JUDGEMENTS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        write_atomically(out / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        stage.finish({"items": found.items, "judged": found.judged, "failed": found.failed, "usage": dict(usage)})
        return _read_summary(out)


def _read_summary(out: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((out / SUMMARY).read_text("utf-8"))
    return value
