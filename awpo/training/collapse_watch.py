"""Watches a policy for collapse: it stops exploring, says the same again and again, or only keeps up the form.

Signs are read from the metrics that a run logs anyway, so that a resumed run, which reads its earlier ones again, watches
on as if it had not been interrupted. Each is the mean of the last `BATCHES` rollout batches, held against the first
batch, which the starting policy sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from awpo.errors import UserError

BATCHES = 3
"""Rollout batches whose mean shows a sign; fewer would take one odd batch for it."""
CHARACTERS = 16
"""Length of the runs of characters of which repeated ones are counted: longer than tags and most names."""


@dataclass(frozen=True)
class Sign:
    """A sign of collapse: the metric that shows it, whether (first, now) is one, and what it says."""

    metric: str
    shows: Callable[[float, float], bool]
    says: str


SIGNS = (
    Sign("entropy", lambda first, now: now < first / 5, "it hardly explores any more"),
    Sign("response_length", lambda first, now: now < first / 4, "its answers have shrunk"),
    Sign("response_length", lambda first, now: now > 4 * first, "its answers have swollen"),
    Sign(
        "rollout/repeated_share", lambda first, now: now > max(0.5, first + 0.25), "most of its text is said repeatedly"
    ),
    Sign(
        "reward/format_only_share",
        lambda first, now: now > max(0.9, first + 0.25),
        "its answers have the right form and nothing right in them",
    ),
)


def repeated_share(text: str) -> float:
    """The share of a text's runs of `CHARACTERS` that stood in it before, in [0, 1); 0 for a shorter text.

    White space counts as one blank, whatever its length. No words are looked for: not every language has blanks.
    """
    text = " ".join(text.split())
    runs = [text[start : start + CHARACTERS] for start in range(len(text) - CHARACTERS + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


class CollapseWatch:
    """Warns once of each sign; with `stop` a sign ends the run instead."""

    def __init__(self, warn: Callable[[str], None], *, stop: bool = False) -> None:
        self.warn, self.stop = warn, stop
        self._seen: dict[str, list[float]] = {}
        self._told: set[Sign] = set()

    def see(self, step: int, metrics: Mapping[str, float], *, again: bool = False) -> None:
        """Takes notice of the metrics of an optimiser step, in the order of training; only those that begin a rollout
        batch, which are those with a response length, count. Those seen `again`, after a resume, are told of no more.

        Raises UserError at a sign, where signs are to end the run.
        """
        if "response_length" not in metrics:
            return
        for name in {sign.metric for sign in SIGNS} & metrics.keys():
            self._seen.setdefault(name, []).append(metrics[name])
        for sign in SIGNS:
            if sign in self._told or (found := self._found(sign)) is None:
                continue
            self._told.add(sign)
            if not again:
                self._tell(f"step {step}: the policy may have collapsed: {sign.says} ({found})")

    def _found(self, sign: Sign) -> str | None:
        values = self._seen.get(sign.metric, [])
        if len(values) <= BATCHES:
            return None
        first, now = values[0], sum(values[-BATCHES:]) / BATCHES
        if not sign.shows(first, now):
            return None
        return f"{sign.metric} was {first:.3g} and is {now:.3g} over the last {BATCHES} rollout batches"

    def _tell(self, message: str) -> None:
        if not self.stop:
            self.warn(f"{message}; see docs/metrics.md")
            return
        raise UserError(
            f"{message}, which ends the run (policy.stop_on_collapse): its last checkpoint is kept; lower "
            f"policy.learning_rate or look at the rewards, or set stop_on_collapse: false to go on all the same"
        )
