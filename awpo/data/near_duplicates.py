"""Near-duplicates by MinHash: signatures by `datasketch`, banded, and sorted on disk.

A dialogue's set are the n-grams of the words of what is said and called in it; tools and system messages, which many
dialogues share, are left out. Dialogues whose signatures agree in a whole band are compared in full: each with the
one of its bucket that has the smallest key, and with the one before it by key. Those that are similar enough are
joined, and of each group the dialogue of the smallest key stays. Keys depend on the dialogue alone, so the result does
not depend on the order of the input.

Three steps, each on files that the one before has left, so that any can be done by several processes and again after a
kill: a part's signatures and, for each band, its records sorted by hash (`write_part`); the pairs of one bucket, which
holds the records of all parts in a range of hashes (`similar_pairs`); groups of pairs (`duplicates_of`). On disk lie a
signature (4 bytes a hash) and a record a band (24 bytes) for each dialogue. In memory lie the records of a part or a
bucket, and 16 bytes for each pair of near-duplicates: nothing that grows with the dialogues that have none. (A hash
that more than BUCKET_RECORDS dialogues share does make a larger bucket.)
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from datasketch import MinHash
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from awpo.data.settings import NearDuplicatesConfig

_WORD = re.compile(r"\w+")
_RECORD = np.dtype([("hash", "u8"), ("key", "u8"), ("index", "i8")])
BUCKET_RECORDS = 2**18  # 6 MiB of records are sorted at a time
PAIRS_AT_ONCE = 4096


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case and without punctuation."""
    return _WORD.findall(text.lower())


def said_in(messages: list[dict[str, Any]]) -> list[str]:
    """The words of messages in stored form: contents, and the names and values of calls; no system messages."""
    found: list[str] = []
    for message in messages:
        if message["role"] == "system":
            continue
        found += words_of(message.get("content") or "")
        for call in message.get("tool_calls") or ():
            found += words_of(f"{call['function']['name']} {call['function']['arguments']}")
    return found


