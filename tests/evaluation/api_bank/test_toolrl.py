"""ToolRL's scoring of API-Bank: its quirks one by one, and 500 perturbed answers against a scorer written otherwise."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from awpo.types import ToolCall
from evaluation.api_bank.benchmark import COMPAT, STRICT, mistake, reference_text
from evaluation.api_bank.data import TOOLRL, read_level
from evaluation.api_bank.toolrl import compat_mistake, is_hit, read_values, strict_mistake
from evaluation.generate import Generated

REFERENCE = ToolCall("Weather", {"city": "Oslo", "day": "1"})
RIGHT = '{"name": "Weather", "parameters": {"city": "Oslo", "day": "1"}}'
OTHER = '{"name": "Stocks", "parameters": {}}'


def block(*lines: str) -> str:
    return "\n".join(["<think>\nHm.\n</think>\n<tool_call>", *lines, "</tool_call>"])


@pytest.mark.parametrize(
    ("text", "hit", "strict"),
    [
        (block(RIGHT), True, ""),
        (block(OTHER, RIGHT), True, "extra_call"),
        (block(RIGHT, RIGHT), True, "extra_call"),
        (block("nonsense", RIGHT), True, "malformed_call"),
        (RIGHT, True, "no_call"),  # without tags the whole text is read
        (f"Let me see.\n{RIGHT}\nDone.", True, "no_call"),
        (block(RIGHT) + f"\n<tool_call>\n{OTHER}\n</tool_call>", False, "extra_call"),  # the last block alone is read
        (block('{"city": "Oslo", "day": "1"}'), True, "malformed_call"),  # parameters alone stand for the call
        (block('{"name": "Weather", "arguments": {"city": "Oslo", "day": "1"}}'), False, ""),
        (block('{"name": "Weather", "parameters": {"city": "Oslo", "day": 1}}'), False, "wrong_parameters"),
        (block('{"name": "Weather", "parameters": {"city": "Oslo"}}'), False, "wrong_parameters"),
        (block('{"name": "weather", "parameters": {"city": "Oslo", "day": "1"}}'), False, "wrong_name"),
        (block("7", RIGHT), False, "malformed_call"),  # a number ends the search
        (block("null", RIGHT), False, "malformed_call"),
        (block(RIGHT, "7"), True, "malformed_call"),
        (block(json.dumps(RIGHT)), True, "malformed_call"),  # JSON in a JSON string is read once more
        (block('"name parameters"', RIGHT), False, "malformed_call"),
        (block('["name", "parameters"]', RIGHT), False, "malformed_call"),
        (block('["name"]', RIGHT), True, "malformed_call"),
        ("I cannot.", False, "no_call"),
        ("", False, "no_call"),
        (block(), False, "malformed_call"),
        ("<tool_call>\n" + RIGHT, True, ""),  # not closed
        (block(RIGHT.replace(', "parameters"', ',\n"parameters"')), False, ""),  # one call on two lines
    ],
)
def test_the_two_forms(text: str, hit: bool, strict: str) -> None:
    assert is_hit(REFERENCE, text) is hit
    assert (compat_mistake(REFERENCE, Generated(text, 9))[0] == "") is hit
    assert strict_mistake(REFERENCE, Generated(text, 9))[0] == strict


def test_an_answer_cut_off_counts_in_compat_alone() -> None:
    cut = Generated(block(RIGHT), 9, "length")
    assert compat_mistake(REFERENCE, cut) == ("", "")
    assert strict_mistake(REFERENCE, cut) == ("unfinished", "the answer ended by 'length'")


def test_calls_that_a_server_took_out_of_the_text_are_calls() -> None:
    answer = Generated("<think>\nHm.\n</think>", 9, tool_calls=(REFERENCE,))
    assert compat_mistake(REFERENCE, answer) == strict_mistake(REFERENCE, answer) == ("", "")
    other = Generated("", 9, tool_calls=(ToolCall("Stocks", {}),))
    assert compat_mistake(REFERENCE, other) == ("wrong_name", "Stocks for Weather")


def test_hostile_lines_are_passed_over() -> None:
    assert read_values(block("[" * 100_000, "9" * 5_000, "{}")) == [{}]
    assert not is_hit(REFERENCE, block(json.dumps("[" * 100_000), RIGHT))


CHANGES = (
    "value",
    "type",
    "drop",
    "add",
    "name",
    "case",
    "arguments",
    "bare",
    "extra-before",
    "extra-after",
    "twice",
    "junk",
    "number",
    "string",
    "second-block",
    "first-block",
    "no-tags",
    "no-closing",
    "no-thought",
    "cut",
    "reply",
    "indent",
)


def perturb(reference: ToolCall, draw: random.Random) -> str:
    """An answer made from the reference's by up to three changes of its calls, lines or tags."""
    calls: list[Any] = [{"name": reference.name, "parameters": dict(reference.arguments)}]
    before, after, opening, closing = "<think>\nWhat now?\n</think>\n", "", "<tool_call>\n", "\n</tool_call>"
    indent = False
    for _ in range(draw.randint(0, 3)):
        kind = draw.choice(CHANGES)
        call = calls[0] if isinstance(calls[0], dict) and "parameters" in calls[0] else {"parameters": {"x": "y"}}
        parameters: dict[str, Any] = call["parameters"]
        keys = sorted(parameters)
        if kind == "value" and keys:
            key = draw.choice(keys)
            parameters[key] = f"{parameters[key]}{draw.choice([' ', '1', 'é'])}"
        elif kind == "type" and keys:
            parameters[draw.choice(keys)] = draw.choice([1, True, None, [], {"a": "b"}])
        elif kind == "drop" and keys:
            del parameters[draw.choice(keys)]
        elif kind == "add":
            parameters["unit"] = "day"
        elif kind == "name":
            call["name"] = "SomethingElse"
        elif kind == "case":
            call["name"] = str(call.get("name")).lower()
        elif kind == "arguments" and "name" in call:
            calls[0] = {"name": call["name"], "arguments": parameters}
        elif kind == "bare":
            calls[0] = parameters
        elif kind == "extra-before":
            calls.insert(0, {"name": "Other", "parameters": {}})
        elif kind == "extra-after":
            calls.append({"name": "Other", "parameters": {}})
        elif kind == "twice":
            calls.append(calls[0])
        elif kind == "junk":
            calls.insert(draw.randint(0, len(calls)), None)
        elif kind == "number":
            calls.insert(0, 12)
        elif kind == "string":
            calls[0] = json.dumps(calls[0])
        elif kind == "second-block":
            after += '\n<tool_call>\n{"name": "Other", "parameters": {}}\n</tool_call>'
        elif kind == "first-block":
            before += '<tool_call>\n{"name": "Other", "parameters": {}}\n</tool_call>\n'
        elif kind == "no-tags":
            opening = closing = ""
        elif kind == "no-closing":
            closing = ""
        elif kind == "no-thought":
            before = before.replace("<think>\nWhat now?\n</think>\n", "")
        elif kind == "cut":
            closing = closing[:5]
        elif kind == "reply":
            after += "\n<response> Done. </response>"
        elif kind == "indent":
            indent = True
    lines = ["{oops" if call is None else json.dumps(call, indent=1 if indent else None) for call in calls]
    return before + opening + "\n".join(lines) + closing + after


