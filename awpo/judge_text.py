"""What the offline rubric measures in a thought: pure functions on short texts, all linear in their length."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from awpo.types import ToolCall

WORD = re.compile(r"\w+(?:[.:/@-]\w+)*")
"""A word, or a value that would be torn apart at its marks: 7:30, 2026-05-01, get_weather, a.b@c.org."""
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")
_STOP_WORDS = frozenset(
    WORD.findall("a an and are as at be by do for from i in is it its of on or so that the then this to was will with")
)
_I_WILL = (
    r"\b(?:i|i'll|i'd|i'm|let me)(?: (?:will|should|must|can|have to|need to|am going to|going to))?"
    r"(?: (?:now|just|simply|then))? "
)
"""How a thought announces what it is about to do."""

NO_CALL = re.compile(
    _I_WILL + r"(?:ask|answer|reply|respond|say|tell|explain|inform|clarify|decline|report|summari[sz]e|thank|greet)\b"
    r"|\b(?:no|none of the|without a|without any) (?:\w+ )?(?:tool|function|call)s?\b(?: fits?\b)?"
)
"""A thought that decides to reply: to ask, to answer, to say that no tool fits."""
DO_CALL = re.compile(_I_WILL + r"(?:call|use|invoke|run)\b|\bfits?\b|\bcalls? (?:of|to)\b")
"""A thought that decides to call a tool; what NO_CALL matches is to be taken out first ("no tool fits")."""


def normalise(text: str) -> str:
    """Case and apostrophes made alike."""
    return text.casefold().replace("’", "'")


def words_present(text: str) -> set[str]:
    """The words of a normalised text; of "10,000" both 10, 000 (it may be a list) and 10000."""
    words = set(WORD.findall(text))
    merged, found = _THOUSANDS.subn("", text)
    return words.union(WORD.findall(merged)) if found else words


@lru_cache(maxsize=4096)  # the rollouts of a group, and the steps of a dialogue, share their tools
def _name_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, set(names)), key=lambda name: (-len(name), name))
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")


def without_names(text: str, names: set[str]) -> str:
    """The text with the names taken out."""
    return _name_pattern(tuple(sorted(names))).sub(" ", text) if names else text


def names_in(text: str, names: tuple[str, ...]) -> set[str]:
    """Which of the names occur in the text as whole words; of names that overlap, the longest."""
    return set(_name_pattern(names).findall(text)) - {""}


def informedness(named: set[str], right: set[str], others: set[str]) -> float:
    """Share of the right names that are named, minus the share of the others that are; at least 0 (Youden's J)."""
    wrong = others - right
    recall = len(named & right) / len(right) if right else 1.0
    return max(0.0, recall - (len(named & wrong) / len(wrong) if wrong else 0.0))


def values_mentioned(calls: Sequence[ToolCall], present: set[str]) -> float | None:
    """Mean over the calls' argument values of the share of their words that are present; None without values.

    Booleans and nulls are left out: a thought need not spell them.
    """
    shares: list[float] = []
    pending: list[Any] = [call.arguments for call in calls]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        elif value is not None and not isinstance(value, bool):
            whole = isinstance(value, float) and value.is_integer()
            words = WORD.findall(normalise(str(int(value) if whole else value)))
            if words:
                shares.append(sum(word in present for word in words) / len(words))
    return sum(shares) / len(shares) if shares else None


def overlap_f1(words: list[str], reference: list[str]) -> float:
    """F1 of two bags of content words: 2 |a and b| / (|a| + |b|), counts included."""
    a = Counter(word for word in words if word not in _STOP_WORDS)
    b = Counter(word for word in reference if word not in _STOP_WORDS)
    total = a.total() + b.total()
    return 2 * (a & b).total() / total if total else 1.0


def variety(words: list[str]) -> float:
    """The share of different ones among the text's word triples, in (0, 1]; 1 for a text shorter than one."""
    triples = list(zip(*(words[start:] for start in range(3)), strict=False))
    return len(set(triples)) / len(triples) if triples else 1.0