def bands_for(threshold: float, permutations: int) -> tuple[int, int]:
    """The bands and rows of a band at which the chance to be compared is a half nearest below the threshold.

    A pair of similarity s agrees in some of b bands of r rows with probability 1 - (1 - s^r)^b, a half at about
    (ln 2 / b)^(1 / r).
    """
    shapes = [(permutations // rows, rows) for rows in range(1, permutations + 1)]
    below = [shape for shape in shapes if (0.6931 / shape[0]) ** (1 / shape[1]) <= threshold * 0.95]
    return max(below, key=lambda shape: shape[1]) if below else shapes[0]


class Sketches:
    """Signatures of dialogues, one after another."""

    def __init__(self, config: NearDuplicatesConfig) -> None:
        self.config = config
        self._empty = MinHash(num_perm=config.permutations, seed=config.seed, hashfunc=zlib.crc32)

    def of(self, words: list[str]) -> np.ndarray:
        """The signature of a dialogue of these words: `permutations` hashes of 32 bits."""
        size = self.config.words
        grams = {
            " ".join(words[at : at + size]).encode("utf-8", "surrogatepass")
            for at in range(max(1, len(words) - size + 1))
        }
        sketch = self._empty.copy()
        sketch.update_batch(grams)
        return sketch.hashvalues.astype("<u4")


# The three steps


def _signatures(folder: Path, part: int) -> Path:
    return folder / f"{part:05d}.signatures.npy"


def _keys(folder: Path, part: int) -> Path:
    return folder / f"{part:05d}.keys.npy"


def _bands(folder: Path, part: int) -> Path:
    return folder / f"{part:05d}.bands.npy"


def write_part(
    folder: Path, part: int, signatures: Sequence[np.ndarray], keys: Sequence[int], config: NearDuplicatesConfig
) -> None:
    """Writes what the search needs of one part; keys have 64 bits at most. Indices are those within the part."""
    bands, rows = bands_for(config.threshold, config.permutations)
    block = np.stack(signatures) if signatures else np.empty((0, config.permutations), "<u4")
    records = np.empty((bands, len(block)), _RECORD)
    records["key"], records["index"] = np.array(keys, "u8"), np.arange(len(block))
    for band in range(bands):
        mixed = np.full(len(block), 1469598103934665603, "u8")
        for column in block[:, band * rows : (band + 1) * rows].T:  # FNV-1a, value by value
            mixed = (mixed ^ column) * np.uint64(1099511628211)
        # The hash's last step leaves the high bits, by which buckets are told apart, too even.
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        records["hash"][band] = mixed
        records[band] = records[band][np.argsort(mixed, kind="stable")]
    np.save(_signatures(folder, part), block)
    np.save(_keys(folder, part), np.array(keys, "u8"))
    np.save(_bands(folder, part), records)


def buckets_of(sizes: Sequence[int], config: NearDuplicatesConfig) -> list[tuple[int, int, int]]:
    """The buckets of parts of so many dialogues: (band, number of a range of hashes, number of ranges)."""
    ranges = max(1, -(-sum(sizes) // BUCKET_RECORDS))
    bands, _ = bands_for(config.threshold, config.permutations)
    return [(band, place, ranges) for band in range(bands) for place in range(ranges)]


def similar_pairs(
    folder: Path, sizes: Sequence[int], bucket: tuple[int, int, int], config: NearDuplicatesConfig
) -> np.ndarray:
    """The pairs of similar dialogues of a bucket, of shape (pairs, 2): indices over all parts, the smaller one first."""
    starts = np.cumsum([0, *sizes])
    hashes, keys, indices = _bucket(folder, starts, bucket)
    order = np.lexsort((indices, keys, hashes))
    hashes, indices = hashes[order], indices[order]
    same = np.flatnonzero(hashes[1:] == hashes[:-1]) + 1  # records that have one of their bucket before them
    new = np.r_[True, hashes[1:] != hashes[:-1]] if len(hashes) else np.zeros(0, bool)
    first = np.maximum.accumulate(np.where(new, np.arange(len(hashes)), 0))[same] if len(same) else same
    pairs = unique_pairs(
        np.concatenate([np.stack([indices[same - 1], indices[same]], 1), np.stack([indices[first], indices[same]], 1)])
    )
    found = []
    for at in range(0, len(pairs), PAIRS_AT_ONCE):
        block = pairs[at : at + PAIRS_AT_ONCE]
        wanted, places = np.unique(block, return_inverse=True)
        signatures, places = _read(folder, starts, wanted, config.permutations), places.reshape(block.shape)
        agreement = (signatures[places[:, 0]] == signatures[places[:, 1]]).mean(1)
        found.append(block[agreement >= config.threshold])
    return np.concatenate(found) if found else np.empty((0, 2), "i8")


def _bucket(folder: Path, starts: np.ndarray, bucket: tuple[int, int, int]) -> tuple[np.ndarray, ...]:
    band, place, ranges = bucket
    low, high = place * 2**64 // ranges, (place + 1) * 2**64 // ranges - 1
    found = []
    for part, start in enumerate(starts[:-1]):
        records = np.load(_bands(folder, part), mmap_mode="r")[band]
        first = np.searchsorted(records["hash"], np.uint64(low), "left")
        last = np.searchsorted(records["hash"], np.uint64(high), "right")
        inside = np.array(records[first:last])
        inside["index"] += start
        found.append(inside)
    records = np.concatenate(found) if found else np.empty(0, _RECORD)
    return records["hash"], records["key"], records["index"]


def _read(folder: Path, starts: np.ndarray, wanted: np.ndarray, permutations: int) -> np.ndarray:
    """The signatures of some dialogues, given in order."""
    found = np.empty((len(wanted), permutations), "<u4")
    for part, inside in _by_part(starts, wanted):
        found[inside] = np.load(_signatures(folder, part), mmap_mode="r")[wanted[inside] - starts[part]]
    return found


def _by_part(starts: np.ndarray, wanted: np.ndarray) -> Iterator[tuple[int, slice]]:
    """The parts that hold some dialogues, given in order, and which of them each holds."""
    cuts = np.searchsorted(wanted, starts)
    for part, (first, last) in enumerate(pairwise(cuts)):
        if first < last:
            yield part, slice(first, last)


def unique_pairs(pairs: np.ndarray) -> np.ndarray:
    """Pairs of shape (pairs, 2), each once with the smaller one first, in order."""
    pairs = np.sort(pairs, 1)
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    new = np.ones(len(pairs), bool)
    new[1:] = (pairs[1:] != pairs[:-1]).any(1)
    return pairs[new]


def duplicates_of(folder: Path, sizes: Sequence[int], found: Iterable[np.ndarray]) -> np.ndarray:
    """The indices, in order, of the dialogues that are near-duplicates of one that stays; `found` are similar pairs."""
    starts = np.cumsum([0, *sizes])
    pairs = np.empty((0, 2), "i8")
    for more in found:
        if len(more):
            pairs = unique_pairs(np.concatenate([pairs, more]))
    members, places = np.unique(pairs, return_inverse=True)
    if not len(members):
        return members
    places = places.reshape(pairs.shape)
    graph = coo_array((np.ones(len(places), bool), (places[:, 0], places[:, 1])), shape=(len(members),) * 2)
    _, groups = connected_components(graph, directed=False)
    keys = np.empty(len(members), "u8")
    for part, inside in _by_part(starts, members):
        keys[inside] = np.load(_keys(folder, part), mmap_mode="r")[members[inside] - starts[part]]
    order = np.lexsort((members, keys, groups))
    stays = np.ones(len(order), bool)
    stays[1:] = groups[order][1:] != groups[order][:-1]
    return np.sort(members[order][~stays])
