"""A small SQLite file that several processes write: how it is opened."""

from __future__ import annotations

import sqlite3
from pathlib import Path


def open_shared(path: Path | None, table: str, wait_seconds: float) -> sqlite3.Connection:
    """A connection to the file, made with its folder where it is missing, and `table` (CREATE TABLE IF NOT EXISTS) in
    it; None is a database of this process alone. Others are waited for `wait_seconds` seconds.

    Statements commit by themselves; transactions are begun and ended by the caller. One thread after another may use
    the connection, never two at once. Raises OSError or sqlite3.Error.
    """
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(
        path or ":memory:", timeout=wait_seconds, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA journal_mode=WAL")
    # A kill of the process loses nothing; a power cut may lose the last rows, never the file.
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute(table)
    return connection
