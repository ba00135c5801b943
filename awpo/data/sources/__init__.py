"""The formats that can be read, one module each. To add one: a module with a `SOURCE`, and its line here."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from awpo.data.rows import Row, Rows
from awpo.data.sources import apibank, bfcl, hammer, openai, sealtools, sharegpt, toolace, toolrl, xlam
from awpo.data.sources.base import Rejected, RowError, Source
from awpo.errors import UserError
from awpo.types import Dialogue

__all__ = ["FORMATS", "Rejected", "RowError", "Source", "detect", "get_source", "read", "read_row"]

# In the order in which they are tried on a file whose format is not named: those that ask more of a row come first.
_SOURCES = (
    openai.SOURCE,
    toolrl.SOURCE,
    hammer.SOURCE,
    apibank.SOURCE,
    apibank.DIALOGUES,
    bfcl.SOURCE,
    sealtools.SOURCE,
    xlam.SOURCE,
    toolace.SOURCE,
    sharegpt.SOURCE,
)
FORMATS: dict[str, Source] = {source.name: source for source in _SOURCES}

ROWS_SNIFFED = 20


def get_source(name: str) -> Source:
    """The format of that name; UserError, with the nearest name, where there is none."""
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(FORMATS)}"
        raise UserError(f"unknown format {name!r}; {hint}")
    return FORMATS[name]


def detect(path: Path) -> str:
    """The name of the format that a file (or folder of files) is in, by its first rows.

    Raises UserError where the file cannot be read or is in no known format.
    """
    fault, keys = "", ""
    for row in itertools.islice(Rows(path), ROWS_SNIFFED):
        if row.fault is not None:
            fault = fault or row.fault
            continue
        for source in FORMATS.values():
            if source.sniff(row.value):
                return source.name
        if isinstance(row.value, Mapping):
            keys = keys or f"its rows have the keys {' '.join(', '.join(map(str, list(row.value)[:8])).split())[:300]}"
    unread = f"its first row cannot be read: {fault[:300]}; what begins with {{ must have one whole object a line"
    reason = keys or (unread if fault else "its rows are not objects")
    known = "; ".join(f"{source.name}: {source.summary}" for source in FORMATS.values())
    raise UserError(f"{path} is in no known format ({reason}); known are {known}")


def read_row(row: Row, source: Source) -> Dialogue | Rejected:
    """A row as a dialogue, or as rejected with the reason."""
    if row.fault is not None:
        return Rejected(row.number, "not sound JSON", row.fault, row.file)
    try:
        if not isinstance(row.value, Mapping):
            raise RowError("not an object", type(row.value).__name__)
        return source.read(row.value)
    except RowError as error:
        return Rejected(row.number, error.reason, error.detail, row.file)
    except RecursionError:
        return Rejected(row.number, "nested too deeply", "", row.file)


def read(path: Path, format: str = "auto") -> Iterator[Dialogue | Rejected]:
    """The dialogues of a file (or folder of files), in order, and in place of each unusable row why it is not used.

    `format` is a name in FORMATS, or "auto" for `detect`. Raises UserError where the file itself cannot be read.
    """
    source = get_source(detect(path) if format == "auto" else format)
    for row in Rows(path):
        yield read_row(row, source)
