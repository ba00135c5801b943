"""The outcome reward: is the completion well formed, and are its calls the reference's?

R_out = R_format + R_correct, after ToolRL (arXiv 2504.13958). Two modes:

`strict`  ours, the default: layout of Qwen3 or of ToolRL, white space free; values compared as typed JSON; calls
          matched one to one so that the sum is largest; a call where none is due costs -3.
`compat`  ToolRL's: its exact layout, newline for newline; values compared with Python's `==` (true equals 1);
          calls matched greedily in the reference's order; where no call is due R_correct is 0 whatever was done.

Both modes read the calls with `parse_completion`; ToolRL's own reader differs on broken completions only (it finds a
call inside a thought that was never closed, and wants each call on one line). All functions are pure, and none looks
at how good the thought is: that is the judge's matter (see `awpo.judge`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from awpo.chat import CALL, CALL_END, END_TOKENS, RESPONSE, RESPONSE_END, THINK, THINK_END, parse_completion
from awpo.types import Completion, Instance, Message, ToolCall

Mode = Literal["strict", "compat"]
MODES: tuple[Mode, ...] = ("strict", "compat")

FORMAT_MAX = 1.0
CORRECT_MIN, CORRECT_MAX = -3.0, 3.0


def json_equal(left: Any, right: Any) -> bool:
    """Equality of JSON values with their types: 1 equals 1.0, but neither "1" nor true; objects in any key order."""
    if isinstance(left, str):  # most values are
        return bool(left == right)
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return left == right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(json_equal(value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(json_equal, left, right))
    return type(left) is type(right) and bool(left == right)


def jaccard(left: Iterable[str], right: Iterable[str]) -> float:
    """Multiset Jaccard index in [0, 1]: |a and b| / |a or b|; two empty collections agree (1)."""
    a, b = list(left), list(right)
    once_a, once_b = set(a), set(b)
    if len(once_a) == len(a) and len(once_b) == len(b):  # as the keys of an object are; counting takes twice as long
        shared = len(once_a & once_b)
    else:
        shared = (Counter(a) & Counter(b)).total()
    union = len(a) + len(b) - shared
    return shared / union if union else 1.0


def _agreement(reference: ToolCall, predicted: ToolCall, equal: Callable[[Any, Any], bool]) -> float:
    """J(keys g, keys p) + #{k in g : p[k] equals g[k]}, in [0, 1 + |params g|]; the two have the same name."""
    due, given = reference.arguments, predicted.arguments
    hits = sum([key in given and equal(given[key], value) for key, value in due.items()])
    return (1.0 if due.keys() == given.keys() else jaccard(due, given)) + hits


def _largest_sum(table: list[list[float]]) -> float:
    """The largest sum of entries, at most one from each row and column; all entries are >= 0."""
    if len(table) == 1:
        return max(table[0])
    if len(table[0]) == 1:
        return max(row[0] for row in table)
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(table, maximize=True)
    return sum(table[row][column] for row, column in zip(rows.tolist(), columns.tolist(), strict=True))


def _greedy_sum(table: list[list[float]]) -> float:
    """Each row in turn takes the first of the best columns left; a row that scores nothing takes none."""
    taken: set[int] = set()
    total = 0.0
    for row in table:
        free = [column for column in range(len(row)) if column not in taken]
        best = max(free, key=lambda column: row[column], default=None)
        if best is not None and row[best] > 0:
            taken.add(best)
            total += row[best]
    return total


def call_score(reference: Sequence[ToolCall], predicted: Sequence[ToolCall], *, mode: Mode = "strict") -> float:
    """ToolRL's share of a set of calls that was got right, S / S_max in [0, 1]; `reference` is not empty.

        S     = J(names G, names P) + sum over g in G of [ J(keys g, keys p) + #{k in g : p[k] equals g[k]} ]
        S_max = 1 + |G| + sum over g of |params g|

    with p the call of the same name that g is matched with (nothing where there is none). The names' calls cannot
    be matched across names, so each name is matched by itself.
    """
    equal = json_equal if mode == "strict" else _python_equal
    match = _largest_sum if mode == "strict" else _greedy_sum
    most = 1 + len(reference) + sum([len(call.arguments) for call in reference])
    if len(reference) == len(predicted) == 1:  # as most are: no matching
        (g,), (p,) = reference, predicted
        return (1 + _agreement(g, p, equal)) / most if g.name == p.name else 0.0
    score = jaccard([call.name for call in reference], [call.name for call in predicted])
    by_name: dict[str, list[ToolCall]] = {}
    for call in predicted:
        by_name.setdefault(call.name, []).append(call)
    groups: dict[str, list[ToolCall]] = {}
    for call in reference:
        groups.setdefault(call.name, []).append(call)
    for name, calls in groups.items():
        candidates = by_name.get(name)
        if candidates:
            score += match([[_agreement(g, p, equal) for p in candidates] for g in calls])
    return score / most


def _python_equal(left: Any, right: Any) -> bool:
    return bool(left == right)


