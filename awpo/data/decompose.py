"""From dialogues to instances: a dialogue with K assistant steps becomes K instances.

Instance i has everything before step i as its prompt, with the reference calls and their results but without
earlier thoughts, and step i as its target; the thought that the source gives for step i becomes its rationale.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from awpo.artifacts import Manifest, open_stage
from awpo.data import store
from awpo.data.instance_rows import Texts, dialogue_rows
from awpo.data.masking import mask_dialogue
from awpo.data.parts import part_bytes
from awpo.data.rows import Row, Rows, data_files, source_identity
from awpo.data.settings import DecomposeConfig
from awpo.data.sources import Rejected, RowError, Source, detect, get_source, read_row
from awpo.data.splits import assign_splits, split_of
from awpo.data.tally import Tally
from awpo.data.validation import Fault, first_fault
from awpo.errors import UserError
from awpo.events import Progress, silent
from awpo.types import Dialogue, Instance, Message, Split, Tool, ToolCall

VERSION = 2
REJECTED = "rejected.jsonl"
INVALID_CALLS = "invalid_calls.jsonl"
INVALID = "a call that does not fit its schema"
ROWS_PER_REPORT = 500


def _merge_steps(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Joins assistant messages that are one step written as several: text, then calls; or call after call."""
    roles = [message.role for message in messages]
    if not any(one == other == "assistant" for one, other in pairwise(roles)):
        return messages
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
    return tuple(merged)


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
        if message.role == "tool":
            results += 1
            if results > open_calls:
                raise RowError("a tool result without a call", f"message {index}")
            continue
        if open_calls and not results:
            raise RowError("a call without a result", f"message {index}")
        open_calls = results = 0
        if message.role == "system":
            if begun:
                raise RowError("a system message in the middle", f"message {index}")
            continue
        begun = True
        if message.role == "user":
            asked = True
            continue
        if not asked:
            raise RowError("an assistant step before any user message", f"message {index}")
        if not message.tool_calls and not (message.content or "").strip():
            raise RowError("an empty assistant step", f"message {index}")
        for call in message.tool_calls:
            if call.name not in offered:
                raise RowError("a call of a tool that is not offered", f"message {index}: {call.name!r:.80}")
        open_calls, stepped = len(message.tool_calls), True
    if not stepped:
        raise RowError("no assistant step")
    return dialogue if messages is dialogue.messages else replace(dialogue, messages=messages)


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


@dataclass(frozen=True, slots=True)
class Examined:
    """A row as a checked dialogue, with the hash of its content and its calls that don't fit their schemas."""

    dialogue: Dialogue
    texts: Texts
    content: str
    invalid: list[tuple[int, ToolCall, Fault]]

    def invalid_lines(self, row: Row) -> Iterator[dict[str, Any]]:
        """The lines of invalid_calls.jsonl."""
        for index, call, fault in self.invalid:
            line = {"file": row.file, "row": row.number, "source": self.dialogue.source, "message": index}
            yield line | {"tool": call.name, "reason": fault.reason, "where": fault.where, "detail": fault.detail}


