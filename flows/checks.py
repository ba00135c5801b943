"""One thing that `awpo doctor` looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """`mend`: work fails without; `note`: something is not there that may not be needed. `how`: what to do about it."""

    name: str
    state: Literal["ok", "note", "mend"]
    found: str
    how: str = ""
