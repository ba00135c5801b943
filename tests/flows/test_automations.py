"""Runs that fall silent are taken for dead, but not while they wait for a database, as they are meant to."""

from __future__ import annotations

import os

from flows.automations import SILENCE
from tasks.patience import PATIENCE_SECONDS


def test_a_database_that_is_waited_for_makes_no_run_dead() -> None:
    """Seen: one heartbeat lost with the database, and the first one after it with the server's old connections."""
    heartbeat = int(os.environ["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])  # which importing flows has set
    assert SILENCE.total_seconds() >= PATIENCE_SECONDS + 3 * heartbeat
