"""Slots: how many pieces of heavy work run at once, counted by a Prefect server over all runs that it knows.

Two of Prefect's global concurrency limits, to be seen and changed in its UI under "Concurrency": `gpu`, a slot for each
process that trains or generates, and `judge-api`, a slot for each piece of work that asks an endpoint. They are made by
`flows.limits`; where a server has none, nothing is limited, and the run's log says so.

A slot is a lease of a minute that is renewed as long as this process lives: of a process that was killed it comes back
by itself. Work that is finished already takes none.

A run of a deployment that has a limit holds a lease of that limit too, which Prefect's engine takes and renews, and
without which it ends the run. Here it goes on: a server that was away for five minutes, or forgot its leases when it
was started again, must not end hours of training, and how much works at once is still kept by the slots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from uuid import UUID

import httpx
from prefect import flow_engine
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.concurrency._leases import maintain_concurrency_lease
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger

from awpo.errors import UserError
from tasks.cancellation import check_cancelled, wait_for_stop

GPU, JUDGE_API = "gpu", "judge-api"
LEASE_SECONDS = 60.0  # the shortest that Prefect takes
ASK_SECONDS = 2.0
TELL_SECONDS = 60.0
_LOCKED, _TOO_FEW = 423, 422

# Prefect logs each answer "not now" as an error of its service, though it is raised here as well.
logging.getLogger("prefect._internal.concurrency").addFilter(
    lambda record: "ConcurrencySlotAcquisitionWithLeaseService" not in record.getMessage()
)


def _renewed_while_it_stands(lease: UUID, seconds: float, **_: bool) -> AbstractContextManager[None]:
    return maintain_concurrency_lease(lease, seconds, raise_on_lease_renewal_failure=False)


flow_engine.maintain_concurrency_lease = _renewed_while_it_stands  # type: ignore[assignment,attr-defined]


@contextmanager
def slots(needs: Mapping[str, int], note: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Holds so many slots of each limit in `needs` while the block runs; outside of a Prefect run, and of none, at once.

    All are taken together or none, so that nobody holds some while waiting for others. That it waits is told to `note`
    and to the run's log, at once and every minute. Raises InterruptedError where the flow is stopped while it waits,
    UserError where a limit has fewer slots than are needed.
    """
    holder = _holder()
    if not needs or holder is None:
        yield
        return
    with ExitStack() as held:
        waited, told, began = False, 0.0, time.monotonic()
        what = " and ".join(name if count == 1 else f"{name} ({count} slots)" for name, count in needs.items())
        while not _take(held, needs, holder):
            if (now := time.monotonic()) - told >= TELL_SECONDS or not waited:
                waited, told = True, now
                _tell(f"waiting for a free slot of {what}, for {now - began:.0f} s so far", note)
            wait_for_stop(ASK_SECONDS)
        if waited:
            _tell(f"got a slot of {what} after {time.monotonic() - began:.0f} s", note)
        yield


def _take(held: ExitStack, needs: Mapping[str, int], holder: ConcurrencyLeaseHolder) -> bool:
    """Asks once. Prefect's own waiting can't be interrupted from another thread, which is where work is done."""
    check_cancelled()
    with ExitStack() as taken:
        for name, count in needs.items():
            try:
                taken.enter_context(_lease(name, count, holder))
            except ConcurrencySlotAcquisitionError as error:
                code = getattr(getattr(error.__cause__, "response", None), "status_code", None)
                if code == _LOCKED:
                    return False
                if code == _TOO_FEW:
                    raise UserError(
                        f"{count} slots of the limit {name!r} are needed, and it has fewer; raise it in Prefect's UI "
                        "under Concurrency"
                    ) from None
                raise
        held.push(taken.pop_all())
    return True


@contextmanager
def _lease(name: str, count: int, holder: ConcurrencyLeaseHolder) -> Iterator[None]:
    """Slots of one limit. A server that is away for a while ends nothing: neither hours of training, while the lease
    can't be renewed, nor work that is done, where it can't be given back; it runs out by itself."""
    lease = concurrency(
        name, count, max_retries=0, lease_duration=LEASE_SECONDS, holder=holder, raise_on_lease_renewal_failure=False
    )
    lease.__enter__()
    try:
        yield
    finally:
        try:
            lease.__exit__(None, None, None)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            get_run_logger().warning(
                "a slot of %s could not be given back (%s); it is free within %.0f s", name, reason, LEASE_SECONDS
            )


def _holder() -> ConcurrencyLeaseHolder | None:
    if (task := TaskRunContext.get()) is not None:
        return ConcurrencyLeaseHolder(type="task_run", id=task.task_run.id)
    flow = FlowRunContext.get()
    if flow is not None and flow.flow_run is not None:
        return ConcurrencyLeaseHolder(type="flow_run", id=flow.flow_run.id)
    return None


def _tell(message: str, note: Callable[[str], None]) -> None:
    note(message)
    get_run_logger().log(logging.INFO, message)
