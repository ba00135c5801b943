"""Rows of a source, whatever file they lie in: a JSON array, JSON lines or parquet, each also gzipped, or a folder.

A source may also be named as a set on the hub (`awpo.data.hub`); then its files are fetched first.

The kind of a file is told from its first bytes, not from its name. Memory is bounded by the largest row (JSON)
or by a batch of rows (parquet). A row that cannot be read comes with the fault that says why, and the next one is
read; a file that cannot be read on ends in a UserError that says what, where and how to mend it.
"""

from __future__ import annotations

import codecs
import gzip
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from awpo.artifacts import IN_PROGRESS, MANIFEST, input_identity
from awpo.data import hub
from awpo.data.strict_json import StrictDecoder
from awpo.errors import UserError

SUFFIXES = (".json", ".jsonl", ".parquet", ".json.gz", ".jsonl.gz", ".parquet.gz")
CHUNK = 2**20
LARGEST_VALUE = 64 * 2**20
PARQUET_BATCH = 256

_STRUCTS_THAT_LOSE = ("arguments", "parameters", "properties")


@dataclass(frozen=True, slots=True)
class Row:
    """Row `number` of `file` (from 0; blank lines are no rows): its value, or the fault that hides it."""

    file: str
    number: int
    value: Any
    fault: str | None = None


def data_files(source: Path) -> list[Path]:
    """The files of a source: itself, a folder's data files by name, or those of a set on the hub.

    Raises UserError where there is none.
    """
    if hub.is_hub(source):
        return hub.fetch_files(hub.parse_source(source))
    try:
        return _local_files(source)
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror}; check that you may read it") from None


def _local_files(source: Path) -> list[Path]:
    if not source.exists():
        raise UserError(f"{source} does not exist; give the path of a JSON, JSON-lines or parquet file")
    if source.is_file():
        return [source]
    if (source / IN_PROGRESS).exists() and not (source / MANIFEST).exists():
        raise UserError(f"{source} is the folder of an unfinished stage; run that stage again")
    held = sorted(path for path in source.iterdir() if not path.name.startswith("."))
    named = [path for path in held if path.name.endswith(SUFFIXES) and path.name != MANIFEST]
    if broken := [path for path in named if not path.exists()]:  # as in a hub's cache whose files are gone
        raise UserError(f"{broken[0]} is a link to a file that is not there; fetch it again or remove the link")
    files = [path for path in named if path.is_file()]
    if not files:
        folders = [path.name for path in held if path.is_dir()]
        inside = f"; it has folders, give one of them: {', '.join(folders)[:200]}" if folders else ""
        raise UserError(f"{source} holds no data file; expected one that ends in {', '.join(SUFFIXES)}{inside}")
    return files


def source_identity(source: Path) -> str:
    """What stands for a source's content in a manifest: of a pinned set on the hub its name, else `input_identity`."""
    return hub.parse_source(source).identity if hub.is_hub(source) else input_identity(source)


class Rows:
    """The rows of a source. Iterate once; meanwhile `done` of `total` bytes have been read, for progress."""

    def __init__(self, source: Path) -> None:
        self._files = data_files(source)
        self._before = 0
        self._position: Callable[[], int] = int
        try:
            self.total = sum(file.stat().st_size for file in self._files)
        except OSError as error:
            raise UserError(f"cannot read {source}: {error.strerror}; check that you may read it") from None

    @property
    def done(self) -> int:
        """Bytes read so far, of the files as they lie on disk (0 to `total`)."""
        return self._before + self._position()

    def __iter__(self) -> Iterator[Row]:
        for path in self._files:
            try:
                with open(path, "rb") as file:
                    self._position = file.tell
                    try:
                        yield from self._rows_of(path, file)
                    finally:
                        self._before += self._position()
                        self._position = int
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise UserError(f"{path} is not a whole gzip file ({error}); fetch it again") from None
            except OSError as error:
                raise UserError(
                    f"cannot read {path}: {error.strerror or error}; check that it is a file you may read"
                ) from None

    def _rows_of(self, path: Path, file: IO[bytes]) -> Iterator[Row]:
        with ExitStack() as stack:
            head = file.read(4)
            file.seek(0)
            if head[:2] == b"\x1f\x8b":
                file = cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=file)))
                head = file.read(4)
                file.seek(0)
            if head == b"PAR1":
                yield from self._parquet_rows(path, file, stack)
                return
            start = file.read(4096)
            file.seek(0)
            if not start.strip():
                raise UserError(f"{path} is empty; give a file that holds rows")
            if b"\0" in start:
                raise UserError(f"{path} is a binary file of another kind; give a JSON, JSON-lines or parquet file")
            first = start.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
            if first == b"[":
                yield from _array_rows(path, file)
            elif first == b"{":
                yield from line_rows(path.name, file)
            else:
                raise UserError(
                    f"{path} begins with {start[:20]!r}; give a JSON array of rows, JSON lines (an object a line) or parquet"
                )

    def _parquet_rows(self, path: Path, file: IO[bytes], stack: ExitStack) -> Iterator[Row]:
        if isinstance(file, gzip.GzipFile):  # parquet needs to seek, which in gzip means to unpack from the start
            unpacked: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            while chunk := file.read(CHUNK):
                unpacked.write(chunk)
            unpacked.seek(0)
            file = unpacked
        number, size, total = 0, path.stat().st_size, 1

        def count(rows: int) -> None:
            nonlocal total
            total = max(rows, 1)

        # Parquet is read from its end: the place in the file says nothing, the rows do.
        self._position = lambda: size * number // total
        for row in parquet_rows(path, file, counted=count):
            yield row
            number += 1
        if number == 0:
            raise UserError(f"{path} holds no rows; give a file that holds rows")


