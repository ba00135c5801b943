"""Verdicts on conversations: the official checker's, on known mistakes."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from evaluation.bfcl.averages import MULTI_TURN
from evaluation.bfcl.data import BfclItem, read_category
from evaluation.bfcl.decode import executable
from evaluation.bfcl.golds import reference_turns
from evaluation.bfcl.package import INSTALL
from evaluation.bfcl.process import CheckerProcess

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason=f"needs: {INSTALL}")

Turns = list[list[list[str]]]


def reference(item: BfclItem) -> Turns:
    """All calls of a turn in one step; a turn without calls has no step."""
    found = []
    for calls in reference_turns(item):
        texts = executable([{call.name: call.arguments} for call in calls])
        found.append([texts] if texts else [])
    return found


@pytest.fixture
def item() -> BfclItem:
    """Make a directory in a directory, move a file there; grep; sort; move another file and compare."""
    return read_category("multi_turn_base")[0]


MAKE = [["cd(folder='document')", "mkdir(dir_name='temp')", "mv(source='final_report.pdf',destination='temp')"]]


def test_the_reference_is_valid_at_once_and_call_by_call(checker: CheckerProcess, item: BfclItem) -> None:
    turns = reference(item)
    assert turns[0] == MAKE
    assert checker.check([(item, turns)])[0].valid
    assert checker.check([(item, [[[call] for step in turn for call in step] for turn in turns])])[0].valid


def test_known_mistakes_have_the_official_error_types(checker: CheckerProcess, item: BfclItem) -> None:
    turns = reference(item)

    def kind(first: list[list[str]], rest: Turns = turns[1:]) -> str:
        return checker.check([(item, [first, *rest])])[0].error_type

    (calls,) = MAKE
    assert kind([calls[:2]]) == "multi_turn:instance_state_mismatch"  # a call less
    assert kind([calls[::-1]]) == "multi_turn:instance_state_mismatch"  # the order counts: cd comes first
    assert (
        kind([[*calls, "mkdir(dir_name='extra')"]]) == "multi_turn:instance_state_mismatch"
    )  # a call more that writes
    assert kind([[*calls, "pwd()"]]) == ""  # a call more that only reads
    assert kind([[*calls[:2], "mv(source='final_report.pdf',destination='archive')"]]) == (
        "multi_turn:instance_state_mismatch"
    )
    assert kind([[*calls[:2], "mv(source='final_report.pdf',destination='temp',force=True)"]]) == (
        "multi_turn:instance_state_mismatch"  # an unknown argument: the call fails
    )
    assert kind([]) == "multi_turn:empty_turn_model_response"
    assert kind(MAKE, [[["cd(folder='temp')"]], *turns[2:]]) == "multi_turn:execution_response_mismatch"
    assert kind(MAKE, turns[1:-1]) == "multi_turn:force_terminated"
    assert kind(MAKE, [*turns[1:], []]) == "multi_turn:force_terminated"


def test_calls_where_none_is_due_are_judged_by_what_they_leave(checker: CheckerProcess) -> None:
    """As in V3 of the leaderboard, which does not ask that such a turn be silent."""
    item = read_category("multi_turn_miss_func")[0]
    turns = reference(item)
    silent = turns.index([])
    read, written = copy.deepcopy(turns), copy.deepcopy(turns)
    read[silent] = [["pwd()"]]
    written[silent] = [["mkdir(dir_name='extra')"]]
    assert checker.check([(item, turns)])[0].valid
    assert checker.check([(item, read)])[0].valid
    assert checker.check([(item, written)])[0].error_type == "multi_turn:instance_state_mismatch"


def a_turn_less(turns: Turns) -> Turns:
    return [*turns[:-1], []]


def reversed_calls(turns: Turns) -> Turns:
    return [[step[::-1] for step in turn] for turn in turns]


def unknown_arguments(turns: Turns) -> Turns:
    return [[[call.replace(")", ",unknown=1)") for call in step] for step in turn] for turn in turns]


@pytest.mark.parametrize("change", [list, a_turn_less, reversed_calls, unknown_arguments])
@pytest.mark.parametrize("category", MULTI_TURN)
def test_verdicts_are_those_of_the_official_function(
    checker: CheckerProcess, official: Callable[[str], Any], category: str, change: Callable[[Turns], Turns]
) -> None:
    check = official("eval_checker.multi_turn_eval.multi_turn_checker").multi_turn_checker
    for item in read_category(category)[:12]:
        turns = change(reference(item))
        entry = {"id": item.id, "initial_config": item.initial_config, "involved_classes": item.involved_classes}
        theirs = check(turns, item.answer, entry, category, f"{change.__name__}_{category}")
        ours = checker.check([(item, turns)])[0]
        assert (ours.valid, ours.error_type) == (theirs["valid"], theirs.get("error_type", ""))
        assert ours.error == theirs.get("error_message", "")[:500]
