"""Stopping a flow from outside stops the work of its threads.

Prefect turns the SIGTERM of a cancellation (and Ctrl-C) into an exception in the flow's main thread only; its task
threads would go on until they are done. A flow runs its body inside `stops_its_tasks`, and every stage asks
`cancelled` as it goes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_stopped = threading.Event()
_depth = 0
_entering = threading.Lock()


@contextmanager
def stops_its_tasks() -> Iterator[None]:
    """Tells the stages to end when the body is left by anything but a result or an ordinary error.

    Flows may nest (a cell within a sweep): the outermost one resets the signal.
    """
    global _depth
    with _entering:
        if _depth == 0:
            _stopped.clear()
        _depth += 1
    try:
        yield
    except Exception:
        raise
    except BaseException:  # KeyboardInterrupt, Prefect's TerminationSignal
        stop()
        raise
    finally:
        with _entering:
            _depth -= 1


def stop() -> None:
    """Tells all stages of this process to end: for a flow that waits for its threads before it ends itself."""
    _stopped.set()


def cancelled() -> bool:
    """Whether the flow of this process has been stopped."""
    return _stopped.is_set()


def wait_for_stop(seconds: float) -> bool:
    """Waits so long, or until the flow of this process is stopped; whether it is."""
    return _stopped.wait(seconds)


def check_cancelled() -> None:
    """Raises InterruptedError where the flow of this process has been stopped."""
    if cancelled():
        raise InterruptedError("the run was stopped")
