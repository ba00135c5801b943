"""Can an answer stand as the rationale before the reference action? Pure checks, each with its reason.

A rationale leads to the action: it names each called tool and the values of the arguments, or says why nothing is
called. It reads as a thought: no tags, no JSON of the answer, no talk of an action that was given. It is of sane
length, whole, and in the language that is asked for.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from awpo.judge_text import NO_CALL, WORD, names_in, normalise, without_names, words_present
from awpo.types import Instance, ToolCall

Language = Literal["english", "dialogue"]

LONGEST_RATIONALE = 2000
"""Characters; reasoning longer than this is refused, as a student model could not learn to write it."""
SHORTEST_RATIONALE = 15
"""Characters."""
VALUES_MENTIONED = 0.75
"""Share of the arguments' values that a rationale has to mention; of a longer value, half of its words do."""
LATIN_SHARE, FUNCTION_WORD_SHARE = 0.8, 0.15
"""English: this share of the letters are Latin, and this share of the words are those that every English text has
(plain English prose has 0.3 to 0.5 of them, French, German and Spanish below 0.1)."""
FEWEST_WORDS = 8
"""Below so many words their kind says little."""
LONGEST_QUOTE = 60
"""A reply of this many characters, or more, must not stand in its rationale word for word."""

_FENCE = re.compile(r"\A```[a-z]*\n(.*)\n```\Z", re.DOTALL)
_TAG = re.compile(r"</?(?:think|tool_call|response|obs)>")
_GIVEN_AWAY = re.compile(
    r"\b(?:reference|expert(?:'s)?|given|provided|target|expected|ground[- ]truth|gold(?:en)?|shown)"
    r" (?:action|answer|tool call|call|rationale|solution|output)s?\b"
    r"|\bthe reference(?=[.,;:!?]| (?:is|was|says|shows|gives|agrees|calls|uses|does|has)\b)|\bas (?:given|shown|provided) in the (?:action|answer)\b"
    r"|\bthe action (?:that )?(?:was |is )?(?:given|shown|provided|taken)\b",
    re.IGNORECASE,
)
_SAYS_WHY = re.compile(
    r"\b(?:no|not|none|nothing|without|cannot|can't|unable|missing|lacks?|already|directly|only|just|"
    r"ask\w*|answer\w*|repl(?:y|ies|ying)|respon[ds]\w*|tell\w*|inform\w*|report\w*|summari[sz]\w*|explain\w*|"
    r"clarif\w*|greet\w*|thank\w*|confirm\w*|declin\w*)\b"
)
_FUNCTION_WORDS = frozenset(
    WORD.findall(
        "the a an of to in for is are was were be that this these those it its with and or as on by from at not no i so "
        "need needs will would should which what their there they he she my can has have had only since because then "
        "first next before after both each other any all user"
    )
)
_WHOLE = re.compile(r"-?\d+\.0+")
_DECODER = json.JSONDecoder()
_MOST_OBJECTS = 64


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of asking about one instance: a rationale, or the reason (one of a small set) why there is none."""

    rationale: str | None
    reason: str = ""
    detail: str = ""


def check_rationale(
    instance: Instance, answer: str, *, finish: str | None = None, language: Language = "english"
) -> Answer:
    """Takes an answer out of its wrapping and checks that it can stand before the reference action.

    `finish` is the endpoint's `finish_reason`. `language` "dialogue" asks for the script of the user's last message.
    """
    text = _unwrapped(answer)
    if not text:
        return Answer(None, "empty")
    if finish == "length":
        return Answer(None, "cut off", "it reached max_tokens; keep it short")
    if len(text) > LONGEST_RATIONALE:
        return Answer(None, "too long", f"{len(text)} characters, at most {LONGEST_RATIONALE}")
    if len(text) < SHORTEST_RATIONALE:
        return Answer(None, "too short", f"{len(text)} characters, at least {SHORTEST_RATIONALE}")
    if found := _TAG.search(text):
        return Answer(None, "holds a tag", found[0])
    if found := _GIVEN_AWAY.search(text):
        return Answer(None, "speaks of the action it was given", found[0])
    if leak := _leak(instance, text):
        return Answer(None, "holds the answer itself", leak[:200])
    if (wrong := _wrong_language(instance, text, language)) is not None:
        return Answer(None, "in another language", wrong)
    return _leads_to_action(instance, text, language)


def _unwrapped(answer: str) -> str:
    text = answer.strip()
    if text.startswith("<think>") and "</think>" in text:
        # A reasoning model's thoughts about the task, before its answer, are not the answer; where nothing follows
        # them it took the tags for the place to write in.
        inside, _, after = text.removeprefix("<think>").rpartition("</think>")
        text = after.strip() or inside.strip()
    fenced = _FENCE.match(text)
    return fenced[1].strip() if fenced else text


def _leak(instance: Instance, text: str) -> str | None:
    """The part of the action that the text holds as it is: JSON of a call or its arguments, code, the reply."""
    calls = instance.target.tool_calls
    arguments = [call.arguments for call in calls if call.arguments]
    for value, written in _objects(text):
        if {"name", "arguments", "parameters"} & value.keys() or value in arguments:
            return written
    for call in calls:
        if found := re.search(rf"(?<!\w){re.escape(call.name)}\s*\(\s*\w+\s*[=:][^)]*\)?", text):
            return found[0]
    reply = " ".join((instance.target.content or "").split())
    if len(reply) >= LONGEST_QUOTE and reply in " ".join(text.split()):
        return reply
    return None


def _objects(text: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The JSON objects in a text, outermost ones, with how they are written; at most `_MOST_OBJECTS` tries."""
    position = text.find("{")
    for _ in range(_MOST_OBJECTS):
        if position < 0:
            return
        end = position + 1
        try:
            value, end = _DECODER.raw_decode(text, position)
            yield value, text[position:end]
        except (ValueError, RecursionError):
            pass
        position = text.find("{", end)


