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


def choose(cells: np.ndarray, ranks: np.ndarray, take: Sequence[int]) -> np.ndarray:
    """Which dialogues are taken: of each cell (by number in `cells`) the `take[cell]` of lowest rank; -1 is none's."""
    chosen = cells < 0
    for cell, count in enumerate(take):
        members = np.flatnonzero(cells == cell)
        chosen[members[np.argsort(ranks[members], kind="stable")[:count]]] = True
    return chosen
