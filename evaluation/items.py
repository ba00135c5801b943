"""What an evaluation stores per completion, and the rows of `scores.json` that summarise it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from awpo.errors import UserError
from awpo.files import whole_file
from awpo.types import Completion, ToolCall
from evaluation.statistics import clustered_share, pass_at_k

if TYPE_CHECKING:
    from evaluation.generate import Generated, Question

GREEDY = -1
ITEMS = "items.parquet"
SCORES = "scores.json"
PASS_AT = (1, 8)
REQUEST_FAILED = "request_failed"
"""The error type of an item that has no answer."""
NO_ROOM = "no_room"
"""The error type of an item whose prompt fills the model's context: wrong, since the model cannot answer it."""

ScoreRow = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """One completion and its verdict.

    `sample` is -1 for the greedy completion, else its number from 0. `step` of `steps` is the place of the
    item in its dialogue. `correct` is the verdict, None where there is no answer to judge. `empty` is true where the
    model gave neither a call nor a reply. `error_type` names the kind of mistake in the benchmark's own words, `detail`
    is the checker's reason, where there is one. `prompt_hash` is the question's (`Question.hash`, the first one of a
    dialogue), `calls` what was called as JSON, [{"name", "arguments"}]. Tokens and `seconds` are sums over a dialogue's
    answers; `seconds` takes no part in comparisons.
    """

    benchmark: str
    split: str
    item_id: str
    dialogue_id: str
    source: str
    step: int
    steps: int
    kind: str
    sample: int
    correct: bool | None
    completion: str
    response_tokens: int
    empty: bool
    finish: str = "stop"
    detail: str = ""
    error_type: str = ""
    prompt_hash: str = ""
    calls: str = "[]"
    prompt_tokens: int = 0
    seconds: float = field(default=0.0, compare=False)


_TYPES = {
    "str": pa.string(),
    "int": pa.int32(),
    "bool": pa.bool_(),
    "bool | None": pa.bool_(),
    "float": pa.float64(),
}
SCHEMA = pa.schema([(field.name, _TYPES[str(field.type)]) for field in fields(Item)])
SINCE_ENDPOINTS = {"error_type", "prompt_hash", "calls", "prompt_tokens", "seconds"}
"""Columns that files of earlier versions lack."""


def make_item(
    question: Question,
    answer: Generated,
    *,
    benchmark: str,
    split: str,
    item_id: str,
    source: str,
    kind: str,
    correct: bool,
    dialogue_id: str | None = None,
    step: int = 0,
    steps: int = 1,
    sample: int = GREEDY,
    error_type: str = "",
    detail: str = "",
) -> Item:
    """The item of one answer to one question.

    Whatever `correct` says, a failed answer has no verdict, and one for which the context has no room is wrong: that
    it calls nothing would else count as right where no call is due.

    `dialogue_id` is the item's own id where it stands for itself.
    """
    completion = answer.completion()
    verdict: bool | None = correct
    if answer.finish == "failed":
        verdict, error_type, detail = None, REQUEST_FAILED, answer.failure
    elif answer.finish == "no_room":
        verdict, error_type, detail = False, NO_ROOM, "the prompt fills the model's context"
    return Item(
        benchmark=benchmark,
        split=split,
        item_id=item_id,
        dialogue_id=item_id if dialogue_id is None else dialogue_id,
        source=source,
        step=step,
        steps=steps,
        kind=kind,
        sample=sample,
        correct=verdict,
        completion=answer.text,
        response_tokens=answer.tokens,
        empty=is_empty(completion),
        finish=answer.finish,
        detail=detail,
        error_type=error_type,
        prompt_hash=question.hash,
        calls=calls_json(completion.tool_calls),
        prompt_tokens=answer.prompt_tokens,
        seconds=round(answer.seconds, 4),
    )


def calls_json(calls: Iterable[ToolCall]) -> str:
    """Calls as the text of a column: JSON, [{"name", "arguments"}]."""
    return json.dumps([{"name": call.name, "arguments": call.arguments} for call in calls], ensure_ascii=False)


def is_empty(completion: Completion) -> bool:
    """Whether a completion has neither a call, whole or broken, nor a reply; a thought alone is empty."""
    return not completion.tool_calls and not completion.calls_malformed and not completion.content.strip()


def write_items(path: Path, items: Iterable[Item]) -> None:
    rows = [asdict(item) for item in items]
    for row in rows:  # a lone surrogate, which a model may emit, is not text that a file can hold
        for name in ("completion", "calls", "detail"):
            row[name] = row[name].encode("utf-8", "replace").decode("utf-8")
    with whole_file(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), temporary, compression="zstd")


