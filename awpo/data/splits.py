"""Which split a dialogue belongs to: the source's own, else by a hash of the dialogue's id.

By hash, so that the same dialogue is in the same split in every run, on every machine and whatever else the source
holds. Splits are by dialogue: two steps of one dialogue share most of their text.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from awpo.types import Dialogue, Split

VALIDATION_SHARE = 0.05
TEST_SHARE = 0.05
# Past this many dialogues a split left empty by chance (0.95^1000, about 5e-23) is not worth looking for.
SMALL_SOURCE = 1000


def _fraction(dialogue_id: str) -> float:
    """A number in [0, 1) that depends on the id alone."""
    digest = hashlib.sha256(f"split\0{dialogue_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_of(dialogue_id: str) -> Split:
    """The split by hash: 5% test, 5% validation, the rest train."""
    fraction = _fraction(dialogue_id)
    if fraction < TEST_SHARE:
        return "test"
    return "validation" if fraction < TEST_SHARE + VALIDATION_SHARE else "train"


def _splits_of_small_source(dialogues: list[Dialogue]) -> dict[str, Split]:
    """Splits by id for the dialogues without one of their own; each of the three gets at least one if there are 3.

    An empty split takes the id with the smallest hash of the largest split, so the choice, too, depends on the
    ids alone.
    """
    own = {dialogue.split for dialogue in dialogues if dialogue.split is not None}
    splits = {dialogue.id: split_of(dialogue.id) for dialogue in dialogues if dialogue.split is None}
    if len(splits) < 3:
        return splits
    wanted: tuple[Split, ...] = ("train", "validation", "test")
    for split in wanted:
        members = list(splits.values())
        if split not in own and split not in members:
            largest = max(wanted, key=members.count)
            splits[min((name for name in splits if splits[name] == largest), key=_fraction)] = split
    return splits


def assign_splits(dialogues: Iterable[Dialogue]) -> Iterator[Dialogue]:
    """Gives each dialogue without a split of its own one, in order; at most SMALL_SOURCE are held in memory."""
    iterator = iter(dialogues)
    first = list(itertools.islice(iterator, SMALL_SOURCE))
    splits = _splits_of_small_source(first) if len(first) < SMALL_SOURCE else {}
    for dialogue in itertools.chain(first, iterator):
        if dialogue.split is not None:
            yield dialogue
        else:
            yield replace(dialogue, split=splits.get(dialogue.id) or split_of(dialogue.id))
