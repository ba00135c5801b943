"""Outputs of an imaginary model for all items of BFCL, version 3 or 4: a seeded mixture of right and wrong answers.

Every completion is in the layout that the package's handler of Qwen models reads, since what is compared is scoring.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from awpo.types import ToolCall
from evaluation.bfcl.data import BfclItem, read_category
from evaluation.bfcl.golds import completion_text, final_words, reference_calls, reference_turns
from evaluation.bfcl.versions import V3, Version

Output = str | list[list[str]]
Calls = list[ToolCall]

WORDS = ("I cannot help with that.", "", "Which one do you mean?", "Sure, done.")
BROKEN = '<tool_call>\n{"name": "broken", "arguments": {\n</tool_call>'
RIGHT_SHARE = 0.55


def other_value(calls: Calls, draw: random.Random) -> Calls:
    """One argument of one call gets another value, type or neither."""
    call = draw.choice(calls)
    if call.arguments:
        name = draw.choice(sorted(call.arguments))
        call.arguments[name] = draw.choice([0, 1.5, True, None, "other", [], {}, [1], call.arguments[name]])
    return calls


def missing_argument(calls: Calls, draw: random.Random) -> Calls:
    call = draw.choice(calls)
    if call.arguments:
        del call.arguments[draw.choice(sorted(call.arguments))]
    return calls


def unknown_argument(calls: Calls, draw: random.Random) -> Calls:
    draw.choice(calls).arguments["no_such_parameter"] = 1
    return calls


def other_name(calls: Calls, draw: random.Random) -> Calls:
    index = draw.randrange(len(calls))
    calls[index] = ToolCall(calls[index].name + draw.choice(["_", "x", ".y"]), calls[index].arguments)
    return calls


def one_more(calls: Calls, draw: random.Random) -> Calls:
    return [*calls, copy.deepcopy(draw.choice(calls))]


def one_less(calls: Calls, draw: random.Random) -> Calls:
    left_out = draw.randrange(len(calls))
    return [call for index, call in enumerate(calls) if index != left_out]


def another_order(calls: Calls, draw: random.Random) -> Calls:
    return draw.sample(calls, len(calls))


MUTATIONS: tuple[Callable[[Calls, random.Random], Calls], ...] = (
    other_value,
    missing_argument,
    unknown_argument,
    other_name,
    one_more,
    one_less,
    another_order,
)


def completion(calls: Calls, draw: random.Random) -> str:
    """The calls as a completion: right, mutated, with words or a thought before it, broken, or no calls at all."""
    calls = copy.deepcopy(calls)
    if draw.random() > RIGHT_SHARE and calls:
        calls = draw.choice(MUTATIONS)(calls, draw)
    text = completion_text(calls) if calls else draw.choice(WORDS)
    roll = draw.random()
    if roll < 0.03:
        return draw.choice(WORDS)
    if roll < 0.05:
        return f"{text}\n{BROKEN}"
    if roll < 0.15:
        return f"<think>\nI think of <tool_call> tags.\n</think>\n\n{text}"
    return f"Let me see.\n{text}" if roll < 0.2 else text


def single_turn(item: BfclItem, draw: random.Random) -> str:
    if item.answer is not None:
        return completion(reference_calls(item), draw)
    if draw.random() < 0.5 or not item.functions:
        return draw.choice([*WORDS, BROKEN])
    return completion([ToolCall(draw.choice(item.functions)["name"], {})], draw)


def multi_turn(item: BfclItem, draw: random.Random) -> list[list[str]]:
    """Turns of steps: mostly the reference's calls, all at once or one by one, some mutated; some are cut off."""
    turns: list[list[str]] = []
    for calls in reference_turns(item):
        wrong = draw.random() < 0.08
        steps = [calls] if draw.random() < 0.5 else [[call] for call in calls]
        texts = [completion(step, draw) if wrong else completion_text(step) for step in steps if step]
        if draw.random() < 0.02:  # a model that never ends its turn is cut off there
            turns.append((texts or [completion_text([ToolCall("ls", {})])]) * 21)
            return turns
        turns.append([*texts, draw.choice(WORDS)])
    return turns


def agentic(item: BfclItem, draw: random.Random) -> list[list[str]]:
    """One turn of some calls and last words, right, wrong, after a thought, or followed by nothing but calls."""
    looks = [completion_text([ToolCall("look", {"query": word})]) for word in WORDS[: draw.randrange(3)]]
    said = draw.choice([final_words(item), final_words(item).upper(), str(draw.choice(item.answer or [""]))])
    said = draw.choice([said, said, f"<think>\n{said}\n</think>\n\n{draw.choice(WORDS)}", f"x{said}y", BROKEN])
    roll = draw.random()
    if roll < 0.05:
        return [looks]
    return [[*looks, f"<think>\nSo it is.\n</think>\n\n{said}" if roll < 0.3 else said]]


def outputs(seed: int, version: Version = V3) -> dict[str, dict[str, Output]]:
    """Category, then item, to its output; the same for the same seed."""
    found: dict[str, dict[str, Output]] = {}
    for category in version.categories:
        found[category] = {}
        for item in read_category(category, version):
            draw = random.Random(f"{seed} {item.id}")
            make = agentic if item.agentic else multi_turn if item.multi_turn else single_turn
            found[category][item.id] = make(item, draw)
    return found


def write_results(folder: Path, model: str, made: dict[str, dict[str, Output]], version: Version = V3) -> None:
    """The outputs as the files that the package's evaluation reads, as if `model` had written them."""
    place = folder / model.replace("/", "_")
    place.mkdir(parents=True, exist_ok=True)
    for category, texts in made.items():
        # The package hands its checker what stands behind the thought.
        rows: list[dict[str, Any]] = [{"id": name, "result": stripped(output)} for name, output in texts.items()]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (place / f"{version.prefix}_{category}_result.json").write_text(lines, "utf-8")


def stripped(output: Output) -> Any:
    """An output without thoughts, as `_parse_query_response_prompting` of the package's handler leaves it."""
    if not isinstance(output, str):
        return [[stripped(text) for text in turn] for turn in output]
    return output.split("</think>")[-1].lstrip("\n") if "</think>" in output else output