def parquet_rows(
    path: Path,
    file: IO[bytes],
    groups: Iterable[int] | None = None,
    first_row: int = 0,
    counted: Callable[[int], None] = lambda rows: None,
) -> Iterator[Row]:
    """The rows of a parquet file, or of some of its row groups, numbered from `first_row`; `counted` is told of all."""
    try:
        with pq.ParquetFile(file) as parquet:
            refuse_lossy_structs(path, parquet.schema_arrow)
            counted(parquet.metadata.num_rows)
            chosen = None if groups is None else list(groups)
            number = first_row
            for batch in parquet.iter_batches(batch_size=PARQUET_BATCH, row_groups=chosen):
                for value in batch.to_pylist():
                    yield Row(path.name, number, value)
                    number += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not a whole parquet file ({reason}); fetch it again") from None


def line_rows(name: str, file: IO[bytes], start: int = 0, end: int | None = None) -> Iterator[Row]:
    """The rows of a file of JSON lines, or of the lines that begin in [start, end), numbered from 0."""
    decoder, number, at = StrictDecoder(), 0, start
    if start:
        file.seek(start - 1)
        at += len(file.readline()) - 1  # the line that began before belongs to whoever reads up to `start`
    for raw in file:
        if end is not None and at >= end:
            return
        line = raw.removeprefix(codecs.BOM_UTF8).strip() if at == 0 else raw.strip()
        at += len(raw)
        if not line:
            continue
        value, fault = None, None
        try:
            text = line.decode("utf-8")
            value, stop, fault = decoder.raw_decode(text)
            if stop != len(text):
                fault = f"more text follows the JSON value: {text[stop : stop + 20]!r}"
        except UnicodeDecodeError:
            fault = "the line is not UTF-8"
        except ValueError as error:
            fault = str(error)
        yield Row(name, number, None if fault else value, fault)
        number += 1


class _Window:
    """A window of text that moves over a file."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.at, self.ended = "", 0, False

    def more(self) -> bool:
        """Drops what is behind and reads on, at least as much as is there; False at the end of the file."""
        if self.ended:
            return False
        raw = self._file.read(max(CHUNK, len(self.text) - self.at))
        self.ended = not raw
        try:
            self.text = self.text[self.at :] + self._decode.decode(raw, final=self.ended)
        except UnicodeDecodeError as error:
            raise UserError(f"{self._path} is not UTF-8 text ({error.reason}); convert it to UTF-8") from None
        self.at = 0
        return True

    def next_character(self) -> str:
        """The next character that is no white space, not consumed; "" at the end."""
        while True:
            while self.at < len(self.text):
                if self.text[self.at] not in " \t\r\n":
                    return self.text[self.at]
                self.at += 1
            if not self.more():
                return ""


def _array_rows(path: Path, file: IO[bytes]) -> Iterator[Row]:
    window, decoder, number = _Window(path, file), StrictDecoder(), 0
    window.next_character()
    window.at += 1  # the opening bracket, seen by the caller
    if window.next_character() == "]":
        raise UserError(f"{path} is an empty array; give a file that holds rows")
    while True:
        window.next_character()
        while True:
            try:
                value, end, fault = decoder.raw_decode(window.text, window.at)
                if end < len(window.text) or window.ended:
                    break
                window.more()  # a number at the very end of the window may go on
            except ValueError as error:
                if len(window.text) - window.at > LARGEST_VALUE or not window.more():
                    message = error.args[0].split(": line")[0]
                    raise UserError(
                        f"{path}: row {number} is broken or cut off ({message}); fetch the file again or mend it"
                    ) from None
        window.at = end
        yield Row(path.name, number, None if fault else value, fault)
        number += 1
        separator = window.next_character()
        window.at += 1
        if separator == "]":
            break
        if separator != ",":
            raise UserError(
                f"{path}: after row {number - 1} comes {separator or 'the end of the file'!r}, not ',' or ']'; "
                "fetch the file again or mend it"
            )
    if window.next_character():
        raise UserError(f"{path}: text follows the array's end; give JSON lines or one array")


def refuse_lossy_structs(path: Path, schema: pa.Schema) -> None:
    """Raises UserError where a row would lose something.

    Of two columns with one name it would keep the last. Parquet gives every row of a struct the keys of all rows, null
    where the row had none: nothing tells them apart.
    """
    if twice := [name for name in schema.names if schema.names.count(name) > 1]:
        raise UserError(f"{path} has two columns {twice[0]!r}, of which a row would keep one; rename or drop one")
    todo: list[pa.Field] = list(schema)
    while todo:
        field = todo.pop()
        if pa.types.is_struct(field.type):
            if field.name in _STRUCTS_THAT_LOSE:
                raise UserError(
                    f"{path} holds {field.name!r} as a struct, in which each row has the keys of all rows; "
                    "write it as JSON text, or give the rows as JSON lines"
                )
            todo.extend(field.type.field(index) for index in range(field.type.num_fields))
        elif pa.types.is_list(field.type) or pa.types.is_large_list(field.type):
            todo.append(field.type.value_field)