def read_items(path: Path) -> list[Item]:
    """The items of an evaluation; UserError where there are none, or the file is not one of ours or of today's form."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the folder of a finished evaluation")
    try:
        lacking = set(SCHEMA.names) - set(pq.read_schema(path).names)
        if lacking == SINCE_ENDPOINTS:
            raise UserError(
                f"{path} is of an earlier version (no {', '.join(sorted(lacking))}); evaluate again into another folder"
            )
        if lacking:
            raise UserError(f"{path} is not a table of items: no {', '.join(sorted(lacking))}")
        return [Item(**row) for row in pq.read_table(path, schema=SCHEMA).to_pylist()]
    except (pa.ArrowException, TypeError) as error:
        raise UserError(f"{path} is not a table of items: {str(error).splitlines()[0]}") from None


def by_item(items: Iterable[Item]) -> dict[str, list[Item]]:
    """Items by `item_id`, samples in their order."""
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in sorted(items, key=lambda item: (item.item_id, item.sample)):
        groups[item.item_id].append(item)
    return dict(groups)


def mean_correct(samples: Sequence[Item]) -> float:
    return sum(item.correct is True for item in samples) / len(samples)


Grouping = Callable[[Item], str]


def by_step(item: Item) -> str:
    return f"step={item.step}"


def by_kind(item: Item) -> str:
    return f"kind={item.kind}"


def by_source(item: Item) -> str:
    return f"source={item.source}"


def score_rows(items: Sequence[Item], *, groupings: Sequence[Grouping] = (), **fields: Any) -> list[ScoreRow]:
    """Rows of `scores.json` for the items of one benchmark and split: greedy and sampled, all and by group.

    A mode or group without items has no row. Items without a verdict are left out; the rows that they would count in
    say "partial" and how many are "missing", and "no_room" how many answers are wrong for want of room. `fields` are added to every row.
    """
    rows: list[ScoreRow] = []
    for mode in ("greedy", "sampled"):
        chosen = [item for item in items if (item.sample == GREEDY) == (mode == "greedy")]
        groups: dict[str, list[Item]] = {"all": chosen} if chosen else {}
        for grouping in groupings:
            found: dict[str, list[Item]] = defaultdict(list)
            for item in chosen:
                found[grouping(item)].append(item)
            groups |= {name: found[name] for name in sorted(found, key=lambda name: (len(name), name))}
        for name, members in groups.items():
            if judged := [item for item in members if item.correct is not None]:
                missing = len(members) - len(judged)
                full = sum(item.error_type == NO_ROOM for item in judged)
                lacks = {"partial": True, "missing": missing} if missing else {}
                lacks |= {"no_room": full} if full else {}
                rows.append(_row(mode, name, judged) | lacks | fields)
    return rows


def _row(mode: str, group: str, items: Sequence[Item]) -> ScoreRow:
    grouped = by_item(items)
    values = [mean_correct(samples) for samples in grouped.values()]
    clusters = [samples[0].dialogue_id for samples in grouped.values()]
    estimate = clustered_share(values, clusters)
    row: ScoreRow = {
        "benchmark": items[0].benchmark,
        "split": items[0].split,
        "mode": mode,
        "group": group,
        "accuracy": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "items": estimate.items,
        "dialogues": estimate.clusters,
        "effective_items": estimate.effective,
        "empty_rate": sum(item.empty for item in items) / len(items),
        "response_tokens": sum(item.response_tokens for item in items) / len(items),
        "cut_rate": sum(item.finish != "stop" for item in items) / len(items),
    }
    if mode == "sampled" and group == "all":
        row["pass_at"] = _pass_at(list(grouped.values()))
    return row


def _pass_at(groups: Sequence[Sequence[Item]]) -> dict[str, float]:
    """pass@k over items, for each k of which every item has samples enough."""
    fewest = min(len(samples) for samples in groups)
    return {
        str(k): sum(pass_at_k(sum(item.correct is True for item in samples), len(samples), k) for samples in groups)
        / len(groups)
        for k in PASS_AT
        if k <= fewest
    }


def read_scores(folder: Path) -> list[ScoreRow]:
    """The rows of an evaluation's scores.json. Raises UserError where it is damaged."""
    try:
        rows = json.loads((folder / SCORES).read_text("utf-8"))
        if isinstance(rows, list) and all({"benchmark", "split"} <= row.keys() for row in rows):
            return rows
    except (OSError, ValueError, AttributeError, RecursionError):
        pass
    raise UserError(f"{folder / SCORES} is damaged or missing; evaluate into another folder, or delete this one")
