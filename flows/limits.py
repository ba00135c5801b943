"""The limits of what runs at once, for a Prefect server that has none yet."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from tasks.devices import visible_devices
from tasks.slots import GPU, JUDGE_API

# Two heavy processes of one thread each: what two cores can do.
CPU_SLOTS = 2
JUDGE_SLOTS = 4


def gpu_slots() -> int:
    """How many heavy processes run at once on this machine: one for each GPU, or `CPU_SLOTS` where there is none."""
    return len(visible_devices()) or CPU_SLOTS


def ensure_limits() -> list[str]:
    """Makes the limits that the server lacks; returns their names. What a person set stays as it is.

    Raises httpx.HTTPStatusError where the server lets this person make none.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
    from prefect.exceptions import ObjectAlreadyExists

    made = []
    with get_client(sync_client=True) as client:
        # Asked first: a server that is told of a limit twice writes a traceback into its log.
        known = {limit.name for limit in client.read_global_concurrency_limits(limit=200)}
        for name, limit in ((GPU, gpu_slots()), (JUDGE_API, JUDGE_SLOTS)):
            if name in known:
                continue
            try:
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=limit))
            except ObjectAlreadyExists:  # by another command, between the two requests
                continue
            made.append(name)
    return made
