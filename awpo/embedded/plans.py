"""What the dialogues of the embedded corpus are about, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Plan:
    """Episodes in order, of which the first `steps` assistant messages are kept; `weight` in percent of dialogues."""

    weight: float
    steps: int
    episodes: tuple[str, ...]


PLANS = (
    Plan(15, 1, ("single",)),
    Plan(12, 1, ("pair",)),
    Plan(3, 1, ("triple",)),
    Plan(7, 1, ("question",)),
    Plan(6, 1, ("no_tool",)),
    Plan(2, 1, ("small_talk",)),
    Plan(6, 2, ("single",)),
    Plan(4, 2, ("pair",)),
    Plan(4, 2, ("question",)),
    Plan(9, 2, ("chain",)),
    Plan(3, 2, ("ordered",)),
    Plan(2.5, 2, ("failed_chain",)),
    Plan(0.5, 2, ("dismissed",)),
    Plan(1, 2, ("no_tool", "single")),
    Plan(6, 3, ("chain",)),
    Plan(3, 3, ("ordered",)),
    Plan(2, 3, ("question",)),
    Plan(3, 3, ("single", "follow_up")),
    Plan(1, 3, ("single", "thanks")),
    Plan(1, 3, ("failed_chain", "single")),
    Plan(2.5, 4, ("single", "chain")),
    Plan(2, 4, ("chain", "pair")),
    Plan(1, 4, ("pair", "chain")),
    Plan(2, 5, ("single", "chain")),
    Plan(1, 5, ("question", "follow_up")),
    Plan(0.5, 4, ("question", "thanks")),
)


def draw_plan(rng: Random) -> Plan:
    """A plan, drawn by weight."""
    return rng.choices(PLANS, [plan.weight for plan in PLANS])[0]
