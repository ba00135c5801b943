"""ToolRL's scoring of API-Bank: is the reference's call among those of the answer?

`compat` is what ToolRL's published scripts do (qiancheng0/ToolRL at 8cee13ec0ca72f0461da372a93a6fd8140dbb840,
benchmarks/API-Bank: generate.py reads the answer, evaluate.py scores it), with what is odd about them:

- only what follows the last `<tool_call>` is read, up to the first `</tool_call>` after it; without tags the whole
  answer is. Each line is one JSON value; a line that isn't JSON is passed over.
- one call that equals the reference is enough, whatever else is called.
- a JSON object without "name" or without "parameters" counts as the parameters of a call with the right name.
- a JSON number, `true`, `null`, or a string that holds no JSON ends the search: calls after it are not looked at.
- values are compared by Python's `==`. (All values of the references are strings, so that 1 against true never arises.)
- an answer cut off at the token limit is judged like any other.

`strict` is ours: a finished answer whose calls are the reference's, all and only, with values as typed JSON.
"""

from __future__ import annotations

import json
from typing import Any

from awpo.chat import CALL, CALL_END
from awpo.rewards import is_exact
from awpo.types import Message, ToolCall
from evaluation.generate import Generated


def read_values(text: str) -> list[Any]:
    """The JSON values that ToolRL's generate.py takes for calls, in order; of any JSON type."""
    block = text.strip().split(CALL)[-1].split(CALL_END)[0]
    values = []
    for line in block.strip().split("\n"):
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError):  # a blank line is no JSON either
            continue
    return values


def is_hit(reference: ToolCall, text: str) -> bool:
    """The verdict of ToolRL's evaluate.py on an answer's whole text, special tokens removed."""
    for value in read_values(text):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return False
        if not isinstance(value, (dict, list, str)):
            return False
        if "name" not in value or "parameters" not in value:
            hit = value == reference.arguments
        elif isinstance(value, dict):
            hit = value["name"] == reference.name and value["parameters"] == reference.arguments
        else:  # a list or a string that holds both words: it cannot be asked for either
            return False
        if hit:
            return True
    return False


def compat_mistake(reference: ToolCall, answer: Generated) -> tuple[str, str]:
    """What is wrong by ToolRL's published scripts, as (kind, detail); ("", "") for a hit."""
    text = answer.text
    if answer.tool_calls:  # a server took them out of the text
        lines = [json.dumps({"name": call.name, "parameters": call.arguments}) for call in answer.tool_calls]
        text = "\n".join([f"{text}{CALL}", *lines, CALL_END])
    if is_hit(reference, text):
        return "", ""
    values = read_values(text)
    if not values:
        return "no_call", "no line of JSON after the last <tool_call>"
    return _difference(reference, [str(value.get("name")) for value in values if isinstance(value, dict)])


def strict_mistake(reference: ToolCall, answer: Generated) -> tuple[str, str]:
    """What is wrong by the strict form, as (kind, detail); ("", "") for a hit."""
    completion = answer.completion()
    if answer.finish != "stop":
        return "unfinished", f"the answer ended by {answer.finish!r}"
    if completion.calls_malformed:
        return "malformed_call", "; ".join(completion.errors[:2])
    if is_exact(Message("assistant", tool_calls=(reference,)), completion):
        return "", ""
    if not completion.tool_calls:
        return "no_call", "a reply without a call"
    if len(completion.tool_calls) > 1:
        return "extra_call", f"{len(completion.tool_calls)} calls for one"
    return _difference(reference, [completion.tool_calls[0].name])


def _difference(reference: ToolCall, names: list[str]) -> tuple[str, str]:
    if reference.name in names:
        return "wrong_parameters", f"other parameters of {reference.name}"
    return "wrong_name", f"{', '.join(names)[:100] or 'no name'} for {reference.name}"
