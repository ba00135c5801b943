"""Reference answers through the scoring path: what a perfect model would score, and what the path gets wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from awpo.events import Progress, silent
from evaluation.benchmarks import GoldVerdict
from evaluation.generate import Generated, Question, Sampling
from evaluation.items import Item


class ReferenceAnswers:
    """A generator that gives the n-th of its texts to the n-th question that it is asked, whatever the sampling."""

    identity: Mapping[str, Any] = {"model": "reference answers"}

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = iter(texts)

    def answer(
        self, questions: Sequence[Question], sampling: Sampling, *, progress: Progress = silent
    ) -> list[list[Generated]]:
        texts = [next(self._texts) for _ in questions]
        return [[Generated(text, 0)] * sampling.answers for text in texts]

    def room(self, question: Question) -> None:
        return None


def gold_verdicts(items: Iterable[Item]) -> Iterator[GoldVerdict]:
    """What the items of reference answers say of these."""
    for item in items:
        yield GoldVerdict(item.split, item.item_id, item.correct is True, item.detail)


def gold_report(benchmark: str, verdicts: Iterable[GoldVerdict]) -> dict[str, Any]:
    """{"benchmark", "items", "valid", "failed": [{"id", "reason"}], "splits": {split: {"items", "valid"}}}."""
    splits: dict[str, dict[str, int]] = {}
    failed: list[dict[str, str]] = []
    for verdict in verdicts:
        counts = splits.setdefault(verdict.split, {"items": 0, "valid": 0})
        counts["items"] += 1
        counts["valid"] += verdict.valid
        if not verdict.valid:
            failed.append({"id": verdict.id, "reason": verdict.reason})
    totals = {key: sum(counts[key] for counts in splits.values()) for key in ("items", "valid")}
    return {"benchmark": benchmark, **totals, "failed": failed, "splits": splits}
