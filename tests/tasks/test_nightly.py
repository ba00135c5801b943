"""The automation that docs/benchmarks.md shows waits for the event that a night emits.

That the event arrives at a server is tested in tests/flows/test_nightly.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import Resource

from tasks.nightly import REGRESSED, resource_of

DOCS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"


def test_the_automation_in_the_docs_waits_for_the_event_of_a_regression() -> None:
    [text] = re.findall(r"```yaml\n(name: .*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    automation = AutomationCore.model_validate(yaml.safe_load(text))
    trigger = automation.trigger
    assert isinstance(trigger, EventTrigger)
    assert trigger.posture == Posture.Reactive
    assert trigger.expect == {REGRESSED}
    assert trigger.match.matches(Resource(resource_of("awpo")))
    assert not trigger.match.matches(Resource({"prefect.resource.id": "prefect.flow-run.1"}))
