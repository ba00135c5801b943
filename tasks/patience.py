"""A tracking store that is away for a while is waited for: a database that starts again, a server that is replaced.

MLflow's client tries an HTTP request some times within seconds and a database not at all, so that a restart of the
database in the moment when a stage begins or ends would fail hours of work. Here each call is made again until the
store is back, a stop of the flow ends the waiting, and after `PATIENCE_SECONDS` the error stands.

So is a call that lost a race: MLflow looks whether a row is there (a dataset that several runs take, for one) and writes
it where it is not, so that of two processes that do so at once one is refused. Asked again, it finds the row.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from typing import Any, cast

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger

from tasks.cancellation import wait_for_stop

# A managed database takes one to two minutes to fail over. Prefect's client waits as long (flows.environment).
PATIENCE_SECONDS = 120.0
ASK_SECONDS = 3.0
ADVICE = "(raised as a result of Query-invoked autoflush"
RACES = 10
"""Times that a call may lose a race: far more than processes that would run it at once and meet again."""
RACE_SECONDS = 0.3


def patient(client: MlflowClient, seconds: float = PATIENCE_SECONDS, ask: float = ASK_SECONDS) -> MlflowClient:
    """The client, with calls that wait up to `seconds` for a store that is away, asking every `ask` seconds.

    A call may reach the store twice, as with MLflow's own retries: where the store went away after the work and before
    the answer. What is written here bears that, but for a run, a model or a version that is made: that may stand there
    twice, and the first of the two is used by nobody.
    """
    return cast("MlflowClient", _Patient(client, seconds, ask))


class _Patient:
    def __init__(self, client: MlflowClient, seconds: float, ask: float) -> None:
        self._client, self._seconds, self._ask = client, seconds, ask

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return self._waiting(found) if callable(found) else found

    def _waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def again(*given: Any, **named: Any) -> Any:
            began, told, races = time.monotonic(), False, 0
            while True:
                try:
                    return call(*given, **named)
                except MlflowException as error:
                    if lost_a_race(error) and races < RACES:
                        races += 1
                        if not wait_for_stop(random.uniform(0, RACE_SECONDS)):
                            continue
                    if not is_away(error) or time.monotonic() - began + self._ask > self._seconds:
                        raise
                    if not told:
                        _tell(
                            f"the MLflow store does not answer; waiting up to {self._seconds:.0f} s for it: {in_a_line(error)}"
                        )
                    told = True
                    if wait_for_stop(self._ask):
                        raise

        return again


def is_away(error: MlflowException) -> bool:
    """Whether the error says that the store cannot be reached now, and nothing of what it was asked."""
    return error.error_code == "TEMPORARILY_UNAVAILABLE" or str(error).startswith("API request to ")


def in_a_line(error: Exception) -> str:
    """What a store's error says, in a line: of a database's without the advice to programmers that stands before it."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith(ADVICE)]
    return lines[0] if lines else type(error).__name__


def patience_of_this_run() -> float:
    """Seconds that a store is waited for when work begins: a deployment's run has nobody at hand who would try again.

    0 for a command, whose error a person reads at once.
    """
    context = FlowRunContext.get()
    return PATIENCE_SECONDS if context and context.flow_run and context.flow_run.deployment_id else 0.0


def lost_a_race(error: MlflowException) -> bool:
    """Whether the store refused a row because another process wrote the same one in the same moment.

    Not where it says by itself that what was to be made is there: asked again, it would say so again.
    """
    if error.error_code == "RESOURCE_ALREADY_EXISTS":
        return False
    return any(words in str(error) for words in ("UNIQUE constraint failed", "UniqueViolation", "Duplicate entry"))


def _tell(message: str) -> None:
    if TaskRunContext.get() or FlowRunContext.get():
        get_run_logger().warning(message)
