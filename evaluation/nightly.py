"""Whether a candidate is worse than the champion: the decision of a night, as a pure function of both runs' items.

The greedy answers decide, paired by item. A regression is a 95% interval of the difference (candidate less champion) that
lies wholly below minus the margin. It is looked for twice, because a drop of all items and a drop of one kind of them
are different accidents and each test is blind to the other:

- over all items pooled, at the full 95%;
- in each part (a benchmark's split) by itself, at a confidence that shares the same error among the parts (Bonferroni).

Where the true difference is at minus the margin either errs in 2.5% of nights, so that both together raise a false alarm
in 5%; where nothing changed, in hardly any. What that costs and finds is simulated in tests/evaluation/test_nightly.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from awpo.errors import UserError
from evaluation.compare import EvaluationRun, pair_items, splits_of
from evaluation.statistics import CONFIDENCE, mcnemar, paired_difference

MARGIN = 0.05
"""The default margin. With 800 items, a fifth of which the two answer differently, a drop of 0.1 is found in more than
80% of nights; with fewer, `Night.detectable` says what is."""

RESAMPLES = 4000  # the tails of the parts' intervals are thin
_CONFIDENCE_Z, _POWER_Z = 1.959963984540054, 0.8416212335729143  # the two-sided 95% and the one-sided 80% quantile
ALL = "all"


@dataclass(frozen=True, slots=True)
class Part:
    """The verdicts of both on the items of one part, all (items,), each 0 or 1."""

    name: str
    champion: tuple[float, ...]
    candidate: tuple[float, ...]
    dialogues: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Candidate against champion on some items: accuracies, their difference with its interval, McNemar's p.

    `confidence` is the interval's; `regressed` whether it lies below minus the margin.
    """

    part: str
    items: int
    dialogues: int
    champion: float
    candidate: float
    difference: float
    low: float
    high: float
    confidence: float
    p: float
    regressed: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Night:
    """What a night found: the verdict on all items, those on each part, and the drop that it would find.

    `detectable` is the true drop of all items that a night like this one finds in 80% of cases. `missing` items had no
    verdict in one of the runs and were left out.
    """

    margin: float
    whole: Verdict
    parts: tuple[Verdict, ...]
    detectable: float
    missing: int = 0

    @property
    def regressed(self) -> list[Verdict]:
        """What regressed: none, all items together, single parts, or both."""
        return [verdict for verdict in (self.whole, *self.parts) if verdict.regressed]


def decide(parts: Sequence[Part], *, margin: float = MARGIN, seed: int = 0, missing: int = 0) -> Night:
    """The decision over the parts of one night. With a single part the pooled test is all there is.

    Raises ValueError without an item, or for a margin that is not positive.
    """
    filled = [part for part in parts if part.dialogues]
    if not filled or margin <= 0:
        raise ValueError(f"a night needs items to compare and a positive margin, not {len(filled)} parts and {margin}")
    pooled = Part(
        ALL,
        tuple(value for part in filled for value in part.champion),
        tuple(value for part in filled for value in part.candidate),
        # The same dialogue in two parts (an item judged by two protocols) stays one dialogue.
        tuple(label for part in filled for label in part.dialogues),
    )
    whole = _verdict(pooled, CONFIDENCE, margin, seed)
    share = 1 - (1 - CONFIDENCE) / len(filled)
    single = tuple(_verdict(part, share, margin, seed) for part in filled) if len(filled) > 1 else ()
    error = (whole.high - whole.low) / 2 / _CONFIDENCE_Z
    return Night(margin, whole, single, margin + (_CONFIDENCE_Z + _POWER_Z) * error, missing)


def _verdict(part: Part, confidence: float, margin: float, seed: int) -> Verdict:
    found = paired_difference(
        part.champion, part.candidate, part.dialogues, confidence=confidence, resamples=RESAMPLES, seed=seed
    )
    return Verdict(
        part=part.name,
        items=found.items,
        dialogues=found.clusters,
        champion=math.fsum(part.champion) / found.items,
        candidate=math.fsum(part.candidate) / found.items,
        difference=found.value,
        low=found.low,
        high=found.high,
        confidence=confidence,
        p=mcnemar(part.champion, part.candidate, part.dialogues),
        regressed=found.high < -margin,
    )


def compare_runs(champion: EvaluationRun, candidate: EvaluationRun, *, margin: float = MARGIN, seed: int = 0) -> Night:
    """The decision from two evaluations of the same items; UserError where they are not, or nothing was judged."""
    parts, missing = [], 0
    for benchmark, split in splits_of("greedy", champion, candidate):
        pairs = pair_items(champion, candidate, benchmark, split, "greedy")
        parts.append(Part(f"{benchmark}/{split}", pairs.first, pairs.second, pairs.dialogues))
        missing += pairs.missing
    if not any(part.dialogues for part in parts):
        raise UserError(
            f"no greedy answer has a verdict in both {champion.folder} and {candidate.folder}; "
            "see their logs for failed requests, and evaluate again"
        )
    return decide(parts, margin=margin, seed=seed, missing=missing)
