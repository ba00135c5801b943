"""Prefect's automations of this project: runs whose process or worker was killed are marked, failures told to people.

Both are made by `awpo setup` and `awpo serve`, and may be called again: what is there is brought up to date.
"""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from datetime import timedelta

from prefect.automations import Automation
from prefect.blocks.webhook import Webhook
from prefect.client.schemas.objects import StateType
from prefect.events.actions import CallWebhook, ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.types import SecretDict

ZOMBIES, LOST, FAILURES = "Crash zombie runs", "Crash lost runs", "Tell of failed runs"
BLOCK = "awpo-failures"
"""Name of the block that keeps the address failures are told to; Prefect stores it encrypted."""
# Longer than a server without its database is waited for (two minutes), as what says that a run lives is lost meanwhile,
# and by some heartbeats (PREFECT_FLOWS_HEARTBEAT_FREQUENCY, 30 s): the first ones after that were seen to be lost, too.
SILENCE = timedelta(seconds=240)
# Within which a run that a worker has taken must begin; a cluster may have to find a machine and fetch an image first.
BEGINNING = timedelta(hours=1)
ENDED_BADLY = ("Failed", "Crashed", "TimedOut")
ENDED = ("Completed", "Cancelled", *ENDED_BADLY)
RUNS = ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]})
# One JSON object with `text`, which Slack, Mattermost, Google Chat and others show as a message.
MESSAGE = (
    '{"text": {{ (flow.name ~ ": run " ~ flow_run.name ~ " is " ~ flow_run.state.name ~ ". " ~ '
    '(flow_run.state.message or "") ~ " " ~ (flow_run | ui_url)) | tojson }}}'
)


def crash_zombie_runs() -> None:
    """A run that sent heartbeats and falls silent becomes Crashed."""
    _keep(
        Automation(
            name=ZOMBIES,
            description="A run whose process was killed sends no more heartbeats",
            trigger=EventTrigger(
                after={"prefect.flow-run.heartbeat"},
                expect={"prefect.flow-run.heartbeat", *(f"prefect.flow-run.{state}" for state in ENDED)},
                match=RUNS,
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=SILENCE,
            ),
            actions=[
                ChangeFlowRunState(
                    state=StateType.CRASHED, message=f"No heartbeat for {SILENCE.seconds} s: its process is gone"
                ),
            ],
        )
    )


def crash_lost_runs(within: timedelta = BEGINNING) -> None:
    """A run that a worker has taken and that does not begin `within` that time (at least 10 s) becomes Crashed.

    Its worker was killed before the process was there: no other one takes it, and it would be Pending for ever.
    """
    told = f"No process {within.total_seconds() / 60:g} min after a worker took it: the worker is gone"
    _keep(
        Automation(
            name=LOST,
            description="A run whose worker was killed before the run began is taken by no other",
            trigger=EventTrigger(
                after={"prefect.flow-run.Pending"},
                expect={
                    f"prefect.flow-run.{state}" for state in ("heartbeat", "Running", "Scheduled", "Cancelling", *ENDED)
                },
                match=RUNS,
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=within,
            ),
            actions=[ChangeFlowRunState(state=StateType.CRASHED, message=told)],
        )
    )


def tell_of_failures(url: str) -> None:
    """Each run that fails, crashes or takes too long is told to `url`, an http(s) address, by a POST of {"text": ...}."""
    # The payload is rendered to text, which is sent as it is: without the header nobody would take it for JSON.
    block = Webhook(url=url, headers=SecretDict({"Content-Type": "application/json"}))
    identifier = block.save(BLOCK, overwrite=True)
    _keep(
        Automation(
            name=FAILURES,
            description=f"Posts a message to the address in the block {BLOCK}",
            trigger=EventTrigger(
                expect={f"prefect.flow-run.{state}" for state in ENDED_BADLY},
                match=RUNS,
                for_each={"prefect.resource.id"},
                posture=Posture.Reactive,
                threshold=1,
                within=timedelta(0),
            ),
            actions=[CallWebhook(block_document_id=identifier, payload=MESSAGE)],  # type: ignore[arg-type]
        )
    )


def _keep(automation: Automation) -> None:
    """Creates the automation, or brings the one of that name up to date; one that a person disabled stays so."""
    try:
        known: Automation = Automation.read(name=automation.name)  # type: ignore[assignment]  # a coroutine only in an event loop
    except ValueError:
        automation.create()  # type: ignore[unused-coroutine]
        return
    known.description, known.trigger, known.actions = automation.description, automation.trigger, automation.actions
    known.update()  # type: ignore[unused-coroutine]
