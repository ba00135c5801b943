"""Near-duplicates by MinHash: signatures by `datasketch`, banded, and sorted on disk.

A dialogue's set are the n-grams of the words of what is said and called in it; tools and system messages, which many
dialogues share, are left out. Signatures that agree in a whole band are compared in full, and those that are similar
enough are joined. Of each group the dialogue of the smallest key stays: keys depend on the dialogue alone, so the
result does not depend on the order of the input.

On disk lie a signature (4 bytes a hash) and a record a band (16 bytes) for each dialogue, in files small enough to be
sorted one at a time; in memory 12 bytes a dialogue.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from datasketch import MinHash

from awpo.data.settings import NearDuplicatesConfig

_WORD = re.compile(r"\w+")
_RECORD = np.dtype([("hash", "u8"), ("index", "i8")])
BUCKET_RECORDS = 2**19  # 8 MiB of records are sorted at a time
BUFFER = 4096


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case and without punctuation."""
    return _WORD.findall(text.lower())


def bands_for(threshold: float, permutations: int) -> tuple[int, int]:
    """The bands and rows of a band at which the chance to be compared is a half nearest below the threshold.

    A pair of similarity s agrees in some of b bands of r rows with probability 1 - (1 - s^r)^b, a half at about
    (ln 2 / b)^(1 / r).
    """
    shapes = [(permutations // rows, rows) for rows in range(1, permutations + 1)]
    below = [shape for shape in shapes if (0.6931 / shape[0]) ** (1 / shape[1]) <= threshold * 0.95]
    return max(below, key=lambda shape: shape[1]) if below else shapes[0]


class NearDuplicates:
    """Takes dialogues in, one after another, and then says which are near-duplicates. `folder` holds what is on disk."""

    def __init__(self, config: NearDuplicatesConfig, folder: Path, most: int) -> None:
        """`most` is the largest number of dialogues that may come."""
        self.config, self.folder = config, folder
        self.bands, self.rows = bands_for(config.threshold, config.permutations)
        self._parts = max(1, -(-most // BUCKET_RECORDS))
        folder.mkdir(parents=True, exist_ok=True)
        self._signatures = open(folder / "signatures", "wb")  # noqa: SIM115 - closed by `duplicates`
        self._empty = MinHash(num_perm=config.permutations, seed=config.seed, hashfunc=zlib.crc32)
        self._buffer: list[np.ndarray] = []
        self._keys: list[np.ndarray] = []
        self._new_keys: list[int] = []
        self.count = 0

    def add(self, words: list[str], key: int) -> None:
        """Adds a dialogue by its words; `key` (63 bits) decides which of several stays."""
        size = self.config.words
        grams = {
            " ".join(words[at : at + size]).encode("utf-8", "surrogatepass")
            for at in range(max(1, len(words) - size + 1))
        }
        sketch = self._empty.copy()
        sketch.update_batch(sorted(grams))
        self._buffer.append(sketch.hashvalues.astype("<u4"))
        self._new_keys.append(key)
        self.count += 1
        if len(self._buffer) >= BUFFER:
            self._flush()

    def _flush(self) -> None:
        if not self._buffer:
            return
        block = np.stack(self._buffer)
        self._signatures.write(block.tobytes())
        first = self.count - len(block)
        for band in range(self.bands):
            part = np.ascontiguousarray(block[:, band * self.rows : (band + 1) * self.rows]).astype("u8")
            mixed = np.full(len(block), 1469598103934665603, "u8")
            for column in part.T:  # FNV-1a, value by value
                mixed = (mixed ^ column) * np.uint64(1099511628211)
            records = np.empty(len(block), _RECORD)
            records["hash"], records["index"] = mixed, np.arange(first, self.count)
            places = mixed % np.uint64(self._parts)
            for place in np.unique(places):
                with open(self.folder / f"band-{band}-{place}", "ab") as file:
                    file.write(records[places == place].tobytes())
        self._keys.append(np.array(self._new_keys, "i8"))
        self._buffer, self._new_keys = [], []

    def duplicates(self) -> np.ndarray:
        """For each dialogue, in the order in which they came, whether it is a near-duplicate of one that stays."""
        self._flush()
        self._signatures.close()
        if not self.count:
            return np.zeros(0, bool)
        keys = np.concatenate(self._keys)
        parent = np.arange(self.count, dtype="i4" if self.count < 2**31 else "i8")
        shape = (self.count, self.config.permutations)
        signatures = np.memmap(self.folder / "signatures", "<u4", "r", shape=shape)

        def root(index: int) -> int:
            while parent[index] != index:
                parent[index] = parent[parent[index]]
                index = int(parent[index])
            return index

        for path in sorted(self.folder.glob("band-*")):
            records = np.fromfile(path, _RECORD)
            order = np.lexsort((keys[records["index"]], records["hash"]))
            hashes, indices = records["hash"][order], records["index"][order]
            starts = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]])
            ends = np.r_[starts[1:], len(hashes)]
            for start, end in zip(starts[ends - starts > 1], ends[ends - starts > 1], strict=True):
                # With the first of its bucket, and with the one before: by key, so whatever the order of input.
                for place in range(start + 1, end):
                    for other in {start, place - 1}:
                        one, two = int(indices[other]), int(indices[place])
                        first, second = root(one), root(two)
                        if first == second:
                            continue
                        if (signatures[one] == signatures[two]).mean() >= self.config.threshold:
                            low, high = sorted((first, second), key=lambda index: keys[index])
                            parent[high] = low
        return np.array([root(index) != index for index in range(self.count)], bool)


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
