import random
from pathlib import Path

from awpo.data.store import read_instances
from awpo.rewards import is_exact
from awpo.training.demonstrations import wrong_decision
from awpo.types import Completion


def test_every_wrong_decision_is_wrong_and_argued_for(instances: Path) -> None:
    generator = random.Random(0)
    for instance in read_instances(instances, {"train"}):
        wrong = wrong_decision(instance, generator)
        assert wrong is not None
        completion = Completion(wrong.rationale, wrong.target.tool_calls, wrong.target.content or "")
        assert not is_exact(instance.target, completion)
        assert wrong.rationale
        assert wrong.prompt == instance.prompt
        offered = {tool.name for tool in instance.tools}
        assert {call.name for call in wrong.target.tool_calls} <= offered


def test_the_same_seed_decides_the_same(instances: Path) -> None:
    rows = read_instances(instances, {"train"})
    first, second = ([wrong_decision(row, g) for row in rows] for g in (random.Random(1), random.Random(1)))
    assert first == second
