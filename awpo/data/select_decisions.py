"""What goes of the instances that were examined, and why; part by part, so that no more than one is in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from awpo.data import mixture
from awpo.data.select_work import SelectFiles
from awpo.data.settings import SelectConfig
from awpo.errors import UserError

REASONS = ("near-duplicate", "contaminated", "too long", "mixture")
LENGTH_BINS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Decisions:
    """Decides on the dialogues of parts; `known` is what their examination says of each, in order.

    `same` are the near-duplicates, by their number over all parts, in order.
    """

    def __init__(self, folder: Path, known: list[dict[str, Any]], config: SelectConfig, same: np.ndarray) -> None:
        self.folder, self.known, self.config, self.same = folder, known, config, same
        self.sources: dict[str, int] = {}
        for part in known:
            for source in part["sources"]:
                self.sources.setdefault(source, len(self.sources))

    def _dialogues(self) -> Iterator[tuple[SelectFiles, np.ndarray, np.ndarray, np.ndarray]]:
        """By part: its files, its dialogues with sources numbered over all parts, and of those which go, and why.

        The reason is its place in REASONS, or -1.
        """
        drop = self.config.decontamination is not None and self.config.decontamination.found == "drop"
        start = 0
        for number, known in enumerate(self.known):
            files = SelectFiles(self.folder, number)
            dialogues = np.load(files.dialogues)
            dialogues["source"] = np.array([self.sources[name] for name in known["sources"]])[dialogues["source"]]
            reasons = np.full(len(dialogues), -1, "i1")
            if drop:
                reasons[dialogues["overlaps"] & dialogues["train"]] = 1
            first, last = np.searchsorted(self.same, [start, start + len(dialogues)])
            reasons[self.same[first:last] - start] = 0
            cells = dialogues["source"].astype("i8") * len(mixture.STRATA) + dialogues["stratum"]
            cells[(reasons >= 0) | ~dialogues["train"]] = -1
            yield files, dialogues, reasons, cells
            start += len(dialogues)

    def write(self) -> dict[str, Any]:
        """Writes which rows of each part stay; returns the counts."""
        draw = self._draw() if self.config.mixture is not None else None
        most = self.config.lengths.most if self.config.lengths is not None else None
        table = np.zeros((len(self.sources), len(REASONS) + 2), "i8")  # read, by reason, left
        near = np.zeros(len(self.sources), "i8")
        lengths: dict[int, dict[str, Any]] = {}
        left = 0
        for files, dialogues, reasons, cells in self._dialogues():
            near += np.bincount(dialogues["source"][reasons == 0], minlength=len(near))
            if draw is not None:
                reasons[(cells >= 0) & ~draw.taken(cells, dialogues["rank"])] = 3
            places, sources = (np.repeat(values, dialogues["rows"]) for values in (reasons, dialogues["source"]))
            if self.config.lengths is not None:
                tokens = np.load(files.tokens)
                _add_lengths(lengths, sources, tokens, most)
                if most is not None:
                    places[(tokens > most) & ((places < 0) | (places == 3))] = 2
            keep = places < 0
            np.save(files.keep, keep)
            np.add.at(table[:, 0], sources, 1)
            np.add.at(table, (sources, np.where(keep, len(REASONS) + 1, places.astype("i8") + 1)), 1)
            if len(dialogues):
                left += int(np.logical_or.reduceat(keep, np.cumsum(dialogues["rows"]) - dialogues["rows"]).sum())
        if not table[:, -1].sum():
            raise UserError("nothing is left of the instances; ask for less")
        assert (table[:, 0] == table[:, 1:].sum(1)).all(), "an instance neither stays nor is left out for a reason"
        names = ("read", *REASONS, "left")
        by_source = sorted(self.sources.items())
        counts: dict[str, Any] = {
            "dialogues_read": sum(known["dialogues"] for known in self.known),
            "instances_read": int(table[:, 0].sum()),
            "dialogues": left,
            "instances": int(table[:, -1].sum()),
            "selection": {name: dict(zip(names, table[number].tolist(), strict=True)) for name, number in by_source},
        }
        if self.config.near_duplicates is not None:
            counts["near_duplicates"] = {name: int(near[number]) for name, number in by_source if near[number]}
        if self.config.lengths is not None:
            counts["lengths"] = {name: lengths[number] for name, number in by_source}
        if draw is not None:
            counts["mixture"] = self._taken
        return counts

    def _draw(self) -> mixture.Draw:
        assert self.config.mixture is not None
        draw = mixture.Draw()
        for _, dialogues, _, cells in self._dialogues():
            draw.count(cells, dialogues["rank"])
        names = [(source, stratum) for source in self.sources for stratum in mixture.STRATA]
        # In an order that does not hang on the input's, so that sums of weights are rounded alike.
        available = {name: count for name, count in sorted(zip(names, draw.available(), strict=False)) if count}
        take = mixture.numbers_to_take(available, self.config.mixture)
        draw.cut([take.get(name, 0) for name in names[: len(draw.available())]])
        for _, dialogues, _, cells in self._dialogues():
            draw.gather(cells, dialogues["rank"])
        self._taken = {f"{source} · {steps}": count for (source, steps), count in sorted(take.items())}
        return draw


def _add_lengths(table: dict[int, dict[str, Any]], sources: np.ndarray, tokens: np.ndarray, most: int | None) -> None:
    """Counts instances of so many tokens, by source."""
    for source in np.unique(sources).tolist():
        mine = tokens[sources == source]
        bins = [str(bound) for bound in LENGTH_BINS] + ["more"]
        row = table.setdefault(
            source, {"instances": 0, "tokens": 0, "longest": 0, "too_long": 0, "up_to": dict.fromkeys(bins, 0)}
        )
        row["instances"] += len(mine)
        row["tokens"] += int(mine.sum(dtype="i8"))
        row["longest"] = max(row["longest"], int(mine.max()))
        row["too_long"] += int((mine > most).sum()) if most is not None else 0
        for place, count in zip(*np.unique(np.searchsorted(LENGTH_BINS, mine), return_counts=True), strict=True):
            row["up_to"][bins[place]] += int(count)
