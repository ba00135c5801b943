"""From dialogues to instances: a dialogue with K assistant steps becomes K instances.

Instance i has everything before step i as its prompt, with the reference calls and their results but without
earlier thoughts, and step i as its target; the thought that the source gives for step i becomes its rationale.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from awpo.artifacts import Manifest, open_stage
from awpo.data import store
from awpo.data.masking import kinds_of, mask_dialogue
from awpo.data.rows import Rows, source_identity
from awpo.data.settings import DecomposeConfig
from awpo.data.sources import Rejected, RowError, Source, detect, get_source, read_row
from awpo.data.sources.base import dialogue_hash
from awpo.data.splits import assign_splits, split_of
from awpo.data.validation import Fault, first_fault
from awpo.errors import UserError
from awpo.events import Progress, silent
from awpo.types import Dialogue, Instance, Message, Tool, ToolCall

VERSION = 2
REJECTED = "rejected.jsonl"
INVALID_CALLS = "invalid_calls.jsonl"
INVALID = "a call that does not fit its schema"
ROWS_PER_REPORT = 500


def _merge_steps(messages: tuple[Message, ...]) -> list[Message]:
    """Joins assistant messages that are one step written as several: text, then calls; or call after call."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last is None or last.role != "assistant" or message.role != "assistant":
            merged.append(message)
            continue
        if (message.content or "").strip():
            raise RowError("two replies in a row", f"message {len(merged)}")
        thoughts = [thought for thought in (last.thought, message.thought) if thought]
        merged[-1] = replace(last, tool_calls=last.tool_calls + message.tool_calls, thought="\n".join(thoughts) or None)
    return merged


def check_dialogue(dialogue: Dialogue) -> Dialogue:
    """The dialogue with split-up steps joined, if it can be decomposed; raises RowError, with the reason, if not.

    What is asked: system messages only at the start; a user's message before the first assistant step; results
    only after calls and at most one a call; calls answered before anyone else speaks; no empty step; calls only of
    tools on offer. Messages after the last assistant step are nobody's prompt and are let pass.
    """
    messages = _merge_steps(dialogue.messages)
    offered = {tool.name for tool in dialogue.tools}
    open_calls = results = 0
    begun = asked = stepped = False
    for index, message in enumerate(messages):
        where = f"message {index}"
        if message.role == "tool":
            results += 1
            if results > open_calls:
                raise RowError("a tool result without a call", where)
            continue
        if open_calls and not results:
            raise RowError("a call without a result", where)
        open_calls = results = 0
        if message.role == "system":
            if begun:
                raise RowError("a system message in the middle", where)
            continue
        begun = True
        if message.role == "user":
            asked = True
            continue
        if not asked:
            raise RowError("an assistant step before any user message", where)
        if not message.tool_calls and not (message.content or "").strip():
            raise RowError("an empty assistant step", where)
        for call in message.tool_calls:
            if call.name not in offered:
                raise RowError("a call of a tool that is not offered", f"{where}: {call.name!r:.80}")
        open_calls, stepped = len(message.tool_calls), True
    if not stepped:
        raise RowError("no assistant step")
    return replace(dialogue, messages=tuple(messages))


def decompose(dialogue: Dialogue, *, last_step_only: bool = False) -> list[Instance]:
    """The instances of a dialogue, in order of steps; with `last_step_only` the one of its last message.

    The split is the dialogue's own, else by the hash of its id. Raises RowError (a ValueError) for a dialogue that
    cannot be decomposed.
    """
    return _cut(check_dialogue(dialogue), last_step_only)


def _cut(dialogue: Dialogue, last_step_only: bool) -> list[Instance]:
    positions = [index for index, message in enumerate(dialogue.messages) if message.role == "assistant"]
    history = tuple(replace(message, thought=None) if message.thought else message for message in dialogue.messages)
    return [
        Instance(
            source=dialogue.source,
            dialogue_id=dialogue.id,
            step=step,
            steps=len(positions),
            split=dialogue.split or split_of(dialogue.id),
            tools=dialogue.tools,
            prompt=history[:position],
            target=history[position],
            rationale=dialogue.messages[position].thought,
        )
        for step, position in enumerate(positions)
        if not last_step_only or step == len(positions) - 1
    ]


def invalid_calls(dialogue: Dialogue, *, last_step_only: bool = False) -> list[tuple[int, ToolCall, Fault]]:
    """The calls of a checked dialogue that do not fit their tools' schemas: (message, call, its first fault).

    Where several tools have one name, a call has to fit one of them.
    """
    tools: dict[str, list[Tool]] = {}
    for tool in dialogue.tools:
        tools.setdefault(tool.name, []).append(tool)
    first = len(dialogue.messages) - 1 if last_step_only else 0
    found = []
    for index, message in enumerate(dialogue.messages[first:], first):
        for call in message.tool_calls:
            faults = [first_fault(call, tool) for tool in tools[call.name]]
            if None not in faults and faults[0] is not None:
                found.append((index, call, faults[0]))
    return found


class _Tally:
    """Counts of one run over a source; the sums are checked when it ends."""

    def __init__(self) -> None:
        self.rows = self.dialogues = self.instances = 0
        self.invalid: dict[str, Counter[str]] = {}
        self.masked: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.split: Counter[str] = Counter()
        self.kind: Counter[str] = Counter()
        self.source: Counter[str] = Counter()

    def add(self, instances: list[Instance]) -> None:
        self.dialogues += 1
        self.instances += len(instances)
        for instance in instances:
            self.split[instance.split] += 1
            self.kind[instance.kind] += 1
            self.source[instance.source] += 1

    def to_json(self) -> dict[str, Any]:
        assert self.rows == self.dialogues + self.rejected.total(), "a row was neither read nor rejected"
        return {
            "rows_read": self.rows,
            "dialogues": self.dialogues,
            "instances": self.instances,
            "rejected": dict(self.rejected.most_common()),
            "invalid_calls": {source: dict(reasons.most_common()) for source, reasons in sorted(self.invalid.items())},
            "dialogues_masked": dict(sorted(self.masked.items())),
            "instances_by_split": dict(sorted(self.split.items())),
            "instances_by_kind": dict(sorted(self.kind.items())),
            "instances_by_source": dict(sorted(self.source.items())),
        }


