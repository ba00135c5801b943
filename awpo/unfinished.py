"""What is written down of work that has begun and has not ended: which work it is, and how long its attempts took."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

LATEST = 1e12
"""Seconds since 1970, in more than 30,000 years: what is later is no time."""


class Work(Protocol):
    """What tells one piece of work from another; a `Manifest` does."""

    fingerprint: str
    inputs: dict[str, Any]
    config: dict[str, Any]


@dataclass
class Mark:
    """What `.in_progress` holds: the work, when the attempt under way began, and the seconds of those that ended."""

    fingerprint: str
    inputs: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    began: float | None = None
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Mark | None:
        """None where there is none. Of an earlier version's mark only the fingerprint is known, and when it began.

        One that was damaged is the mark of other work.
        """
        if not path.exists():
            return None
        text = path.read_bytes().decode("utf-8", "replace")
        try:
            mark = cls(**json.loads(text))
            mark._check()
            return mark
        except (ValueError, TypeError, RecursionError):
            return cls(text.strip(), began=path.stat().st_mtime)

    def _check(self) -> None:
        """Raises TypeError where a field is not of its type, as in a file that was damaged."""
        numbers = [*self.seconds, *([] if self.began is None else [self.began])]
        if not all(isinstance(number, int | float) and abs(number) < LATEST for number in numbers):
            raise TypeError("no times")
        if not isinstance(self.fingerprint, str) or not all(
            isinstance(part, dict) for part in (self.inputs, self.config)
        ):
            raise TypeError("not a mark")

    def text(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, default=str) + "\n"

    def attempts(self, written: Iterable[Path]) -> list[float]:
        """The seconds of each attempt; of one that was killed, up to the last of the files `written` in its course."""
        if self.began is None:
            return self.seconds
        last = max((path.stat().st_mtime for path in written), default=0.0)
        return [*self.seconds, round(max(0.0, last - self.began), 3)]

    def goes_on_as(self, work: Work, growing: Sequence[str]) -> bool:
        """Whether this work is that of `work`, or differs only in that numbers of the keys `growing` were less."""
        if self.fingerprint == work.fingerprint:
            return True
        old, new = self.config, work.config
        grown = {key: new[key] for key in growing if key in old and key in new and old[key] < new[key]}
        return bool(grown) and self.inputs == work.inputs and {**old, **grown} == new


def differences(old: Work, new: Work) -> str:
    """How the work `new` differs from `old`, in a line; empty where that is not known."""
    if not old.config:
        return ""
    inputs = [f"{key} is another" for key, value in new.inputs.items() if old.inputs.get(key) != value]
    config = [
        f"{key} was {old.config.get(key)} and is {value}"
        for key, value in new.config.items()
        if old.config.get(key) != value
    ]
    return ", ".join([*inputs, *config])