def _script(text: str) -> Counter[str]:
    """Letters by script, named as Unicode does; those of Chinese and Japanese count as one."""
    found: Counter[str] = Counter()
    for letter in filter(str.isalpha, text):
        name = "LATIN" if letter.isascii() else unicodedata.name(letter, "?").split()[0]
        found["CJK" if name in ("CJK", "HIRAGANA", "KATAKANA") else name] += 1
    return found


def _wrong_language(instance: Instance, text: str, language: Language) -> str | None:
    """What is wrong with the text's language; None where it is right. Names and values are left out: they are data."""
    data = {tool.name.casefold() for tool in instance.tools}
    data |= {normalise(value) for _, value in _leaves(instance.target.tool_calls) if isinstance(value, str) and value}
    prose = without_names(normalise(text), data)
    scripts = _script(prose)
    if not scripts:
        return None
    if language == "dialogue":
        said = next((message.content or "" for message in reversed(instance.prompt) if message.role == "user"), "")
        asked = _script(said).most_common(1)
        script = scripts.most_common(1)[0][0]
        return None if not asked or asked[0][0] == script else f"in {script} letters, the dialogue in {asked[0][0]}"
    if scripts["LATIN"] < LATIN_SHARE * scripts.total():
        return "write English"
    words = WORD.findall(prose)
    plain = sum(word in _FUNCTION_WORDS for word in words)
    return "write English" if len(words) >= FEWEST_WORDS and plain < FUNCTION_WORD_SHARE * len(words) else None


def _leaves(calls: tuple[ToolCall, ...]) -> list[tuple[str, Any]]:
    """The values in the calls' arguments with the names of their parameters; lists and objects taken apart."""
    found: list[tuple[str, Any]] = []
    pending = [item for call in reversed(calls) for item in reversed(call.arguments.items())]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending.extend(reversed([(f"{name}.{key}", inner) for key, inner in value.items()]))
        elif isinstance(value, (list, tuple)):
            pending.extend(reversed([(name, inner) for inner in value]))
        else:
            found.append((name, value))
    return found


def _is_mentioned(value: Any, present: set[str]) -> bool | None:
    """Whether half of a value's words are present; None for what a thought need not spell: booleans, null, ""."""
    if value is None or isinstance(value, bool):
        return None
    text = str(value)
    if _WHOLE.fullmatch(text):  # 101.0, be it a number or a text, is mentioned as 101
        text = text.partition(".")[0]
    words = WORD.findall(normalise(text))
    return 2 * sum(word in present for word in words) >= len(words) if words else None


def _leads_to_action(instance: Instance, text: str, language: Language) -> Answer:
    calls = instance.target.tool_calls
    if not calls:
        said = normalise(text)
        if language == "english" and not (_SAYS_WHY.search(said) or NO_CALL.search(said)):
            return Answer(None, "does not say why no tool is called")
        return Answer(text)
    due = tuple(dict.fromkeys(call.name for call in calls))
    offered = tuple(dict.fromkeys((*due, *(tool.name for tool in instance.tools))))
    unnamed = sorted(set(due) - names_in(text, offered))
    if unnamed:
        return Answer(None, "does not name the tool it leads to", ", ".join(unnamed)[:200])
    present = words_present(normalise(text))
    leaves = [(name, value, _is_mentioned(value, present)) for name, value in _leaves(calls)]
    counted = [found for _, _, found in leaves if found is not None]
    if sum(counted) < VALUES_MENTIONED * len(counted):
        missing = [f"{name} = {str(value)[:60]}" for name, value, found in leaves if found is False]
        return Answer(None, "does not mention the values of the arguments", "; ".join(missing)[:200])
    return Answer(text)
