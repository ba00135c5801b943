"""Answers of endpoints on disk, so that no call is paid for twice: across runs, processes and kills.

One SQLite file, addressed by content: the key is the SHA-256 of the endpoint's host, the model, the messages, the
sampling options and the response format (and the number of the draw, where several are asked for). Its write-ahead
log lets many processes read and write at once, and a killed one leaves nothing half written. What was asked is not
kept, only what came back. The file has to lie on a local disk: SQLite's log needs shared memory.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from awpo.errors import UserError
from awpo.shared_database import open_shared
from awpo.types import canonical_json

NAME = "endpoint-cache.sqlite"
WAIT_SECONDS = 60.0
"""How long a process waits for another one's write; each takes well under a millisecond."""

_TABLE = """
CREATE TABLE IF NOT EXISTS answers (
    key TEXT PRIMARY KEY, model TEXT NOT NULL, text TEXT NOT NULL, finish TEXT,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, seconds REAL NOT NULL, created REAL NOT NULL
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """One answer: its text, why it ended (`finish_reason`), what it cost in tokens and seconds when it was made."""

    text: str
    finish: str | None
    prompt_tokens: int
    completion_tokens: int
    seconds: float


def request_key(base_url: str, request: Mapping[str, Any], draw: int | str = 0) -> str:
    """The content address of a request's answer.

    Of the address only the host counts, so that a server may move to another port or path. `draw` tells apart
    samples of the same request; it is not sent.
    """
    value = {"host": (urlsplit(base_url).hostname or "").casefold(), "request": dict(request), "draw": draw}
    return hashlib.sha256(canonical_json(value).encode("utf-8", "surrogatepass")).hexdigest()


def shared_cache_file() -> Path:
    """The file that all runs share: under the folder of runs, `AWPO_RUNS` or ./runs."""
    return Path(os.environ.get("AWPO_RUNS", "runs")).absolute() / NAME


class EndpointCache:
    """The answers in one file, which is made where it is missing. For use by one thread; close it.

    Raises UserError where the file cannot be opened, is no cache, or cannot be written (a full disk).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._connection = open_shared(path, _TABLE, WAIT_SECONDS)
            self._connection.execute("SELECT key, model, text, finish, created FROM answers LIMIT 0")
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> UserError:
        return UserError(
            f"the cache of endpoint answers {self.path} cannot be used ({error}); mend or move it, or set cache to "
            "another file or to off"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def __len__(self) -> int:
        return int(self._connection.execute("SELECT count(*) FROM answers").fetchone()[0])

    def get(self, key: str) -> CachedAnswer | None:
        try:
            row = self._connection.execute(
                "SELECT text, finish, prompt_tokens, completion_tokens, seconds FROM answers WHERE key = ?", (key,)
            ).fetchone()
        except sqlite3.Error as error:
            raise self._failed(error) from None
        return CachedAnswer(*row) if row else None

    def put(self, key: str, model: str, answer: CachedAnswer) -> None:
        """Writes an answer down at once; the first one for a key stays."""
        row = (key, model, answer.text, answer.finish, answer.prompt_tokens, answer.completion_tokens, answer.seconds)
        try:
            self._connection.execute(
                "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row, round(time.time(), 3))
            )
        except sqlite3.Error as error:
            raise self._failed(error) from None
