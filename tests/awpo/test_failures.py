"""Which of several processes failed first, and of what: exit codes and what was told, as they come together."""

import signal

import pytest

from awpo.failures import died_of, first_to_fail

KILL, TERM, ABORT, SEGV = (-int(name) for name in (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV))


@pytest.mark.parametrize(
    ("codes", "told", "first"),
    [
        ({0: TERM, 1: KILL}, [], 1),
        # The one that waited for the killed one says so before it is ended.
        ({0: 1, 1: KILL}, [0], 1),
        ({0: 1, 1: SEGV, 2: TERM}, [0], 1),
        ({0: ABORT, 1: 1}, [1], 1),
        ({0: 1, 1: 1}, [1, 0], 1),
        ({0: 1, 1: 2}, [1], 1),
        ({0: ABORT, 1: TERM}, [], 0),
        ({0: TERM, 1: ABORT}, [], 0),
        ({0: TERM, 1: 3}, [], 1),
        ({}, [], None),
    ],
)
def test_the_first_to_fail(codes: dict[int, int], told: list[int], first: int | None) -> None:
    assert first_to_fail(codes, [{"rank": rank, "kind": "crash"} for rank in told]) == first


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (1, ""),
        (2, ""),
        (-9, "was killed by SIGKILL, likely out of memory"),
        (137, "was killed by SIGKILL, likely out of memory"),
        (-11, "was killed by SIGSEGV"),
        (255, ""),
    ],
)
def test_of_what_a_process_died(code: int, text: str) -> None:
    assert died_of(code) == text
