"""What a run over a source counts, so that no row is lost without a word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from awpo.data.masking import kinds_of


def _counter() -> Counter[str]:
    return Counter()


@dataclass
class Tally:
    """Counts of one run over a source, or of a part of it; the sums are checked when it ends."""

    rows: int = 0
    dialogues: int = 0
    instances: int = 0
    invalid: dict[str, Counter[str]] = field(default_factory=dict)
    masked: Counter[str] = field(default_factory=_counter)
    rejected: Counter[str] = field(default_factory=_counter)
    split: Counter[str] = field(default_factory=_counter)
    kind: Counter[str] = field(default_factory=_counter)
    source: Counter[str] = field(default_factory=_counter)

    def add(self, rows: Iterable[dict[str, Any]], masked: bool) -> None:
        """Counts a dialogue by the rows of its instances; `masked` where masks were asked for."""
        self.dialogues += 1
        source = ""
        for row in rows:
            self.instances += 1
            self.split[row["split"]] += 1
            self.kind[row["kind"]] += 1
            self.source[row["source"]] += 1
            source = row["source"]
        if masked:
            self.masked.update(kinds_of(source))

    def add_invalid(self, source: str, reason: str) -> None:
        """Counts a call that does not fit its schema."""
        self.invalid.setdefault(source, Counter())[reason] += 1

    def merge(self, other: Tally) -> None:
        """Adds the counts of a further part."""
        self.rows += other.rows
        self.dialogues += other.dialogues
        self.instances += other.instances
        for name in ("masked", "rejected", "split", "kind", "source"):
            getattr(self, name).update(getattr(other, name))
        for source, reasons in other.invalid.items():
            self.invalid.setdefault(source, Counter()).update(reasons)

    def plain(self) -> dict[str, Any]:
        """As JSON that `from_plain` reads back."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @staticmethod
    def from_plain(value: dict[str, Any]) -> Tally:
        tally = Tally(value["rows"], value["dialogues"], value["instances"])
        for name in ("masked", "rejected", "split", "kind", "source"):
            setattr(tally, name, Counter(value[name]))
        tally.invalid = {source: Counter(reasons) for source, reasons in value["invalid"].items()}
        return tally

    def to_json(self) -> dict[str, Any]:
        """As it stands in a manifest."""
        assert self.rows == self.dialogues + self.rejected.total(), "a row was neither read nor rejected"
        return {
            "rows_read": self.rows,
            "dialogues": self.dialogues,
            "instances": self.instances,
            "rejected": dict(self.rejected.most_common()),
            "invalid_calls": {source: dict(reasons.most_common()) for source, reasons in sorted(self.invalid.items())},
            "dialogues_masked": dict(sorted(self.masked.items())),
            "instances_by_split": dict(sorted(self.split.items())),
            "instances_by_kind": dict(sorted(self.kind.items())),
            "instances_by_source": dict(sorted(self.source.items())),
        }
