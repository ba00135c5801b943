"""The leaderboard's averages over categories, as `generate_leaderboard_csv` of the package computes them.

Names are those of its tables' columns, with "Non-Live" or "Live" before a name that two tables share. Values are
shares in [0, 1]. A category that was not run counts as 0 there; here such an average has no value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from evaluation.bfcl.data import LIVE_AST, MULTI_TURN


@dataclass(frozen=True, slots=True)
class Average:
    """The mean of categories or of other averages: plain, or `by_count`, weighted by their numbers of items."""

    name: str
    parts: tuple[str | Average, ...]
    by_count: bool = False

    @property
    def categories(self) -> tuple[str, ...]:
        return tuple(category for part in self.parts for category in _categories(part))

    def value(self, accuracy: Mapping[str, float], count: Mapping[str, int]) -> float:
        """The average, by the same operations in the same order as the package's: equal to the last digit."""
        total, weight = 0.0, 0
        for part in self.parts:
            share = accuracy[part] if isinstance(part, str) else part.value(accuracy, count)
            size = _count(part, count) if self.by_count else 1
            total += share * size
            weight += size
        return total / weight

    def weights(self, count: Mapping[str, int]) -> dict[str, float]:
        """What each category's accuracy is multiplied by; the sum is 1."""
        sizes = [_count(part, count) if self.by_count else 1 for part in self.parts]
        found: dict[str, float] = {}
        for part, size in zip(self.parts, sizes, strict=True):
            inner = {part: 1.0} if isinstance(part, str) else part.weights(count)
            for category, weight in inner.items():
                found[category] = found.get(category, 0.0) + weight * size / sum(sizes)
        return found


def _categories(part: str | Average) -> Iterator[str]:
    yield from [part] if isinstance(part, str) else part.categories


def _count(part: str | Average, count: Mapping[str, int]) -> int:
    return sum(count[category] for category in _categories(part))


_SIMPLE = Average("Non-Live Simple AST", ("simple", "java", "javascript"))
_REST: Sequence[str] = ("multiple", "parallel", "parallel_multiple")
_NON_LIVE = Average("Non-Live Overall Acc", (_SIMPLE, *_REST, "irrelevance"))
_LIVE = Average("Live Acc", (*LIVE_AST, "live_irrelevance", "live_relevance"), by_count=True)
_MULTI_TURN = Average("Multi Turn Acc", MULTI_TURN)

OVERALL = "Overall Acc"
NON_LIVE_CALLS = "Non-Live AST Acc"
AVERAGES = (
    Average(OVERALL, (_LIVE, _NON_LIVE, _MULTI_TURN)),
    _NON_LIVE,
    Average(NON_LIVE_CALLS, (_SIMPLE, *_REST)),
    _SIMPLE,
    _LIVE,
    Average("Live AST Summary", LIVE_AST, by_count=True),
    _MULTI_TURN,
    Average("Irrelevance Detection", ("irrelevance", "live_irrelevance")),
)
"""Every average that the leaderboard shows. Its "Relevance Detection" is the category live_relevance by itself."""
