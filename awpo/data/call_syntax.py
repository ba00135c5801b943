"""Calls written as code, `[Func Name(arg="value", n=3), other.func()]`, and the literals in them, read without `eval`.

ToolACE and API-Bank write calls so. Grammar, white space free between tokens:

    calls    := "[" [call ("," call)*] "]"
    call     := name "(" [argument ("," argument)*] ")"
    argument := key "=" value
    value    := string | number | true | false | null | True | False | None | list | tuple | object

A name is all that stands before the first "(", so it may hold blanks, dots and slashes; names that hold brackets
themselves are known by the list of tools on offer. A tuple becomes a list. Strings stand in single or double quotes,
with Python's and JSON's escapes; a line break in one is let pass.

A scanner reads each character a bounded number of times and never raises: what it cannot understand is a `Problem`
with its place. Nothing is guessed: a bare word, an argument without a name, a name given twice, a number that JSON
has no form for are problems.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from awpo.chat import DEEPEST_VALUE
from awpo.types import ToolCall

_OPENING = re.compile(r"\[\s*")
_SPACE = re.compile(r"\s*")
# Nothing is given back ("++"): a long number with a letter behind it would be tried in every division.
_NUMBER = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?(?![\w.])")
_WORD = re.compile(r"[^\W\d]\w*")
_PLAIN = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_NOT_IN_KEY = re.compile(r"[=,()\[\]{}'\"]")
_NOT_IN_NAME = re.compile(r"[(\[\]{}\"=]")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_OCTAL = re.compile("[0-7]{1,3}")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "/": "/", "\\": "\\"}
_HEX = {"x": 2, "u": 4, "U": 8}
_HEX_DIGITS = re.compile(r"[0-9a-fA-F]*")
# What follows a string that is an argument's value: the next argument, or the end of the call. Bounded on purpose.
_AFTER_ARGUMENT = re.compile(r"\s{0,4}(?:,\s{0,4}\w{1,80}\s{0,4}=|\)\s{0,4}(?:[,\]]|\Z))")


@dataclass(frozen=True, slots=True)
class Problem:
    """What a scanner could not understand, and the index of the character where."""

    position: int
    what: str

    def __str__(self) -> str:
        return f"character {self.position}: {self.what}"


class _CannotRead(Exception):
    """Ends the scan; never leaves this module."""

    def __init__(self, position: int, what: str) -> None:
        self.problem = Problem(position, what)


def scan_calls(
    text: str, names: Iterable[str] | Names = (), *, unescaped_quotes: bool = False
) -> tuple[tuple[ToolCall, ...], Problem | None]:
    """The calls that `text` holds, all of it, and what was not understood (None: nothing).

    With a problem, the calls are those read before it. `names` are the tools on offer; only those that hold a bracket
    make a difference. With `unescaped_quotes` an argument's string ends at a quote after which the next argument or
    the call's end follows, as in `f(a='[{'k': 1}]')`; else at the first quote.
    """
    scanner = _Scanner(text, names, unescaped_quotes)
    try:
        scanner.calls_in_brackets()
    except _CannotRead as error:
        return tuple(scanner.calls), error.problem
    return tuple(scanner.calls), None


def scan_literal(text: str) -> tuple[Any, Problem | None]:
    """The one literal, JSON's or Python's, that `text` holds; None and the problem where it is not one."""
    scanner = _Scanner(text, (), False)
    try:
        value = scanner.value(0)
        scanner.space()
        if scanner.at < len(text):
            raise _CannotRead(scanner.at, "more text after the value")
    except _CannotRead as error:
        return None, error.problem
    return value, None


def begins_call(text: str, names: Iterable[str] | Names) -> int:
    """Where in `text` a call in brackets of one of `names` begins, -1 where nowhere."""
    tree = _names(names).all
    return next((at.start() for at in _OPENING.finditer(text) if _is_called(tree, text, at.end())), -1)


def _is_called(tree: dict[str, Any], text: str, at: int) -> bool:
    return any(text.startswith("(", end + text[end : end + 1].isspace()) for end in _ends(tree, text, at))


class Names:
    """Names of tools, made once for many texts.

    They are held by their characters, one after the other, with "" where a name ends. So the time for a text does not
    grow with their number.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.all: dict[str, Any] = {}
        self.bracketed: dict[str, Any] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        _plant(self.all, name.strip())
        if _NOT_IN_NAME.search(name):
            _plant(self.bracketed, name)


