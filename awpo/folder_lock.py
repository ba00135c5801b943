"""One process at a time in a stage's folder: two that write into it at once would leave a mixture of both.

The folder itself is locked (flock), so nothing is left behind, and the lock goes with the process, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from awpo.errors import UserError

_held: set[int] = set()


def _let_go() -> None:
    """A forked child, such as a loader of data, that outlives its parent must not hold what was the parent's."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Holds the folder, which must be there. Raises UserError where another process, or thread, does.

    On a file system without locks nothing is held.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    _held.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is at work in {folder}; wait until it has ended, or choose another folder"
            ) from None
        except OSError:
            pass
        yield
    finally:
        if descriptor in _held:
            _held.remove(descriptor)
            with suppress(OSError):  # a child that has just been forked has not let go yet
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
