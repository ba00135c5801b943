"""Files that are whole or not there, and their hashes."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def name_meant(name: str) -> str:
    """The file that a temporary one of `whole_file` was to become; another name as it is."""
    return re.sub(r"^\.(.+)\.\d+\.tmp$", r"\1", name)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Writes beside the target, flushes to disk and renames, so that no reader ever sees half a file."""
    with whole_file(path) as temporary:
        temporary.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to write a file to: where the block ends well, it is flushed to disk and renamed to `path`.

    So no reader ever sees half a file, and after a power cut the old one is there, or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        flush_to_disk(temporary)
        os.replace(temporary, path)
        flush_to_disk(path.parent)  # a rename is on disk when its folder is
    finally:
        temporary.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on disk. A folder that cannot be asked is not."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        if not path.is_dir():
            raise


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hex; of a folder, over the relative names and hashes of its files (hidden ones left out)."""
    if path.is_dir():
        digest = hashlib.sha256()
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            name = file.relative_to(path)
            if not any(part.startswith(".") for part in name.parts):
                digest.update(f"{name.as_posix()}\0{file_hash(file)}\n".encode())
        return digest.hexdigest()
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def keep_rows(file: Path, keeps: Callable[[Any], bool]) -> None:
    """Leaves those rows of a file of JSON lines of which `keeps` is true; a file that is not there stays so.

    A row that cannot be read goes as well: half of one, of a process that died in writing it, which the next row would
    be written behind. `keeps` may raise KeyError, TypeError or ValueError for a row that is none.
    """
    if not file.exists():
        return

    def is_kept(line: bytes) -> bool:
        try:
            return keeps(json.loads(line))
        except (ValueError, KeyError, TypeError):
            return False

    # At line feeds alone: a text may hold other ends of lines, as U+2028, which JSON leaves as they are.
    rows = file.read_bytes().split(b"\n")[:-1]
    write_atomically(file, b"".join(row + b"\n" for row in rows if is_kept(row)))