def _names(names: Iterable[str] | Names) -> Names:
    return names if isinstance(names, Names) else Names(names)


def _plant(tree: dict[str, Any], name: str) -> None:
    if name:
        for character in name:
            tree = tree.setdefault(character, {})
        tree[""] = {}


def _ends(tree: dict[str, Any], text: str, at: int) -> Iterator[int]:
    """Where the names that stand at `at` end, the shortest first."""
    while tree:
        if "" in tree:
            yield at
        character = text[at : at + 1]
        tree, at = tree.get(character, {}) if character else {}, at + 1


class _Scanner:
    def __init__(self, text: str, names: Iterable[str] | Names, unescaped_quotes: bool) -> None:
        self.text, self.at, self.unescaped_quotes = text, 0, unescaped_quotes
        self.calls: list[ToolCall] = []
        self.names = _names(names).bracketed

    def space(self) -> str:
        """Skips white space; the character after it, "" at the end."""
        character = self.text[self.at : self.at + 1]
        if not character.isspace():
            return character
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return self.text[self.at : self.at + 1]

    def expect(self, character: str, where: str) -> None:
        found = self.space()
        if found != character:
            raise _CannotRead(self.at, f"{character!r} is missing {where}" + ("" if found else ": the text ends"))
        self.at += 1

    def calls_in_brackets(self) -> None:
        self.expect("[", "before the calls")
        if self.space() == "]":
            self.at += 1
        else:
            while True:
                self.calls.append(self.call())
                if self.space() != ",":
                    break
                self.at += 1
            self.expect("]", "after the calls")
        if self.space():
            raise _CannotRead(self.at, "more text after the calls")

    def name(self) -> str:
        self.space()
        longest = -1  # "Find (all)" before "Find ("
        for end in _ends(self.names, self.text, self.at):
            following = _SPACE.match(self.text, end)
            if following and self.text.startswith("(", following.end()):
                longest = end
        if longest >= 0:
            start, self.at = self.at, longest
            return self.text[start:longest]
        found = _NOT_IN_NAME.search(self.text, self.at)
        if not found or found[0] != "(":
            raise _CannotRead(found.start() if found else len(self.text), "a name and '(' were expected")
        name = self.text[self.at : found.start()].strip()
        if not name:
            raise _CannotRead(self.at, "a call without a name")
        self.at = found.start()
        return name

    def call(self) -> ToolCall:
        name = self.name()
        self.expect("(", "after the name")
        arguments: dict[str, Any] = {}
        if self.space() == ")":
            self.at += 1
            return ToolCall(name, arguments)
        while True:
            start = self.at
            key = self.key()
            if key in arguments:
                raise _CannotRead(start, f"the argument {key[:60]!r} is given twice")
            arguments[key] = self.argument()
            if self.space() != ",":
                break
            self.at += 1
            if self.space() == ")":  # Python lets a comma stand before the bracket
                break
        self.expect(")", "after the arguments")
        return ToolCall(name, arguments)

    def key(self) -> str:
        quote = self.space()
        start = self.at
        if quote in ("'", '"'):
            key = self.string()
            if self.space() != "=":
                raise _CannotRead(start, "an argument without a name")
        else:
            found = _NOT_IN_KEY.search(self.text, self.at)
            if not found or found[0] != "=":
                raise _CannotRead(start, "an argument without a name")
            key = self.text[self.at : found.start()].strip()
            self.at = found.start()
        if not key:
            raise _CannotRead(start, "an argument without a name")
        self.at += 1
        return key

    def argument(self) -> Any:
        if self.unescaped_quotes and self.space() in ("'", '"'):
            return self.string_up_to_the_next_argument()
        return self.value(0)

    def value(self, depth: int) -> Any:
        character = self.space()
        if depth > DEEPEST_VALUE:
            raise _CannotRead(self.at, f"a value is nested deeper than {DEEPEST_VALUE}")
        if character in ("'", '"'):
            return self.string()
        if character == "[":
            return self.items("]", depth)
        if character == "(":
            return self.items(")", depth)
        if character == "{":
            return self.object(depth)
        number = _NUMBER.match(self.text, self.at)
        if number:
            return self.number(number)
        word = _WORD.match(self.text, self.at)
        if word and word[0] in _WORDS:
            self.at = word.end()
            return _WORDS[word[0]]
        if word and self.text.startswith("(", word.end()):
            raise _CannotRead(self.at, f"a call inside a value: {word[0][:60]!r}")
        if word:
            raise _CannotRead(self.at, f"{word[0][:60]!r} is no literal")
        raise _CannotRead(self.at, f"{character!r} begins no value" if character else "the text ends before a value")

    def number(self, match: re.Match[str]) -> int | float:
        text = match[0]
        try:
            value: int | float = int(text)
        except ValueError:
            value = math.inf if text.lstrip("+-").isdigit() else float(text)  # too many digits for Python
        if not math.isfinite(value):
            raise _CannotRead(match.start(), f"the number {text[:40]} is too large")
        self.at = match.end()
        return value

    def items(self, closing: str, depth: int) -> list[Any]:
        start = self.at
        self.at += 1
        items: list[Any] = []
        while self.space() != closing:
            items.append(self.value(depth + 1))
            following = self.space()
            if following == ",":
                self.at += 1
            elif following != closing:
                raise _CannotRead(self.at, f"',' or {closing!r} is missing in the list from character {start}")
        self.at += 1
        return items

    def object(self, depth: int) -> dict[str, Any]:
        start = self.at
        self.at += 1
        value: dict[str, Any] = {}
        while (character := self.space()) != "}":
            place = self.at
            if character not in ("'", '"'):
                raise _CannotRead(place, "a key that is no text" if character else "the text ends in an object")
            key = self.string()
            if key in value:
                raise _CannotRead(place, f"the key {key[:60]!r} is given twice")
            self.expect(":", "after a key")
            value[key] = self.value(depth + 1)
            following = self.space()
            if following == ",":
                self.at += 1
            elif following != "}":
                raise _CannotRead(self.at, f"',' or '}}' is missing in the object from character {start}")
        self.at += 1
        return value

    def string(self) -> str:
        start, quote = self.at, self.text[self.at]
        parts: list[str] = []
        self.at += 1
        while True:
            plain = _PLAIN[quote].match(self.text, self.at)
            assert plain is not None
            parts.append(plain[0])
            self.at = plain.end()
            if self.at >= len(self.text):
                raise _CannotRead(start, "a string that is not closed")
            if self.text[self.at] == quote:
                self.at += 1
                return self.checked("".join(parts), start)
            parts.append(self.escape())

    def string_up_to_the_next_argument(self) -> str:
        start, quote = self.at, self.text[self.at]
        end = self.text.find(quote, start + 1)
        while end >= 0 and not _AFTER_ARGUMENT.match(self.text, end + 1):
            end = self.text.find(quote, end + 1)
        if end < 0:
            raise _CannotRead(start, "a string that is not closed")
        self.at = end + 1
        return self.checked(self.text[start + 1 : end], start)

    def checked(self, text: str, start: int) -> str:
        """The text with pairs of surrogates joined, as JSON escapes write what lies beyond 16 bits."""
        if text.isascii():
            return text
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise _CannotRead(start, "a string holds a lone surrogate") from None

    def escape(self) -> str:
        """Reads the escape at the backslash. One that neither Python nor JSON knows stands for itself, as in Python."""
        place = self.at
        letter = self.text[place + 1 : place + 2]
        if letter in _HEX:
            digits = _HEX_DIGITS.match(self.text, place + 2, place + 2 + _HEX[letter])
            assert digits is not None
            if len(digits[0]) != _HEX[letter] or int(digits[0], 16) > 0x10FFFF:
                raise _CannotRead(place, "an escape that names no character")
            self.at = digits.end()
            return chr(int(digits[0], 16))
        if octal := _OCTAL.match(self.text, place + 1):  # Python's; JSON has none
            self.at = octal.end()
            return chr(int(octal[0], 8))
        self.at = place + 2
        if letter == "\n":
            return ""
        if letter in ("'", '"'):
            return letter
        return _ESCAPES.get(letter, "\\" + letter)
