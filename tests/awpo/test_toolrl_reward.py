"""The outcome reward against a slow reference, written from its definition alone, on thousands of perturbed calls.

The definition (ToolRL, arXiv 2504.13958): R_out = R_format + R_correct, R_correct = 6 S / S_max - 3 with

    S     = J(names G, names P) + sum over g in G of its match p of the same name [ J(keys) + #{equal values} ]
    S_max = 1 + |G| + sum over g of |params g|

The reference here tries every matching, every place where a part may end and every key; it never reads a text that
it wrote itself: what a perturbed completion says is known from how it was made.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from awpo.rewards import MODES, outcome_parts, outcome_reward, reward_range
from awpo.types import Message, ToolCall

Call = dict[str, Any]
"""{"name": .., "parameters": {..}}"""

ENOUGH = 6000


@dataclass
class Case:
    """A reference, a completion, and what the completion is known to say.

    `calls` is None where a call was begun that cannot be read; `formed` is whether strict mode accepts the layout.
    """

    due: list[Call]
    reply_due: str
    text: str
    calls: list[Call] | None
    formed: bool
    made_by: tuple[str, ...]


# The slow reference


def multiset_jaccard(left: list[str], right: list[str]) -> float:
    if not left and not right:
        return 1.0
    rest, common = list(right), 0
    for item in left:
        if item in rest:
            rest.remove(item)
            common += 1
    return common / (len(left) + len(right) - common)


def typed(value: Any) -> Any:
    """Equal for two JSON values exactly where they are the same value of the same JSON type."""
    if value is None or isinstance(value, bool | str):
        return (type(value).__name__, value)
    if isinstance(value, int | float):
        return ("number", Fraction(value))
    if isinstance(value, list):
        return ("array", [typed(item) for item in value])
    return ("object", sorted((key, typed(item)) for key, item in value.items()))


def gain(due: Call, made: Call, strict: bool) -> float:
    if due["name"] != made["name"]:
        return 0.0
    total = multiset_jaccard(list(due["parameters"]), list(made["parameters"]))
    for key in due["parameters"]:
        for other in made["parameters"]:
            if key == other:
                left, right = due["parameters"][key], made["parameters"][other]
                total += (typed(left) == typed(right)) if strict else (left == right)
    return total


def best_matching(due: list[Call], made: list[Call]) -> float:
    """The largest sum over all one-to-one matchings, each tried: the first call goes to one of `made` or to none."""
    if not due:
        return 0.0
    totals = [best_matching(due[1:], made)]
    for index, other in enumerate(made):
        if other["name"] == due[0]["name"]:  # apart, a match gains nothing: the same as none
            totals.append(gain(due[0], other, True) + best_matching(due[1:], made[:index] + made[index + 1 :]))
    return max(totals)


def greedy_matching(due: list[Call], made: list[Call]) -> float:
    """In the reference's order, each call takes the best of those that are left, the first where several are."""
    left, total = list(made), 0.0
    for call in due:
        best, best_gain = None, 0.0
        for other in left:
            if gain(call, other, False) > best_gain:
                best, best_gain = other, gain(call, other, False)
        if best is not None:
            left = [other for other in left if other is not best]
            total += best_gain
    return total


def slow_correct(case: Case, strict: bool) -> float:
    if not case.due:
        return -3.0 if strict and case.calls != [] else 0.0
    if not case.calls:
        return -3.0
    names = multiset_jaccard([call["name"] for call in case.due], [call["name"] for call in case.calls])
    matched = (best_matching if strict else greedy_matching)(case.due, case.calls)
    most = 1 + len(case.due)
    for call in case.due:
        most += len(call["parameters"])
    return 6 * (names + matched) / most - 3


def slow_layout(case: Case) -> bool:
    """ToolRL's layout: the parts that are due, one newline between them; tries every newline as a part's end."""
    text = case.text.strip()
    while text.endswith(("<|im_end|>", "<|endoftext|>")):
        text = text.removesuffix("<|im_end|>").removesuffix("<|endoftext|>").rstrip()
    wanted = [("<think>", "</think>")]
    if case.due:
        wanted.append(("<tool_call>\n", "\n</tool_call>"))
    if case.reply_due:
        wanted.append(("<response>", "</response>"))
    for opening, closing in wanted[1:]:
        if text.count(opening.strip()) != 1 or text.count(closing.strip()) != 1:
            return False
    lines = text.split("\n")
    for cuts in itertools.combinations(range(1, len(lines)), len(wanted) - 1):
        places = [0, *cuts, len(lines)]
        parts = ["\n".join(lines[start:stop]) for start, stop in itertools.pairwise(places)]
        fits = [
            part.startswith(opening) and part.endswith(closing) and len(part) >= len(opening + closing)
            for part, (opening, closing) in zip(parts, wanted, strict=True)
        ]
        if all(fits):
            return True
    return False


