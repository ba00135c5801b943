"""Reference rationales by template, from the tools on offer and the reference action alone.

They are short on purpose (about 25 words at most), so that a very small model can learn to write them, and each
leads to its action: it names every called tool with the decisive arguments, or why none is called.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from awpo.data import strict_json
from awpo.types import Instance, Tool, ToolCall

WORD_LIMIT = 25
PARAMETERS_SHOWN = 4
VALUE_LENGTH = 40
DESCRIPTION_LENGTH = 80

_WORD = re.compile(r"[^\W_]+")
_ASKS = re.compile(
    r"\?\W*\Z|\b(?:please|could you|can you) (?:provide|tell|give|specify|share|clarify|let me know)\b", re.I
)
_COMMON = frozenset(
    _WORD.findall(
        "a an and another are at be by can could do doe for from get give have i in is it its me my need of or other "
        "please provide tell that the this to want what which will with would you your"
    )
)
# What a question that does not name a parameter asks for: words of such parameters' names, and their types.
_ASKED_FOR: tuple[tuple[re.Pattern[str], frozenset[str], frozenset[str]], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), frozenset(words.split()), frozenset(types.split()))
    for pattern, words, types in (
        (r"\bhow (?:many|much|far|long|old|often)\b", "count number amount quantity size length", "integer number"),
        (r"\b(?:day|date|when)\b", "day date when", ""),
        (r"\b(?:time|hour|when)\b", "time hour at when", ""),
        (r"\b(?:say|message|text|write)\b", "text message body content", ""),
        (r"\b(?:where|city|town|place|room)\b", "where city town place location room area", ""),
        (r"\b(?:who|whom|whose)\b", "who person people contact friend recipient", ""),
        (r"\bfrom\b", "from start origin source departure", ""),
        (r"\b(?:to|into)\b", "to into goal target destination", ""),
    )
)
_NUMERIC = frozenset({"integer", "number"})
_COUNTS = {2: "Two", 3: "Three", 4: "Four", 5: "Five"}


def _shorten(text: str, length: int) -> str:
    """One line of at most `length` characters, cut at a word where there is one."""
    line = " ".join(text.split())
    if len(line) <= length:
        return line
    head = line[: length - 3]
    return (head.rsplit(" ", 1)[0] if " " in head else head).rstrip(",;:.") + "..."


def _end(text: str) -> str:
    """The text as a sentence."""
    return text if text.endswith("...") else f"{text}."


def _argument(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else strict_json.dump(value, spaced=True)
    return f"{name} is {_shorten(text, VALUE_LENGTH)}"


def _with_arguments(opening: str, calls: Sequence[ToolCall], per_call: int) -> str:
    """The opening and as many arguments as fit into the word limit, one at least."""
    parts: list[str] = []
    words = len(opening.split())
    for call in calls:
        for name, value in list(call.arguments.items())[:per_call]:
            part = _argument(name, value)
            words += len(part.split())
            if parts and (words > WORD_LIMIT or len(parts) == PARAMETERS_SHOWN):
                return f"{opening} {_end('; '.join(parts))}"
            parts.append(part)
    return f"{opening} {_end('; '.join(parts))}" if parts else opening


def _single_call(call: ToolCall, tools: Iterable[Tool]) -> str:
    description = next((tool.description for tool in tools if tool.name == call.name), "")
    purpose = _shorten(description.strip().rstrip("."), DESCRIPTION_LENGTH)
    if purpose[1:2].islower() or len(purpose) == 1:  # "NASA images" keeps its capitals
        purpose = purpose[0].lower() + purpose[1:]
    return _with_arguments(
        f"{call.name} fits: {_end(purpose)}" if purpose else f"{call.name} fits.", [call], PARAMETERS_SHOWN
    )


def _several_calls(calls: tuple[ToolCall, ...]) -> str:
    names = list(dict.fromkeys(call.name for call in calls))
    if len(names) == 1:
        opening = f"{_COUNTS.get(len(calls), str(len(calls)))} calls of {names[0]}."
    else:
        opening = f"Calls of {', '.join(names[:-1])} and {names[-1]}."
    # Spread over the calls: what tells them apart matters more than the rest of any one.
    return _with_arguments(opening, calls, max(1, PARAMETERS_SHOWN // len(calls)))


def _words(text: str) -> set[str]:
    """The words that mean something, in lower case and without a plural's s."""
    words = (word.lower() for word in _WORD.findall(text.replace("_", " ")))
    return {word[:-1] if len(word) > 3 and word.endswith("s") else word for word in words} - _COMMON


def _share(words: set[str], among: set[str]) -> float:
    return len(words & among) / len(words) if words else 0.0


def _missing(instance: Instance, question: str) -> tuple[str, str] | None:
    """(tool, required parameter) that the question most likely asks for; None where nothing points to a tool.

    The tool is the one that shares most words with the user's request and the question, those of its name counted
    twice. The parameter is the required one that the question names, or whose kind it asks for, or whose description
    it names; else one that the request does not seem to give; else the last, as people begin with the main thing.
    A guess: on dialogues that went on to a call, it was right nine times in ten.
    """
    text = next((message.content or "" for message in reversed(instance.prompt) if message.role == "user"), "")
    request, asked = _words(text), _words(question)
    candidates = [tool for tool in instance.tools if tool.parameters.get("required")]
    about = request | asked

    def overlap(tool: Tool) -> int:
        return 2 * len(_words(tool.name) & about) + len(_words(tool.description) & about)

    tool = max(candidates, key=overlap, default=None)
    if tool is None or not overlap(tool):
        return None
    properties = tool.parameters.get("properties") or {}
    expected = [(words, types) for pattern, words, types in _ASKED_FOR if pattern.search(question)]

    def likelihood(place: int) -> tuple[float, float, float, float, float, int]:
        name = required[place]
        schema = properties.get(name)
        schema = schema if isinstance(schema, dict) else {}
        kind, parts = schema.get("type"), {part.lower() for part in _WORD.findall(name.replace("_", " "))}
        numeric = isinstance(kind, str) and kind in _NUMERIC
        of_kind = any(parts & words or (numeric and kind in types) for words, types in expected)
        given = numeric and any(character.isdigit() for character in text)
        described = _share(_words(str(schema.get("description") or "")), asked)
        return _share(_words(name), asked), of_kind, described, -given, -_share(_words(name), request), place

    required = [str(name) for name in tool.parameters["required"]]
    return tool.name, required[max(range(len(required)), key=likelihood)]


def offline_rationale(instance: Instance) -> str:
    """The rationale for the instance's target. Pure: the same instance gives the same text."""
    target = instance.target
    if len(target.tool_calls) == 1:
        return _single_call(target.tool_calls[0], instance.tools)
    if target.tool_calls:
        return _several_calls(target.tool_calls)
    if instance.prompt and instance.prompt[-1].role == "tool":
        return "The result is here, so I answer."
    content = (target.content or "").strip()
    if _ASKS.search(content):
        missing = _missing(instance, content)
        if missing:
            return f"The user gave no {missing[1]} for {missing[0]}, so I ask for it."
        return "The request leaves something open, so I ask."
    return "No tool fits the request, so I say so."
