"""Instances on disk: parquet shards `instances-00000.parquet`, `instances-00001.parquet`, ... in one folder.

Columns: id, source, dialogue_id, step, steps, split, kind, tools, prompt, target, rationale. `tools`, `prompt` and
`target` are JSON text in the form of the OpenAI chat format, with keys in the order the source gave them: a chat
template renders keys in that order, so it is part of the data. The schema's metadata hold its version.

Writing is streaming: a row group is written when it holds `ROWS_PER_GROUP` rows or `BYTES_PER_GROUP` bytes of
text, so memory is bounded however many instances there are. A shard appears under its name only when it is whole.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from awpo.artifacts import IN_PROGRESS, MANIFEST
from awpo.data import strict_json
from awpo.errors import UserError
from awpo.types import Instance, Message, Split, Tool

VERSION = 1
ROWS_PER_GROUP = 1024
BYTES_PER_GROUP = 32 * 2**20
ROWS_PER_SHARD = 65536

T = TypeVar("T")

_VERSION_KEY = b"awpo.instances.version"
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("dialogue_id", pa.string(), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        pa.field("steps", pa.int32(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("tools", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("target", pa.string(), nullable=False),
        pa.field("rationale", pa.string(), nullable=True),
    ],
    metadata={_VERSION_KEY: str(VERSION).encode()},
)


def message_to_json(message: Message) -> dict[str, Any]:
    """A message as it is stored: as in the OpenAI chat format, but that no content stays null."""
    # Message.to_json writes no content as "": right for a chat template, but here None must come back as None.
    value = {**message.to_json(), "content": message.content}
    if message.thought is not None:
        value["reasoning_content"] = message.thought
    if message.name is not None:
        value["name"] = message.name
    return value


def instance_row(instance: Instance) -> dict[str, Any]:
    try:
        row: dict[str, Any] = {
            "id": instance.id,
            "source": instance.source,
            "dialogue_id": instance.dialogue_id,
            "step": instance.step,
            "steps": instance.steps,
            "split": instance.split,
            "kind": instance.kind,
            "tools": strict_json.dump([tool.to_json() for tool in instance.tools]),
            "prompt": strict_json.dump([message_to_json(message) for message in instance.prompt]),
            "target": strict_json.dump(message_to_json(instance.target)),
            "rationale": instance.rationale,
        }
        for name in ("source", "dialogue_id", "rationale"):
            (row[name] or "").encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            f"instance {instance.id} of dialogue {instance.dialogue_id!r} cannot be stored: a text holds a lone "
            "surrogate, which no file can hold; mend its source"
        ) from None
    except ValueError as error:
        raise UserError(
            f"instance {instance.id} of dialogue {instance.dialogue_id!r} cannot be stored: {error}; mend its source"
        ) from None
    return row


class ShardWriter:
    """Writes one shard; it appears under its name when closed without an error."""

    def __init__(self, path: Path, metadata: Mapping[str, str] | None = None) -> None:
        self.path, self.rows = path, 0
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        noted = {f"awpo.{name}".encode(): value.encode() for name, value in (metadata or {}).items()}
        schema = SCHEMA.with_metadata({**(SCHEMA.metadata or {}), **noted})
        self._writer = pq.ParquetWriter(self._temporary, schema, compression="zstd", write_page_checksum=True)
        self._group: list[dict[str, Any]] = []
        self._bytes = 0

    def add(self, row: dict[str, Any]) -> None:
        self._group.append(row)
        self._bytes += len(row["tools"]) + len(row["prompt"]) + len(row["target"])
        self.rows += 1
        if len(self._group) >= ROWS_PER_GROUP or self._bytes >= BYTES_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._group:
            columns = {name: [row[name] for row in self._group] for name in SCHEMA.names}
            self._writer.write_table(pa.Table.from_pydict(columns, SCHEMA))
            self._group, self._bytes = [], 0

    def add_table(self, table: pa.Table) -> None:
        """Writes rows that are in the form of the schema already, as a row group of their own."""
        self._flush()
        if table.num_rows:
            self._writer.write_table(table)
            self.rows += table.num_rows

    def close(self) -> None:
        self._flush()
        self._writer.close()
        with open(self._temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self._temporary, self.path)

    def abandon(self) -> None:
        self._writer.close()
        self._temporary.unlink(missing_ok=True)


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a folder in order. Raises UserError where one is missing in between, or there is none."""
    paths = sorted(folder.glob("instances-[0-9][0-9][0-9][0-9][0-9].parquet"))
    if not paths:
        raise UserError(f"{folder} holds no instances-*.parquet; give the output folder of a data stage")
    for number, path in enumerate(paths):
        if path.name != f"instances-{number:05d}.parquet":
            raise UserError(f"{folder} lacks instances-{number:05d}.parquet; redo the stage that wrote it")
    return paths


def write_instances(folder: Path, instances: Iterable[Instance], metadata: Mapping[str, str] | None = None) -> int:
    """Writes the shards of `folder`, in place of those it had, and returns the number of instances.

    `metadata` stands in the schema of each shard, its names behind "awpo."; `read_metadata` reads it back.

    Raises UserError for an instance that no file can hold (NaN, a lone surrogate) or a folder that cannot be
    written. Nothing is left under a shard's name that is not whole.
    """
    return write_rows(folder, map(instance_row, instances), metadata)


