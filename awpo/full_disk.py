"""A disk that is full: told in one line, whichever library met it, since a person can mend it and a retry cannot."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from awpo.errors import UserError

EXIT_CODE = errno.ENOSPC
"""Of a worker that had no room left even to say so."""
_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Libraries that write with code of their own (safetensors, Arrow, SQLite) keep the system's words and not its number.
_WORDS = ("No space left on device", "Disk quota exceeded", "File too large", "disk is full")
# Torch keeps neither: it says at which byte it stopped.
_TORCH = ("PytorchStreamWriter failed", "unexpected pos ")
_LITTLE = 16 * 2**20


def full_disk(error: BaseException, folder: Path) -> UserError | None:
    """What to tell where `error`, or what led to it, came of a full disk, quota or file-size limit; else None.

    `folder` is where the work that met it writes to.
    """
    if not any(_says_so(each, folder) for each in _chain(error)):
        return None
    return error_of(folder)


def error_of(folder: Path) -> UserError:
    """The line that a person reads."""
    return UserError(f"no space left on the disk of {folder}; free some and run the same again: it goes on from there")


def _says_so(error: BaseException, folder: Path) -> bool:
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    text = str(error)
    return any(words in text for words in _WORDS) or (any(words in text for words in _TORCH) and _nearly_full(folder))


def _nearly_full(folder: Path) -> bool:
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < _LITTLE


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
