"""The categories and the leaderboard's averages over them, as `generate_leaderboard_csv` of the package computes them.

Names are those of its tables' columns, in version 3 with "Non-Live" or "Live" before a name that two tables share.
Values are shares in [0, 1]. A category that was not run counts as 0 there; here such an average has no value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

NON_LIVE_AST_V3 = ("simple", "java", "javascript", "multiple", "parallel", "parallel_multiple")
NON_LIVE_AST_V4 = ("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple")
LIVE_AST = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
MULTI_TURN = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
WEB_SEARCH = ("web_search_base", "web_search_no_snippet")
MEMORY = ("memory_kv", "memory_vector", "memory_rec_sum")


@dataclass(frozen=True, slots=True)
class Average:
    """The mean of categories or of other averages.

    It is plain, `by_count` weighted by their numbers of items, or weighted by fixed `percentages`, one for each part.
    """

    name: str
    parts: tuple[str | Average, ...]
    by_count: bool = False
    percentages: tuple[int, ...] = ()

    @property
    def categories(self) -> tuple[str, ...]:
        return tuple(category for part in self.parts for category in _categories(part))

    def value(self, accuracy: Mapping[str, float], count: Mapping[str, int]) -> float:
        """The average, by the same operations in the same order as the package's: equal to the last digit."""
        shares = [accuracy[part] if isinstance(part, str) else part.value(accuracy, count) for part in self.parts]
        sizes, whole = self._sizes(count)
        total = 0.0
        if self.percentages:
            for share, size in zip(shares, sizes, strict=True):
                total += share * (size / whole)
            return total
        for share, size in zip(shares, sizes, strict=True):
            total += share * size
        return total / whole

    def weights(self, count: Mapping[str, int]) -> dict[str, float]:
        """What each category's accuracy is multiplied by; the sum is 1."""
        sizes, whole = self._sizes(count)
        found: dict[str, float] = {}
        for part, size in zip(self.parts, sizes, strict=True):
            inner = {part: 1.0} if isinstance(part, str) else part.weights(count)
            for category, weight in inner.items():
                found[category] = found.get(category, 0.0) + weight * size / whole
        return found

    def _sizes(self, count: Mapping[str, int]) -> tuple[Sequence[int], int]:
        """What each part weighs, and their sum."""
        sizes = self.percentages or [_count(part, count) if self.by_count else 1 for part in self.parts]
        return sizes, sum(sizes)


def _categories(part: str | Average) -> Iterator[str]:
    yield from [part] if isinstance(part, str) else part.categories


def _count(part: str | Average, count: Mapping[str, int]) -> int:
    return sum(count[category] for category in _categories(part))


OVERALL = "Overall Acc"
NON_LIVE_CALLS = "Non-Live AST Acc"
_REST: Sequence[str] = ("multiple", "parallel", "parallel_multiple")
_MULTI_TURN = Average("Multi Turn Acc", MULTI_TURN)
_IRRELEVANCE = Average("Irrelevance Detection", ("irrelevance", "live_irrelevance"))

_SIMPLE_V3 = Average("Non-Live Simple AST", NON_LIVE_AST_V3[:3])
_NON_LIVE_V3 = Average("Non-Live Overall Acc", (_SIMPLE_V3, *_REST, "irrelevance"))
_LIVE_V3 = Average("Live Acc", (*LIVE_AST, "live_irrelevance", "live_relevance"), by_count=True)
AVERAGES_V3 = (
    Average(OVERALL, (_LIVE_V3, _NON_LIVE_V3, _MULTI_TURN)),
    _NON_LIVE_V3,
    Average(NON_LIVE_CALLS, (_SIMPLE_V3, *_REST)),
    _SIMPLE_V3,
    _LIVE_V3,
    Average("Live AST Summary", LIVE_AST, by_count=True),
    _MULTI_TURN,
    _IRRELEVANCE,
)
"""Every average that the leaderboard of version 3 shows. Its "Relevance Detection" is the category live_relevance."""

_SIMPLE_V4 = Average("Non-Live Simple AST", NON_LIVE_AST_V4[:3])
_NON_LIVE_V4 = Average(NON_LIVE_CALLS, (_SIMPLE_V4, *_REST))
_LIVE_V4 = Average("Live Acc", LIVE_AST, by_count=True)
_WEB_SEARCH = Average("Web Search Acc", WEB_SEARCH)
_MEMORY = Average("Memory Acc", MEMORY)
_AGENTIC = Average("Agentic Overall Acc", (_WEB_SEARCH, _MEMORY))
AVERAGES_V4 = (
    Average(OVERALL, (_NON_LIVE_V4, _LIVE_V4, _IRRELEVANCE, _MULTI_TURN, _AGENTIC), percentages=(10, 10, 10, 30, 40)),
    _NON_LIVE_V4,
    _SIMPLE_V4,
    _LIVE_V4,
    _MULTI_TURN,
    _AGENTIC,
    _WEB_SEARCH,
    _MEMORY,
    _IRRELEVANCE,
)
"""Every average that the leaderboard of version 4 shows, once; live_relevance is not part of "Overall Acc".

Its "Non-Live Overall Acc" is "Non-Live AST Acc" under another name, its "Live Overall Acc" is "Live Acc".
"""
