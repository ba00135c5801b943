"""The automation that marks a run Crashed whose process was killed without a word."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from datetime import timedelta

from prefect.automations import Automation
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

NAME = "Crash zombie runs"
# Three heartbeats of PREFECT_FLOWS_HEARTBEAT_FREQUENCY (30 s).
SILENCE = timedelta(seconds=90)


def crash_zombie_runs() -> None:
    """Creates the automation where it is missing: a run that sent heartbeats and falls silent becomes Crashed."""
    try:
        Automation.read(name=NAME)  # type: ignore[unused-coroutine]  # a coroutine only in an event loop
        return
    except ValueError:
        pass
    ended = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    automation = Automation(
        name=NAME,
        description="A run whose process was killed sends no more heartbeats",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *ended},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=SILENCE,
        ),
        actions=[
            ChangeFlowRunState(state=StateType.CRASHED, message="No heartbeat for 90 s: its process is gone"),
        ],
    )
    automation.create()  # type: ignore[unused-coroutine]  # a coroutine only in an event loop
