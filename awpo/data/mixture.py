"""A mixture of dialogues with given shares of sources and of difficulty, by the number of steps.

A cell is a source and a range of steps. Cells get shares by the weights, and as many dialogues as the scarcest cell
allows are taken, each at most once. Which ones is decided by a hash of seed and dialogue, not by their place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from awpo.data.settings import MixtureConfig
from awpo.errors import UserError

Cell = tuple[str, str]
STRATA = ("1", "2-3", "4+")
BIN_BITS = 12
BINS = 2**BIN_BITS


def stratum(steps: int) -> str:
    """The range of steps that a dialogue's number of them is in."""
    return "1" if steps == 1 else "2-3" if steps <= 3 else "4+"


def rank(seed: int, name: str) -> int:
    """64 bits that order the dialogues of a cell."""
    return int.from_bytes(
        hashlib.sha256(f"mixture\0{seed}\0{name}".encode("utf-8", "surrogatepass")).digest()[:8], "big"
    )


def numbers_to_take(available: Mapping[Cell, int], config: MixtureConfig) -> dict[Cell, int]:
    """How many dialogues of each cell are taken. Raises UserError where a source has no weight or nothing is left."""
    sources: dict[str, int] = {}
    for (source, _), count in available.items():
        sources[source] = sources.get(source, 0) + count
    if config.sources and (unnamed := sorted(set(sources) - set(config.sources))):
        raise UserError(f"mixture.sources names no weight of {', '.join(unnamed)}; 0 leaves a source out")
    weights: dict[Cell, float] = {}
    for source, total in sources.items():
        inside = {
            cell: (config.steps.get(cell[1], 0.0) if config.steps else count / total)  # type: ignore[call-overload]
            for cell, count in available.items()
            if cell[0] == source
        }
        whole = sum(inside.values())
        weight = config.sources.get(source, 0.0) if config.sources else total
        for cell, part in inside.items():
            weights[cell] = weight * part / whole if whole else 0.0
    wanted = {cell: weight for cell, weight in weights.items() if weight > 0}
    if not wanted:
        raise UserError("the mixture leaves nothing: give a weight above 0 to a source and to steps that there are")
    size = min(available[cell] / weight for cell, weight in wanted.items())
    if config.dialogues is not None:
        size = min(size, config.dialogues / sum(wanted.values()))
    return {cell: int(size * wanted[cell] + 1e-9) if cell in wanted else 0 for cell in available}


class Draw:
    """Takes of each cell the dialogues of lowest rank, reading them three times but never all at once.

    First all are counted (`count`), then, once it is known how many are taken (`cut`), the ranks near the cut are
    gathered (`gather`); after that `taken` says of any which are. Cells are numbers from 0, -1 is none's and is left
    out; ranks have 64 bits. Memory: BINS counters a cell, and about one in BINS of the ranks.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((0, BINS), "i8")

    def count(self, cells: np.ndarray, ranks: np.ndarray) -> None:
        """Counts dialogues."""
        inside = cells >= 0
        more = int(cells.max(initial=-1)) + 1 - len(self._counts)
        if more > 0:
            self._counts = np.concatenate([self._counts, np.zeros((more, BINS), "i8")])
        np.add.at(self._counts, (cells[inside], _bin(ranks[inside])), 1)

    def available(self) -> list[int]:
        """The dialogues of each cell."""
        return [int(count) for count in self._counts.sum(1)]

    def cut(self, take: Sequence[int]) -> None:
        """Says how many of each cell are taken."""
        wanted = np.array(take, "i8")[:, None]
        before = np.cumsum(self._counts, 1) - self._counts
        # The bin in which the last one taken lies: all of earlier bins are taken, none of later ones.
        self._bin = np.maximum((before < wanted).sum(1) - 1, 0)
        self._rest = wanted[:, 0] - np.take_along_axis(before, self._bin[:, None], 1)[:, 0]
        self._near: list[list[np.ndarray]] = [[] for _ in take]
        self._last: list[tuple[int, int]] | None = None

    def gather(self, cells: np.ndarray, ranks: np.ndarray) -> None:
        """Notes the ranks on which the choice hangs."""
        for cell, near in enumerate(self._near):
            near.append(ranks[(cells == cell) & (_bin(ranks) == self._bin[cell])])

    def taken(self, cells: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Which of the dialogues are taken; of those of equal rank, the first that are asked for."""
        if self._last is None:
            self._last = []
            for near, rest in zip(self._near, self._rest.tolist(), strict=True):
                ordered = np.sort(np.concatenate([*near, np.zeros(0, "u8")]))[:rest]
                last = ordered[-1] if len(ordered) else np.uint64(0)
                self._last.append((int(last), int((ordered == last).sum())))
        chosen = np.zeros(len(cells), bool)
        for cell, (last, ties) in enumerate(self._last):
            mine = cells == cell
            chosen |= mine & ((_bin(ranks) < self._bin[cell]) | ((_bin(ranks) == self._bin[cell]) & (ranks < last)))
            tied = np.flatnonzero(mine & (ranks == last))[:ties]
            chosen[tied] = True
            self._last[cell] = (last, ties - len(tied))
        return chosen


def _bin(ranks: np.ndarray) -> np.ndarray:
    return (ranks >> np.uint64(64 - BIN_BITS)).astype("i8")