def correctness(target: Message, completion: Completion, *, mode: Mode = "strict") -> float:
    """R_correct = 6 S / S_max - 3 in [-3, 3], with S and S_max as in `call_score`.

    -3 where a call is due and one cannot be read or none is there. Where no call is due: 0, but in mode `strict`
    -3 for a completion that begins a call.
    """
    _check(mode)
    called = bool(completion.tool_calls) or completion.calls_malformed
    if not target.tool_calls:
        return CORRECT_MIN if called and mode == "strict" else 0.0
    if completion.calls_malformed or not completion.tool_calls:
        return CORRECT_MIN
    share = call_score(target.tool_calls, completion.tool_calls, mode=mode)
    return (CORRECT_MAX - CORRECT_MIN) * share + CORRECT_MIN


def outcome_parts(
    reference: Message | Instance, completion: Completion | str, *, mode: Mode = "strict"
) -> tuple[float, float]:
    """(R_format, R_correct), in {0, 1} and [-3, 3]. `completion` is the model's text, or that text taken apart.

    Mode `compat` needs the text, as its format test counts newlines: TypeError for a `Completion`.
    """
    _check(mode)
    target = reference.target if isinstance(reference, Instance) else reference
    parsed = parse_completion(completion) if isinstance(completion, str) else completion
    if mode == "strict":
        formatted = not parsed.errors
    elif isinstance(completion, str):
        formatted = has_toolrl_layout(target, completion)
    else:
        raise TypeError("mode 'compat' judges the layout of the text: give the completion as a string")
    return FORMAT_MAX * formatted, correctness(target, parsed, mode=mode)


def outcome_reward(reference: Message | Instance, completion: Completion | str, *, mode: Mode = "strict") -> float:
    """R_out = R_format + R_correct, inside `reward_range(target, mode=mode)`; see `outcome_parts`."""
    return sum(outcome_parts(reference, completion, mode=mode))


def reward_range(target: Message, *, mode: Mode = "strict") -> tuple[float, float]:
    """(r_min, r_max) of the outcome reward: (-3, 4) where a call is due; where none is, (-3, 1), in `compat` (0, 1)."""
    _check(mode)
    if target.tool_calls:
        return CORRECT_MIN, FORMAT_MAX + CORRECT_MAX
    return (CORRECT_MIN if mode == "strict" else 0.0), FORMAT_MAX


def is_exact(target: Message, completion: Completion) -> bool:
    """The accuracy that evaluation reports: the reference's calls, each once, in any order, values as typed JSON.

    Layout does not count, as long as every call could be read. Where no call is due: no call, and a reply that is
    not empty (what it says is not compared).
    """
    if completion.calls_malformed or len(completion.tool_calls) != len(target.tool_calls):
        return False
    if not target.tool_calls:
        return bool(completion.content.strip())
    left = list(completion.tool_calls)
    for call in target.tool_calls:  # equality is transitive, so taking the first equal one is optimal
        for index, other in enumerate(left):
            if call.name == other.name and json_equal(call.arguments, other.arguments):
                del left[index]
                break
        else:
            return False
    return True


def has_toolrl_layout(target: Message, text: str) -> bool:
    """ToolRL's format test: the parts that the reference has, in its order, a single newline between them.

    A thought, then `<tool_call>` and `</tool_call>` on lines of their own, then `<response>`; each of the tags
    that are due exactly once (`<think>` may come again). White space and end tokens around the whole are dropped.
    """
    text = text.strip()
    for token in END_TOKENS:
        text = text.removesuffix(token).rstrip()
    parts, tags = [f"{THINK}.*?{THINK_END}"], []
    if target.tool_calls:
        parts.append(f"{CALL}\n.*?\n{CALL_END}")
        tags += [CALL, CALL_END]
    if (target.content or "").strip():
        parts.append(f"{RESPONSE}.*?{RESPONSE_END}")
        tags += [RESPONSE, RESPONSE_END]
    # Counted first: with the tags unique, the pattern has one way to match, so it cannot backtrack for long.
    return all(text.count(tag) == 1 for tag in tags) and bool(re.fullmatch("\n".join(parts), text, re.DOTALL))


def overlong_penalty(lengths: Sequence[int], maximum: int, share: float = 0.2) -> list[float]:
    """DAPO's soft penalty of long answers (arXiv 2503.14476, Eq. 13), one number in [-1, 0] per length.

        0                          for L <= (1 - share) * maximum
        (start - L) / buffer       from start = (1 - share) * maximum on, buffer = share * maximum
        -1                         for L >= maximum

    Lengths and `maximum` in tokens. Raises ValueError where maximum < 1 or share is outside (0, 1].
    """
    if maximum < 1 or not 0 < share <= 1:
        raise ValueError(f"maximum must be at least 1 and share in (0, 1], not {maximum} and {share}")
    buffer = share * maximum
    start = maximum - buffer
    return [0.0 if length <= start else max(-1.0, (start - length) / buffer) for length in lengths]


def _check(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
