"""What a worker prints, in the log of its run while it goes: few enough lines that a server bears them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

LINES, SECONDS = 20, 10.0
"""At most so many lines in so many seconds; how many more there were is said."""
LONGEST = 500  # characters
# tqdm's bars: "Loading:  45%|####5     | 9/20 [00:01<00:01,  8.11it/s]", "3it [00:02,  1.2s/it]"
_BAR = re.compile(r"\d+%\|.*\||\[\d+:\d\d(:\d\d)?<.*\]|\[\d+:\d\d(:\d\d)?, .*(it/s|s/it)")


class LogStream:
    """Hands lines on to `tell`, at most `LINES` in `SECONDS`; progress bars and empty lines are left out."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.tell, self.clock = tell, clock
        self._began, self._told, self._over = clock(), 0, 0

    def take(self, lines: Sequence[str]) -> None:
        """Hands new lines on."""
        if self.clock() - self._began >= SECONDS:
            self.close()
            self._began, self._told = self.clock(), 0
        for line in lines:
            text = line.rstrip()
            if not text or _BAR.search(text):
                continue
            if self._told < LINES:
                self.tell(text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text)} characters)")
                self._told += 1
            else:
                self._over += 1

    def close(self) -> None:
        """Says how many lines were too many, if any."""
        if self._over:
            self.tell(f"... and {self._over} lines more in the log file")
        self._over = 0