def decompose_source(
    source: Path,
    out: Path,
    *,
    format: str = "auto",
    config: DecomposeConfig = DecomposeConfig(),  # noqa: B008 - immutable
    progress: Progress = silent,
) -> Manifest:
    """Stage "decompose": reads a source file (or a folder of them) and writes its instances into `out`.

    Leaves instances-*.parquet, rejected.jsonl (file, row, reason and detail of every row not used),
    invalid_calls.jsonl (every call that doesn't fit its tool's schema, and why) and manifest.json with counts:
    rows_read = dialogues + the sum of rejected; instances, also by split, kind and source; invalid_calls by source and
    reason. With `config.invalid_calls` "drop" a dialogue with such a call is rejected, else it is used.
    With `config.masking` dialogues of the training split are masked (`awpo.data.masking`): their source's label says
    how, dialogues_masked counts them by kind. A row that repeats an earlier one is rejected; so is one that repeats an earlier dialogue's id, in
    formats where a row is a dialogue. Both are known by hash, which takes about 100 bytes of memory a dialogue.
    `progress` counts bytes of the source. A finished result of the same source and versions is returned as it is.

    Raises UserError where the source cannot be read, is in no known format, or has no usable row.
    """
    reader = get_source(detect(source) if format == "auto" else format)
    identity = {
        "format": reader.name,
        "reader": reader.version,
        "decompose": VERSION,
        "store": store.VERSION,
        **config.model_dump(mode="json"),
    }
    with open_stage(out, "decompose", {"source": source_identity(source)}, identity) as stage:
        if stage.finished:
            return stage.manifest
        rows, tally = Rows(source), _Tally()
        with (
            open(stage.folder / REJECTED, "w", encoding="utf-8", errors="backslashreplace") as rejected_file,
            open(stage.folder / INVALID_CALLS, "w", encoding="utf-8", errors="backslashreplace") as invalid_file,
        ):

            def usable() -> Iterator[Dialogue]:
                drop = config.invalid_calls == "drop"
                for item in _usable_dialogues(rows, reader, tally, progress, invalid_file, drop):
                    if isinstance(item, Dialogue):
                        yield item
                    else:
                        tally.rejected[item.reason] += 1
                        rejected_file.write(json.dumps(item.to_json(), ensure_ascii=False) + "\n")

            def instances() -> Iterator[Instance]:
                for dialogue in assign_splits(usable()):
                    if config.masking is not None and dialogue.split == "train":
                        dialogue = mask_dialogue(dialogue, config.masking, last_step_only=reader.last_step_only)
                        tally.masked.update(kinds_of(dialogue.source))
                    cut = _cut(dialogue, reader.last_step_only)
                    tally.add(cut)
                    yield from cut

            store.write_instances(stage.folder, instances())
        if not tally.dialogues:
            reason, count = tally.rejected.most_common(1)[0]
            raise UserError(
                f"no row of {source} can be used ({count} of {tally.rows}: {reason}); {out / REJECTED} has the details"
            )
        progress(rows.total, rows.total, "bytes read")
        return stage.finish(tally.to_json())


def _usable_dialogues(
    rows: Rows, reader: Source, tally: _Tally, progress: Progress, invalid_file: IO[str], drop: bool
) -> Iterator[Dialogue | Rejected]:
    """Every row as a dialogue that can be decomposed and is no repetition, or as rejected.

    Calls that do not fit their schemas are written into `invalid_file`; `drop` rejects their dialogues.
    """
    contents: set[str] = set()
    ids: set[str] = set()
    for row in rows:
        tally.rows += 1
        if tally.rows % ROWS_PER_REPORT == 0:
            progress(rows.done, rows.total, "bytes read")
        dialogue = read_row(row, reader)
        if isinstance(dialogue, Rejected):
            yield dialogue
            continue
        try:
            dialogue = check_dialogue(dialogue)
            content = dialogue_hash(dialogue.tools, dialogue.messages)
            if content in contents:
                raise RowError("the same as an earlier row")
            if dialogue.id in ids and not reader.last_step_only:
                raise RowError("the id of an earlier dialogue", repr(dialogue.id)[:80])
            invalid = invalid_calls(dialogue, last_step_only=reader.last_step_only)
            for index, call, fault in invalid:
                tally.invalid.setdefault(dialogue.source, Counter())[fault.reason] += 1
                line = {"file": row.file, "row": row.number, "source": dialogue.source, "message": index}
                line |= {"tool": call.name, "reason": fault.reason, "where": fault.where, "detail": fault.detail}
                invalid_file.write(json.dumps(line, ensure_ascii=False) + "\n")
            if invalid and drop:
                index, call, fault = invalid[0]
                raise RowError(INVALID, f"message {index}, {call.name:.80}: {fault}")
        except RowError as error:
            yield Rejected(row.number, error.reason, error.detail, row.file)
            continue
        except RecursionError:
            yield Rejected(row.number, "nested too deeply", "", row.file)
            continue
        contents.add(content)
        ids.add(dialogue.id)
        yield dialogue