def slow_parts(case: Case, mode: str) -> tuple[float, float]:
    if mode == "strict":
        return float(case.formed), slow_correct(case, True)
    return float(slow_layout(case)), slow_correct(case, False)


# References and perturbed calls

VALUES: list[Any] = [
    0, 1, 1.0, True, False, None, "1", "", "Paris", "paris", "Grüße", [1], [True], [1.0, "1"], [], {}, {"a": 1},
    {"a": [1, {"b": None}]}, -2.5, 10**20, "a\nb", 'say "x"',
]  # fmt: skip
NAMES = ["get_weather", "clock", "f", "Search Managers"]
KEYS = ["city", "day", "n", "unit of measure"]


def draw_call(dice: random.Random) -> Call:
    keys = dice.sample(KEYS, dice.randint(0, len(KEYS)))
    return {"name": dice.choice(NAMES), "parameters": {key: copy.deepcopy(dice.choice(VALUES)) for key in keys}}


def alike(value: Any, dice: random.Random) -> Any:
    """A value that is nearly the same: another type, another case, one place deeper or another order."""
    if isinstance(value, list) and value and dice.random() < 0.6:
        place = dice.randrange(len(value))
        return [alike(item, dice) if index == place else item for index, item in enumerate(value)]
    if isinstance(value, dict) and value and dice.random() < 0.6:
        place = dice.choice(list(value))
        return {key: alike(item, dice) if key == place else item for key, item in reversed(value.items())}
    options: list[Any] = [str(value), [value], {"a": value}, None]
    if isinstance(value, bool):
        options += [int(value), float(value), not value]
    elif isinstance(value, int) and abs(value) < 2**50:
        options += [float(value), bool(value), value + 1]
    elif isinstance(value, float):
        options += [int(value), value + 0.5, bool(value)]
    elif isinstance(value, str):
        options += [value.upper(), value + " ", int(value) if value.isdigit() else value]
    elif isinstance(value, list):
        options += [value[::-1], [*value, 1]]
    return dice.choice(options)


def some_parameter(calls: list[Call], dice: random.Random) -> tuple[Call, str] | None:
    places = [(call, key) for call in calls for key in call["parameters"]]
    return dice.choice(places) if places else None


def perturb(calls: list[Call], kind: str, dice: random.Random) -> None:
    """One change in place; nothing where there is nothing to change."""
    place = some_parameter(calls, dice)
    if kind == "add a call" or (kind == "a call of the same name" and not calls):
        calls.insert(dice.randint(0, len(calls)), draw_call(dice))
    elif kind == "reorder calls":
        dice.shuffle(calls)
    elif not calls:
        return
    elif kind == "drop a call":
        calls.pop(dice.randrange(len(calls)))
    elif kind == "rename a call":
        dice.choice(calls)["name"] = dice.choice([*NAMES, "F", "get weather", "none"])
    elif kind == "duplicate a call":
        calls.append(copy.deepcopy(dice.choice(calls)))
    elif kind == "a call of the same name":
        calls.append({**draw_call(dice), "name": dice.choice(calls)["name"]})
    elif kind == "add a parameter":
        call = dice.choice(calls)
        call["parameters"][dice.choice([*KEYS, "extra", "City"])] = copy.deepcopy(dice.choice(VALUES))
    elif place is None:
        return
    else:
        call, key = place
        if kind == "drop a parameter":
            del call["parameters"][key]
        elif kind == "rename a parameter":
            call["parameters"][dice.choice([*KEYS, key.upper(), key + "s"])] = call["parameters"].pop(key)
        elif kind == "reorder parameters":
            call["parameters"] = dict(dice.sample(list(call["parameters"].items()), len(call["parameters"])))
        elif kind == "change a value":
            call["parameters"][key] = alike(call["parameters"][key], dice)
        else:
            assert kind == "another value"
            call["parameters"][key] = copy.deepcopy(dice.choice(VALUES))


PERTURBATIONS = [
    "add a call", "drop a call", "rename a call", "duplicate a call", "a call of the same name", "reorder calls",
    "add a parameter", "drop a parameter", "rename a parameter", "reorder parameters", "change a value",
    "another value",
]  # fmt: skip


