"""Which of several processes failed first, and of what."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any


def died_of(code: int) -> str:
    """The signal that ended a process, and what that means; empty where it ended by itself. `code` is negative by
    Python's convention, or above 128 by the shell's."""
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name if number > 0 else ""
    except ValueError:
        return ""
    return f"was killed by {name}" + (", likely out of memory" if number == signal.SIGKILL else "") if name else ""


def first_to_fail(codes: Mapping[int, int], errors: Sequence[Mapping[str, Any]]) -> int | None:
    """The rank whose end was the cause of the others'.

    `codes` are the exit codes of the ranks that ended badly, `errors` what ranks told before they ended, in order. A
    process that is killed says nothing, but those that wait for it soon say that it has gone. SIGTERM is how the
    launcher ends the others, SIGABRT how NCCL ends a process whose partner has gone.
    """
    consequences = (-signal.SIGTERM, -signal.SIGABRT)
    killed = [rank for rank, code in sorted(codes.items()) if code < 0 and code not in consequences]
    told = [int(error["rank"]) for error in errors if "rank" in error]
    others = sorted(codes, key=lambda rank: (codes[rank] in consequences, rank))
    return next(iter([*killed, *told, *others]), None)