def id_hash(dialogue_id: str) -> int:
    """64 bits that stand for a dialogue's id."""
    return int.from_bytes(hashlib.sha256(dialogue_id.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def examine(row: Row, reader: Source) -> Examined | Rejected:
    """A row as a dialogue that can be decomposed, or as rejected with the reason; depends on the row alone."""
    dialogue = read_row(row, reader)
    if isinstance(dialogue, Rejected):
        return dialogue
    try:
        dialogue = check_dialogue(dialogue)
        texts = Texts(dialogue)
        invalid = invalid_calls(dialogue, last_step_only=reader.last_step_only)
        return Examined(dialogue, texts, texts.content_hash(), invalid)
    except RowError as error:
        return Rejected(row.number, error.reason, error.detail, row.file)
    except RecursionError:
        return Rejected(row.number, "nested too deeply", "", row.file)


def unusable(row: Row, found: Examined) -> Rejected:
    """The row of a dialogue that is dropped because of a call."""
    index, call, fault = found.invalid[0]
    return Rejected(row.number, INVALID, f"message {index}, {call.name:.80}: {fault}", row.file)


def cut_rows(texts: Texts, split: Split, reader: Source, config: DecomposeConfig) -> list[dict[str, Any]]:
    """The rows of a dialogue's instances, masked where that is asked for. Raises UserError where no file can hold them."""
    if config.masking is not None and split == "train":
        dialogue = replace(texts.of, split=split)
        texts = Texts(mask_dialogue(dialogue, config.masking, last_step_only=reader.last_step_only))
    try:
        return dialogue_rows(texts, split, reader.last_step_only)
    except ValueError:
        # The slow way says of which instance it is.
        cut = _cut(replace(texts.of, split=split), reader.last_step_only)
        return [store.instance_row(instance) for instance in cut]


def decompose_identity(source: Path, format: str, config: DecomposeConfig) -> tuple[dict[str, str], dict[str, Any]]:
    """The inputs and the config of the stage's manifest. Raises UserError for a source that cannot be read."""
    reader = get_source(detect(source) if format == "auto" else format)
    versions = {"format": reader.name, "reader": reader.version, "decompose": VERSION, "store": store.VERSION}
    return {"source": source_identity(source)}, {**versions, **config.model_dump(mode="json")}


def decompose_source(
    source: Path,
    out: Path,
    *,
    format: str = "auto",
    config: DecomposeConfig = DecomposeConfig(),  # noqa: B008 - immutable
    progress: Progress = silent,
    workers: int | None = None,
) -> Manifest:
    """Stage "decompose": reads a source file (or a folder of them) and writes its instances into `out`.

    Leaves instances-*.parquet, rejected.jsonl (file, row, reason and detail of every row not used),
    invalid_calls.jsonl (every call that doesn't fit its tool's schema, and why) and manifest.json with counts:
    rows_read = dialogues + the sum of rejected; instances, also by split, kind and source; invalid_calls by source and
    reason. With `config.invalid_calls` "drop" a dialogue with such a call is rejected, else it is used.
    With `config.masking` dialogues of the training split are masked (`awpo.data.masking`): their source's label says
    how, dialogues_masked counts them by kind. A row that repeats an earlier one is rejected; so is one that repeats an
    earlier dialogue's id, in formats where a row is a dialogue. `progress` counts bytes of the source. A finished
    result of the same source and versions is returned as it is.

    A source of more than `parts.PART_BYTES` is decomposed in parts by `workers` processes, all cores where none is
    named (`awpo.data.shards`): memory does not depend on its size, and a run that was killed goes on where it was.

    Raises UserError where the source cannot be read, is in no known format, or has no usable row.
    """
    inputs, identity = decompose_identity(source, format, config)
    reader = get_source(identity["format"])
    with open_stage(out, "decompose", inputs, identity) as stage:
        if stage.finished:
            return stage.manifest
        rows = Rows(source)
        if rows.total > part_bytes(rows.total):
            from awpo.data import shards  # which asks for this module in other processes

            files = data_files(source)
            tally = shards.decompose_parts(files, rows.total, stage.folder, reader, config, progress, workers)
            shutil.rmtree(stage.folder / shards.FOLDER)
        else:
            tally = _decompose_rows(rows, stage.folder, reader, config, progress)
        if not tally.dialogues:
            reason, count = tally.rejected.most_common(1)[0]
            with open(stage.folder / REJECTED, encoding="utf-8") as file:  # which goes with the stage
                first = json.loads(file.readline())
            raise UserError(
                f"no row of {source} can be used ({count} of {tally.rows}: {reason}; "
                f"row {first['row']}: {first['detail'] or first['reason']})"
            )
        progress(rows.total, rows.total, "bytes read")
        return stage.finish(tally.to_json())


def _decompose_rows(rows: Rows, folder: Path, reader: Source, config: DecomposeConfig, progress: Progress) -> Tally:
    """Decomposes a source in this process, into one shard after the other."""
    tally = Tally()
    with (
        open(folder / REJECTED, "w", encoding="utf-8", errors="backslashreplace") as rejected_file,
        open(folder / INVALID_CALLS, "w", encoding="utf-8", errors="backslashreplace") as invalid_file,
    ):
        texts: dict[int, Texts] = {}  # of the few dialogues that are underway, by their messages

        def usable() -> Iterator[Dialogue]:
            drop = config.invalid_calls == "drop"
            for item in _usable_dialogues(rows, reader, tally, progress, invalid_file, drop):
                if isinstance(item, Rejected):
                    tally.rejected[item.reason] += 1
                    rejected_file.write(json.dumps(item.to_json(), ensure_ascii=False) + "\n")
                else:
                    texts[id(item.dialogue.messages)] = item.texts
                    yield item.dialogue

        def instance_rows() -> Iterator[dict[str, Any]]:
            for dialogue in assign_splits(usable()):
                assert dialogue.split is not None
                cut = cut_rows(texts.pop(id(dialogue.messages)), dialogue.split, reader, config)
                tally.add(cut, masked=config.masking is not None)
                yield from cut

        store.write_rows(folder, instance_rows())
    return tally


def _usable_dialogues(
    rows: Rows, reader: Source, tally: Tally, progress: Progress, invalid_file: IO[str], drop: bool
) -> Iterator[Examined | Rejected]:
    """Every row as a dialogue that can be decomposed and is no repetition, or as rejected.

    Calls that do not fit their schemas are written into `invalid_file`; `drop` rejects their dialogues.
    """
    contents: set[str] = set()
    ids: set[str] = set()
    start = time.monotonic()
    for row in rows:
        tally.rows += 1
        if tally.rows % ROWS_PER_REPORT == 0:
            rate = rate_and_rest(tally.rows, rows.done, rows.total, time.monotonic() - start)
            progress(rows.done, rows.total, f"bytes read · {rate}")
        found = examine(row, reader)
        if isinstance(found, Rejected):
            yield found
            continue
        name = found.dialogue.id
        if found.content in contents:
            yield Rejected(row.number, "the same as an earlier row", "", row.file)
            continue
        if name in ids and not reader.last_step_only:
            yield Rejected(row.number, "the id of an earlier dialogue", repr(name)[:80], row.file)
            continue
        for line in found.invalid_lines(row):
            tally.add_invalid(found.dialogue.source, line["reason"])
            invalid_file.write(json.dumps(line, ensure_ascii=False) + "\n")
        if found.invalid and drop:
            yield unusable(row, found)
            continue
        contents.add(found.content)
        ids.add(name)
        yield found


def rate_and_rest(dialogues: int, done: int, total: int, seconds: float) -> str:
    """How fast it goes and how long it will take: "1,234 dialogues/s, 2 min left"."""
    if seconds <= 0 or done <= 0:
        return ""
    left = seconds * max(total - done, 0) / done
    rest = f"{left / 3600:.1f} h" if left >= 5400 else f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
    return f"{dialogues / seconds:,.0f} dialogues/s, {rest} left"
