"""Calls as the dialogues of API-Bank write them, `[Name(key='value', ..)]`, read and compared.

The original evaluator (AlibabaResearch/DAMO-ConvAI at 1d76900822d9ecfcd6e9eb0ca64a073cb892b735, api-bank/evaluator.py
with api_call_extraction.py and tool_manager.py) takes the first such text of the answer, compares the name, turns
values into the types that the tool declares, runs the tool, and lets the tool compare input and output with those of
the dialogue. Here nothing is run: name and typed parameters must equal the reference's. This differs where

- a tool forgives: AddReminder asks for more than half of the content's words, SymptomSearch for the same symptom
  whatever its case, and ToolSearcher, Wiki and Translate look at their output; here every value must be equal;
- the tool's result would differ for equal parameters, which here nobody sees;
- a value holds quotes: the original reader ends a value at the first quote of either kind, so that a list of texts in
  quotes, which is how the references themselves are written, can never be right. Here a value ends at a quote that the
  next parameter or the closing bracket follows.
"""

from __future__ import annotations

import json
import re
from typing import Any

from awpo.rewards import json_equal
from awpo.types import ToolCall

_OPENING, _CLOSING = re.compile(r"\[(\w+)\("), ")]"
_PARAMETER = re.compile(
    r"""(?P<key>\w+)\s*=\s*
    (?: '(?P<single>.*?)' | "(?P<double>.*?)" | (?P<bare>[^'",\s][^'",]*+|\[.*?\]) )
    \s*(?: $ | ,\s*(?=\w+\s*=) )""",
    re.VERBOSE,
)

TYPES = {
    ("AddMeeting", "attendees"): "list",
    ("AddScene", "devices"): "list",
    ("BookHotel", "adult_count"): "int",
    ("BookHotel", "child_count"): "int",
    ("BookHotel", "room_count"): "int",
    ("DeleteMeeting", "attendees"): "list",
    ("ForgotPassword", "verification_code"): "int",
    ("ModifyMeeting", "attendees"): "list",
    ("ModifyScene", "devices"): "list",
    ("QueryMeeting", "attendees"): "list",
    ("RecordHealthData", "health_data"): "list",
    ("TimedSwitch", "on"): "bool",
}
"""The parameters that the tools (api-bank/apis) declare as something else than text."""


def read_call(text: str) -> ToolCall | None:
    """The first call in a text, on one line, all values as texts; None where there is none that can be read."""
    found = _first(text)
    if found is None:
        return None
    name, inner = found
    position, values = 0, {}
    while position < len(inner):
        parameter = _PARAMETER.match(inner, position)
        if parameter is None:
            return None
        quoted = parameter["single"] if parameter["single"] is not None else parameter["double"]
        values[parameter["key"]] = quoted if quoted is not None else parameter["bare"].strip()
        position = parameter.end()
    return ToolCall(name, values)


def _first(text: str) -> tuple[str, str] | None:
    """Name and inside of the first call: from the first opening with a closing behind it to the line's last closing."""
    for line in text.split("\n"):
        end = line.rfind(_CLOSING)
        opening = _OPENING.search(line, 0, max(end, 0))
        if opening:
            return opening[1], line[opening.end() : end].strip()
    return None


def typed(call: ToolCall) -> ToolCall:
    """The call with values of the declared types, by the rules of the original tool manager.

    A whole number is digits alone, a list JSON in quotes of either kind, and only "True" is true. Raises ValueError
    for a value that is not of its type.
    """
    values: dict[str, Any] = dict(call.arguments)
    for key, value in call.arguments.items():
        kind = TYPES.get((call.name, key))
        if kind == "int":
            if not value.isdigit():
                raise ValueError(f"{key} is no whole number: {value:.60}")
            values[key] = int(value)
        elif kind == "list":
            try:
                values[key] = json.loads(value.replace("'", '"'))
            except (ValueError, RecursionError):
                raise ValueError(f"{key} is no list: {value:.60}") from None
        elif kind == "bool":
            values[key] = value == "True"
    return ToolCall(call.name, values)


def mistake(reference: ToolCall, text: str) -> tuple[str, str]:
    """What is wrong with an answer, as (kind, detail); ("", "") where it holds the reference's call."""
    call = read_call(text)
    if call is None:
        return "no_call", "no call of the form [Name(key='value', ..)]"
    if call.name != reference.name:
        return "wrong_name", f"{call.name} for {reference.name}"
    try:
        given = typed(call).arguments
    except ValueError as error:
        return "wrong_type", str(error)
    due = typed(reference).arguments
    if given.keys() != due.keys():
        return "wrong_parameters", f"parameters {', '.join(given) or 'none'} for {', '.join(due) or 'none'}"
    wrong = [key for key in due if not json_equal(due[key], given[key])]
    return ("wrong_value", f"values of {', '.join(wrong)}") if wrong else ("", "")