def compat_by_hand(reference: ToolCall, text: str) -> bool:
    """ToolRL's verdict, by looking at one line after the other and naming what each means."""
    tail = re.split(r"</tool_call>", re.sub(r"(?s)^.*<tool_call>", "", text))[0]

    def meaning(line: str) -> str:
        try:
            value = json.loads(line)
            value = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:
            return "stop" if line.strip()[:1] == '"' == line.strip()[-1:] else "nothing"
        if isinstance(value, dict):
            whole = {"name", "parameters"} <= value.keys()
            said = (value["name"], value["parameters"]) if whole else (reference.name, value)
            return "hit" if said == (reference.name, reference.arguments) else "miss"
        return "stop" if value is None or isinstance(value, (bool, int, float)) else "miss"

    meanings = [meaning(line) for line in tail.strip().splitlines()]
    until = meanings[: meanings.index("stop")] if "stop" in meanings else meanings
    return "hit" in until


def strict_by_hand(reference: ToolCall, text: str) -> bool:
    """All and only the reference's call: every block's objects, read one by one, as canonical text."""
    body = text.partition("</think>")[2] or text
    calls: list[str] = []
    for inside in body.split("<tool_call>")[1:]:
        rest = inside.partition("</tool_call>")[0].strip()
        if rest.endswith(("\n</", "\n</to")):  # a closing tag that was cut off is no call
            return False
        while rest:
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except json.JSONDecodeError:
                return False
            named = isinstance(value, dict) and isinstance(value.get("name"), str)
            inner = [value[key] for key in ("parameters", "arguments") if key in value] if named else []
            if len(inner) != 1 or not isinstance(inner[0], dict):
                return False
            calls.append(json.dumps([value["name"], inner[0]], sort_keys=True))
            rest = rest[end:].strip()
    return calls == [json.dumps([reference.name, reference.arguments], sort_keys=True)]


def test_500_perturbed_answers_agree_with_another_scorer(shared_data: Path) -> None:
    draw = random.Random(597)
    items = [item for level in (1, 2, 3) for item in read_level(TOOLRL, level, shared_data)]
    seen: Counter[tuple[bool, bool]] = Counter()
    for _ in range(500):
        item = draw.choice(items)
        text = perturb(item.reference, draw)
        answer = Generated(text, 9)
        verdicts = tuple(not mistake(form, item.reference, answer)[0] for form in (COMPAT, STRICT))
        assert verdicts == (compat_by_hand(item.reference, text), strict_by_hand(item.reference, text)), text
        seen[verdicts[0], verdicts[1]] += 1
    # All four pairs of verdicts occur, so that neither scorer could be a constant, nor one form the other.
    assert sum(seen.values()) == 500
    assert min(seen[pair] for pair in ((True, True), (True, False), (False, True), (False, False))) >= 10, seen


def test_the_reference_is_what_a_model_would_write(shared_data: Path) -> None:
    item = read_level(TOOLRL, 1, shared_data)[0]
    assert reference_text(TOOLRL, item).splitlines()[3:] == [
        "<tool_call>",
        '{"name": "ModifyRegistration", "parameters": {"appointment_id": "34567890", '
        '"new_appointment_date": "2023-03-26", "new_appointment_doctor": "Dr. Lee"}}',
        "</tool_call>",
    ]
