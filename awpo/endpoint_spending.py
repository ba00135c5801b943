"""What the requests of a run have cost so far, kept together by all its processes and over all its attempts.

One small SQLite file in the run's folder. A process writes down what a request may cost at most before it is sent, and
what it took afterwards; so what a killed process had under way counts at its dearest from then on, as it may have been
charged. The file has to lie on a local disk: SQLite's log needs shared memory. Processes on several machines keep one
file each, for an equal part of the limits.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from awpo.errors import UserError
from awpo.processes import is_gone, process_identity
from awpo.shared_database import open_shared

SPENDING = ".spending.sqlite"
"""Name of the file in a run's folder; on further machines it has their number."""
WAIT_SECONDS = 60.0
"""How long a process waits for another one's write; each takes well under a millisecond."""
Tokens = tuple[int, int]
"""Prompt tokens, completion tokens."""

_TABLE = """
CREATE TABLE IF NOT EXISTS spending (
    client TEXT PRIMARY KEY, prompt INTEGER NOT NULL, completion INTEGER NOT NULL,
    reserved_prompt INTEGER NOT NULL, reserved_completion INTEGER NOT NULL
) WITHOUT ROWID
"""
_number = itertools.count()


def machines() -> int:
    """On how many machines the processes of this run work, as torchrun tells them; 1 without it."""
    here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or int(os.environ.get("WORLD_SIZE", 1)))
    return max(1, int(os.environ.get("WORLD_SIZE", 1)) // here)


def spending_file(folder: Path) -> Path:
    """The file of a run's folder for the processes on this machine."""
    machine = int(os.environ.get("GROUP_RANK", 0)) if machines() > 1 else 0
    return folder / SPENDING if machine == 0 else folder / f".spending-{machine}.sqlite"


class Spending:
    """The tokens spent and reserved by all clients of a file, which is made where it is missing.

    Without a path it holds for this object alone. For use by one thread. Raises UserError where the file cannot be
    used.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._client = f"{process_identity()}#{next(_number)}"
        try:
            self._connection = open_shared(path, _TABLE, WAIT_SECONDS)
            self._connection.execute("INSERT INTO spending VALUES (?, 0, 0, 0, 0)", (self._client,))
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> UserError:
        return UserError(
            f"what was spent cannot be kept in {self.path} ({error}); give a folder on a local disk that can be written, "
            "or leave spending_limit and token_limit out"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A transaction that no other process writes beside."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._failed(error) from None

    def total(self) -> Tokens:
        """What is spent by all clients, with what those that died had under way."""
        return self._sum(with_reserved=lambda client: client != self._client and _is_dead(client))

    def _sum(self, with_reserved: Callable[[str], bool]) -> Tokens:
        prompt = completion = 0
        for client, *spent, reserved_prompt, reserved_completion in self._rows():
            counts = with_reserved(client)
            prompt += spent[0] + counts * reserved_prompt
            completion += spent[1] + counts * reserved_completion
        return prompt, completion

    def _rows(self) -> list[tuple[str, int, int, int, int]]:
        try:
            return self._connection.execute("SELECT * FROM spending").fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from None

    def reserve(self, wanted: Tokens, fits: Callable[[int, int], bool]) -> bool:
        """Reserves tokens where they fit beside all that is spent and reserved, by whomever; else False."""
        with self._alone():
            prompt, completion = self._sum(with_reserved=lambda client: True)
            if not fits(prompt + wanted[0], completion + wanted[1]):
                return False
            self._add((0, 0), wanted)
        return True

    def begin(self) -> None:
        """To be called where nothing of this client is under way: what it may have left counts as spent."""
        with self._alone():
            self._connection.execute(
                "UPDATE spending SET prompt = prompt + reserved_prompt, completion = completion + reserved_completion, "
                "reserved_prompt = 0, reserved_completion = 0 WHERE client = ?",
                (self._client,),
            )

    def settle(self, reserved: Tokens, spent: Tokens) -> None:
        """Replaces a reservation by what was spent."""
        with self._alone():
            self._add(spent, (-reserved[0], -reserved[1]))

    def _add(self, spent: Tokens, reserved: Tokens) -> None:
        self._connection.execute(
            "UPDATE spending SET prompt = prompt + ?, completion = completion + ?, "
            "reserved_prompt = reserved_prompt + ?, reserved_completion = reserved_completion + ? WHERE client = ?",
            (*spent, *reserved, self._client),
        )

    def may_change(self) -> bool:
        """Whether a request is under way, here or in a process that lives, that may yet cost less than is reserved."""
        return any(
            reserved_prompt or reserved_completion
            for client, _, _, reserved_prompt, reserved_completion in self._rows()
            if client == self._client or not _is_dead(client)
        )


def _is_dead(client: str) -> bool:
    """Whether a client's process has ended; one of another machine has, since its run goes on here."""
    identity = client.rpartition("#")[0]
    return identity.partition(":")[0] != process_identity().partition(":")[0] or is_gone(identity)
