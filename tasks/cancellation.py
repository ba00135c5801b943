"""Stopping a flow from outside stops the work of its task threads.

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


@contextmanager
def stops_its_tasks() -> Iterator[None]:
    """Tells the stages to end when the body is left by anything but a result or an ordinary error.

    Flows may nest (a pipeline within a sweep): the outermost one resets the signal.
    """
    global _depth
    if _depth == 0:
        _stopped.clear()
    _depth += 1
    try:
        yield
    except Exception:
        raise
    except BaseException:  # KeyboardInterrupt, Prefect's TerminationSignal
        _stopped.set()
        raise
    finally:
        _depth -= 1


def cancelled() -> bool:
    """Whether the flow of this process has been stopped."""
    return _stopped.is_set()


def check_cancelled() -> None:
    """Raises InterruptedError where the flow of this process has been stopped."""
    if cancelled():
        raise InterruptedError("the run was stopped")