def write_rows(folder: Path, rows: Iterable[dict[str, Any]], metadata: Mapping[str, str] | None = None) -> int:
    """`write_instances` of instances that are rows already."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in [*folder.glob("instances-*.parquet"), *folder.glob(".instances-*.parquet.*.tmp")]:
            stale.unlink()
        count, number = 0, 0
        shard = ShardWriter(folder / f"instances-{number:05d}.parquet", metadata or {})
        try:
            for row in rows:
                if shard.rows >= ROWS_PER_SHARD:
                    shard.close()
                    number += 1
                    shard = ShardWriter(folder / f"instances-{number:05d}.parquet", metadata or {})
                shard.add(row)
                count += 1
            shard.close()
        except BaseException:
            shard.abandon()
            raise
    except OSError as error:
        raise UserError(
            f"cannot write instances to {folder}: {error.strerror or error}; free space or choose another folder"
        ) from None
    return count


def read_metadata(folder: Path) -> dict[str, str]:
    """What `write_instances` was given as `metadata`, from the first shard. Raises UserError where there is none."""
    found = open_shard(shard_paths(folder)[0]).schema_arrow.metadata or {}
    named = {key.decode(): value.decode() for key, value in found.items() if key.startswith(b"awpo.")}
    return {key.removeprefix("awpo."): value for key, value in named.items() if key.encode() != _VERSION_KEY}


@functools.lru_cache(maxsize=512)
def _read_tools(text: str) -> tuple[Tool, ...]:
    # All steps of a dialogue offer the same tools: most texts are seen several times in a row.
    functions = [tool["function"] for tool in strict_json.parse(text)]
    return tuple(Tool(function["name"], function["description"], function["parameters"]) for function in functions)


def instance_of(row: dict[str, Any]) -> Instance:
    """The instance that a row holds."""
    return Instance(
        source=row["source"],
        dialogue_id=row["dialogue_id"],
        step=row["step"],
        steps=row["steps"],
        split=row["split"],
        tools=_read_tools(row["tools"]),
        prompt=tuple(Message.from_json(message) for message in strict_json.parse(row["prompt"])),
        target=Message.from_json(strict_json.parse(row["target"])),
        rationale=row["rationale"],
        id=row["id"],
    )


def open_shard(path: Path) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except PermissionError:
        raise UserError(f"cannot read {path}; check that you may read it") from None
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not a whole parquet file ({reason}); redo the stage that wrote it") from None
    version = (file.schema_arrow.metadata or {}).get(_VERSION_KEY)
    if version is None:
        raise UserError(f"{path} is parquet, but not of instances; turn a source file into instances first")
    if version != str(VERSION).encode():
        raise UserError(
            f"{path} holds instances of version {version.decode(errors='replace')}, this code reads {VERSION}; "
            "redo the stage that wrote it"
        )
    if not file.schema_arrow.equals(SCHEMA):
        raise UserError(f"{path} lacks columns of instances or has others; redo the stage that wrote it")
    return file


def _check_splits(splits: Collection[str]) -> None:
    known = get_args(Split)
    for name in splits:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UserError(
                f"unknown split {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")
            )


def shards_of(path: Path) -> list[Path]:
    """The shards of a folder, or the one that `path` is. Raises UserError where there is nothing finished."""
    if path.is_dir() and (path / IN_PROGRESS).exists() and not (path / MANIFEST).exists():
        raise UserError(f"{path} is the folder of an unfinished stage; run that stage again")
    if not path.exists():
        raise UserError(f"{path} does not exist; give a folder with instances-*.parquet or one such file")
    return shard_paths(path) if path.is_dir() else [path]


def count_instances(path: Path) -> int:
    """The number of instances of a folder or of one shard, without reading them. Errors: `iterate_instances`."""
    total = 0
    for shard in shards_of(path):
        with open_shard(shard) as file:
            total += file.metadata.num_rows
    return total


def iterate_instances(path: Path, splits: Collection[str] | None = None) -> Iterator[Instance]:
    """Yields the instances of a folder or of one shard in stored order, one row group in memory at a time.

    Raises UserError where the path is missing, unfinished, truncated, foreign, or of another version; and for an
    unknown name in `splits`.
    """
    return _iterate(path, splits, instance_of)


def _iterate(path: Path, splits: Collection[str] | None, read: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    if splits is not None:
        _check_splits(splits)
    for shard in shards_of(path):
        with open_shard(shard) as file:
            number = 0
            try:
                for batch in file.iter_batches(batch_size=ROWS_PER_GROUP):
                    table = pa.Table.from_batches([batch])
                    if splits is not None:
                        table = table.filter(pc.is_in(table["split"], value_set=pa.array(list(splits), pa.string())))
                    for row in table.to_pylist():
                        yield read(row)
                        number += 1
            except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                reason = str(error).splitlines()[0]
                raise UserError(
                    f"{shard} is damaged after {number} instances ({reason}); redo the stage that wrote it"
                ) from None


def read_instances(path: Path, splits: Collection[str] | None = None) -> list[Instance]:
    """All instances of a folder or of one shard, of all splits or of those named. Errors: `iterate_instances`."""
    return list(iterate_instances(path, splits))