# Layouts: (calls, reply, dice) -> text, what can be read of the calls, whether it is well formed

Layout = Callable[[list[Call], str, random.Random], tuple[str, list[Call] | None, bool]]


def line(call: Call) -> str:
    return json.dumps(call, ensure_ascii=False)


def block(lines: list[str]) -> list[str]:
    return ["\n".join(["<tool_call>", *lines, "</tool_call>"])] if lines else []


def response(reply: str) -> list[str]:
    return [f"<response>{reply}</response>"] if reply else []


def toolrl(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    thought = dice.choice(["t", "", "line\nline", "so <response> it is", " \n "])
    parts = [f"<think>{thought}</think>", *block([line(call) for call in calls]), *response(reply)]
    return "\n".join(parts), calls, bool(calls or reply)


def qwen3(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    parts = [reply] if reply else []
    for call in calls:
        parts += block([line({"name": call["name"], "arguments": call["parameters"]})])
    return "<think>\nt\n</think>\n\n" + "\n".join(parts), calls, bool(parts)


def more_space(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    text, read, formed = toolrl(calls, reply, dice)
    return dice.choice([text.replace("</think>", "</think>\n"), f" \n{text}\n ", f"{text}<|im_end|>\n"]), read, formed


def no_newlines(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    parts = ["<think>t</think>"]
    if calls:
        parts.append(f"<tool_call>{chr(10).join(map(line, calls))}</tool_call>")
    return "".join([*parts, *response(reply)]), calls, bool(calls or reply)


def no_thought(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    return "\n".join(block([line(call) for call in calls]) + response(reply)), calls, bool(calls or reply)


def no_thinks_opening(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    text, read, formed = toolrl(calls, reply, dice)
    return text.removeprefix("<think>"), read, formed


def no_thinks_end(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    """All of it is the thought then: no call is there."""
    text, _, _ = toolrl(calls, reply, dice)
    return text.replace("</think>", ""), [], False


def two_thoughts(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    text, read, _ = toolrl(calls, reply, dice)
    return "<think>u</think>" + text, read, False


def text_before(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    text, read, _ = toolrl(calls, reply, dice)
    return "Well. " + text, read, False


def text_behind(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    """A reply of its own, unless there is one already."""
    text, read, _ = toolrl(calls, reply, dice)
    return text + " Done.", read, not reply


def text_on_both_sides(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    inner = "\n".join(["Before.", *block([line(call) for call in calls]), "Behind."])
    return f"<think>t</think>\n{inner}", calls, not calls


def no_calls_end(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    """The call in front of a missing end is read; a response in its block is no call, so nothing can be read."""
    text, read, formed = toolrl(calls, reply, dice)
    if not calls:
        return text, read, formed
    return text.replace("\n</tool_call>", ""), None if reply else calls, False


def no_calls_opening(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    text, _, formed = toolrl(calls, reply, dice)
    return text.replace("<tool_call>\n", ""), [], formed and not calls


def no_responses_end(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    text, read, formed = toolrl(calls, reply, dice)
    return text.removesuffix("</response>"), read, formed and not reply


def a_block_each(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    """One block holds all calls with "parameters"."""
    parts = ["<think>t</think>", *(part for call in calls for part in block([line(call)])), *response(reply)]
    return "\n".join(parts), calls, bool(calls or reply) and len(calls) < 2


def an_extra_key(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    lines = [line({**call, "id": 1}) for call in calls]
    return "\n".join(["<think>t</think>", *block(lines), *response(reply)]), calls, bool(reply) and not calls


def broken_json(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    """One of the calls cannot be read, whatever the others say."""
    lines = [line(call) for call in calls] or ["{}"]
    index = dice.randrange(len(lines))
    whole = lines[index]
    lines[index] = dice.choice(
        [
            whole[:-1], whole[: len(whole) // 2], "", "f(city='Paris')", whole.replace('"', "'"), whole[:-1] + ",}",
            f"[{whole}]", '{"name": "f"}', '{"name": "f", "parameters": [1]}', '{"parameters": {}}', "3",
            '{"name": 3, "parameters": {}}', whole + " and", '"f"', "null", '{"name": "f", "parameters": "{}"}',
        ]
    )  # fmt: skip
    if not lines[index] and len(lines) > 1:
        lines[index] = "..."
    return "\n".join(["<think>t</think>", *block(lines), *response(reply)]), None, False


def nothing(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    return dice.choice(["", " \n", "<|im_end|>", "<think>t</think>"]), [], False


def bare_reply(calls: list[Call], reply: str, dice: random.Random) -> tuple[str, list[Call] | None, bool]:
    return "<think>t</think>\nI cannot help.", [], True


WHOLE: list[Layout] = [toolrl, qwen3]
LAYOUTS: list[Layout] = [
    more_space, no_newlines, no_thought, no_thinks_opening, no_thinks_end, two_thoughts, text_before, text_behind,
    text_on_both_sides, no_calls_end, no_calls_opening, no_responses_end, a_block_each, an_extra_key, broken_json,
    nothing, bare_reply,
]  # fmt: skip


def make_case(due: list[Call], reply_due: str, dice: random.Random) -> Case:
    calls, kinds = copy.deepcopy(due), dice.choices(PERTURBATIONS, k=dice.choice([0, 1, 1, 2, 3, 5]))
    for kind in kinds:
        if len(calls) < 5 or "call" not in kind:
            perturb(calls, kind, dice)
    reply = dice.choice([reply_due, reply_due, "", "Sunny."])
    layout = dice.choice(WHOLE) if dice.random() < 0.6 else dice.choice(LAYOUTS)
    text, read, formed = layout(calls, reply, dice)
    return Case(due, reply_due, text, read, formed, (layout.__name__, *kinds))


def generated_cases(count: int) -> list[Case]:
    dice = random.Random(2504)
    cases = []
    for _ in range(count):
        due = [draw_call(dice) for _ in range(dice.choice([0, 1, 1, 2, 3, 4]))]
        if len(due) > 1 and dice.random() < 0.5:
            due[-1]["name"] = due[0]["name"]
        cases.append(make_case(due, "" if due and dice.random() < 0.7 else "It is sunny.", dice))
    return cases


def compare(cases: list[Case]) -> list[dict[str, tuple[float, float]]]:
    """The reference's parts of each case by mode, once ours are known to be the same."""
    results = []
    for case in cases:
        calls = tuple(ToolCall(call["name"], call["parameters"]) for call in case.due)
        reference = Message("assistant", case.reply_due or None, calls)
        results.append({mode: slow_parts(case, mode) for mode in MODES})
        for mode, expected in results[-1].items():
            found = outcome_parts(reference, case.text, mode=mode)
            assert found[0] == expected[0], (mode, case)
            assert abs(found[1] - expected[1]) <= 1e-12, (mode, case)
            assert abs(outcome_reward(reference, case.text, mode=mode) - sum(expected)) <= 1e-12
            low, high = reward_range(reference, mode=mode)
            assert low <= sum(expected) <= high
    return results


def test_generated_calls() -> None:
    cases = generated_cases(ENOUGH)
    results = compare(cases)
    # the cases reach every kind, and the two modes apart in each of the ways in which they differ
    kinds = Counter(kind for case in cases for kind in case.made_by)
    assert min(kinds[kind] for kind in [*PERTURBATIONS, *(layout.__name__ for layout in [*WHOLE, *LAYOUTS])]) > 50
    assert sum(bool(case.calls) for case in cases) > 3000
    assert len({round(result["strict"][1], 9) for result in results}) > 300
    assert sum(result["strict"][0] != result["compat"][0] for result in results) > 500
    apart = [case for case, result in zip(cases, results, strict=True) if result["strict"][1] != result["compat"][1]]
    assert sum(not case.due for case in apart) > 100
    assert sum(bool(case.due) for case in apart) > 100
    assert (
        sum(best_matching(case.due, case.calls or []) > greedy_matching(case.due, case.calls or []) for case in apart)
        > 2
    )


def test_the_calls_of_toolrls_own_demonstrations(shared_data: Path) -> None:
    """The references are real: names with blanks, long values, dates, several calls in one step."""
    dice = random.Random(13958)
    cases = []
    for row in json.loads((shared_data / "toolrl" / "rlla_sft_first260.json").read_text("utf-8")):
        due, reply = [], ""
        _, found, rest = row["output"].rpartition("</think>")[2].partition("<tool_call>")
        if found:
            due = [json.loads(text) for text in rest.partition("</tool_call>")[0].strip().split("\n")]
        if "<response>" in row["output"].rpartition("</think>")[2]:
            reply = row["output"].rpartition("<response>")[2].partition("</response>")[0].strip()
        if 0 < len(due) <= 4:
            cases += [make_case(due, reply, dice) for _ in range(8)]
    assert len(cases) > 1000
    compare(cases)
