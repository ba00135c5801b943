"""JSON read and written without loss: what Python's reader would mend or drop in silence is an error here.

Refused: a key given twice (Python keeps the last), NaN and Infinity (not JSON), a number too large for a float
(Python makes it infinite), a lone surrogate (not UTF-8, so no file can hold it), and nesting past the
interpreter's limit. Kept exactly: the order of keys, integers (up to Python's limit of 4,300 digits), floats
(shortest form that reads back equal), text of any language.
"""

from __future__ import annotations

import json
import math
import re
import threading
from typing import Any

_own = threading.local()  # a decoder notes faults: each thread has its own, as making one takes longer than most texts
_SPACED = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_MARKS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{}]', re.DOTALL)  # whole strings, and what opens or closes
_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class StrictDecoder:
    """A JSON decoder that goes on to the end of a value and tells afterwards what was wrong with it.

    Going on matters where values follow one another in a stream: a faulty one can be listed and the next one read.
    """

    def __init__(self) -> None:
        self._faults: list[str] = []
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._object, parse_constant=self._constant, parse_float=self._float
        )

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            self._faults.append(f"the key {twice[:200]!r} is given twice in one object")
        return value

    def _integer(self, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            self._faults.append(f"the integer {text[:40]}... has too many digits: {len(text)}")
            return 0

    def _constant(self, name: str) -> None:
        self._faults.append(f"{name} is not JSON")

    def _float(self, text: str) -> float:
        value = float(text)
        if math.isinf(value):
            self._faults.append(f"the number {text[:40]} is too large")
        return value

    def raw_decode(self, text: str, start: int = 0) -> tuple[Any, int, str | None]:
        """The value that begins at `start`, the index after it, and what is wrong with it (None: nothing).

        Raises ValueError where there is no whole JSON value at `start`.
        """
        self._faults.clear()
        try:
            value, end = self._decoder.raw_decode(text, start)
        except RecursionError:
            return None, _end_of_container(text, start), "the value is nested too deeply"
        except json.JSONDecodeError:
            raise
        except ValueError:
            # Python reads no integer of more than 4,300 digits, and a hook for all integers is slow.
            self._faults.clear()
            decoder = json.JSONDecoder(
                object_pairs_hook=self._object,
                parse_constant=self._constant,
                parse_float=self._float,
                parse_int=self._integer,
            )
            try:
                value, end = decoder.raw_decode(text, start)
            except RecursionError:
                return None, _end_of_container(text, start), "the value is nested too deeply"
        escaped = text.find("\\ud", start, end) >= 0 or text.find("\\uD", start, end) >= 0
        if not self._faults and escaped and not is_encodable(value):
            self._faults.append(
                "a string holds a lone surrogate, which no file can hold, or the value is nested too deeply"
            )
        return value, end, self._faults[0] if self._faults else None


def is_encodable(value: Any) -> bool:
    """Whether a JSON value can be written as UTF-8: it holds no lone surrogate, and is not nested too deeply."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _end_of_container(text: str, start: int) -> int:
    """The index after the container that begins at `start`, however deeply nested. Raises ValueError where it has no end."""
    open_ones = 0
    for found in _MARKS.finditer(text, start):
        mark = found[0]
        if mark == '"':  # of a string without an end
            break
        open_ones += (mark in "[{") - (mark in "]}")
        if open_ones == 0:
            return found.end()
    raise ValueError("the value is nested too deeply, and has no end")


def depth(value: Any) -> int:
    """How deeply containers are nested in a JSON value: 0 for a number, 1 for {"a": 1}. Not recursive."""
    deepest, layer = 0, [value]
    while layer := [part for part in layer if isinstance(part, (dict, list))]:
        deepest += 1
        layer = [part for held in layer for part in (held.values() if isinstance(held, dict) else held)]
    return deepest


def parse(text: str) -> Any:
    """The JSON value that `text` holds. Raises ValueError, with the reason, where it is not one or not sound."""
    stripped = text.strip(" \t\r\n")
    decoder = getattr(_own, "decoder", None)
    if decoder is None:
        decoder = _own.decoder = StrictDecoder()
    value, end, fault = decoder.raw_decode(stripped)
    if fault:
        raise ValueError(fault)
    if end != len(stripped):
        raise ValueError(f"more text follows the JSON value: {stripped[end : end + 20]!r}")
    return value


def dump(value: Any, *, spaced: bool = False) -> str:
    """JSON, compact or with a blank after commas and colons, that `parse` reads back to an equal value with the same order of keys.

    Raises ValueError, with the reason, where the value is not sound JSON.
    """
    try:
        text = (_SPACED if spaced else _COMPACT).encode(value)
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a string holds a lone surrogate, which no file can hold") from None
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None
    except TypeError as error:
        raise ValueError(str(error)) from None
    return text
