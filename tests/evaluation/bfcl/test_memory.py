"""Version 4's memories: what a model keeps in one conversation is there in the next, and in the questions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from awpo.config import EvaluationConfig
from awpo.types import ToolCall
from evaluation.bfcl.benchmark import evaluate_category
from evaluation.bfcl.data import BfclItem, read_category, read_sessions
from evaluation.bfcl.golds import completion_text
from evaluation.bfcl.memory import EMPTY, converse_with_memory
from evaluation.bfcl.package import Package
from evaluation.bfcl.process import CheckerProcess
from evaluation.bfcl.versions import V4
from evaluation.generate import Generated, Question, Sampling
from tests.evaluation.bfcl.escape import escaped

pytestmark = pytest.mark.usefixtures("v4")
RUNNABLE = ("memory_kv", "memory_rec_sum")
FIRST = "My name is Michael"  # the first conversation of the scenario "customer"
QUESTION = "What is my first name?"


def asked(category: str, *numbers: int) -> list[BfclItem]:
    items = read_category(category, V4)
    return [items[number] for number in numbers]


class Keeping:
    """A model that keeps `word` in its memory at the first turn of every conversation, and answers `reply`."""

    identity: Mapping[str, Any] = {"model": "keeps"}

    def __init__(self, category: str, reply: str = "Nothing.", failing: str = "") -> None:
        self.category, self.reply, self.failing = category, reply, failing
        self.questions: list[Question] = []

    def answer(self, questions: Any, sampling: Sampling, **_: Any) -> list[list[Generated]]:
        self.questions += questions
        return [[self._say(question)] for question in questions]

    def room(self, question: Question) -> None:
        return None

    def _say(self, question: Question) -> Generated:
        _, first, *rest = question.messages
        if self.failing and self.failing in first.content:
            return Generated("", 0, "failed", failure="the server is gone")
        if rest:
            return Generated(self.reply, 1)
        word = f"kept_{len(self.questions)}"
        call = ToolCall("core_memory_add", {"key": "k" + "x" * (len(self.questions) % 50), "value": word})
        if self.category == "memory_rec_sum":
            call = ToolCall("memory_append", {"text": f"{word} "})
        return Generated(completion_text([call]), 1)


@pytest.mark.parametrize("category", RUNNABLE)
def test_what_was_kept_is_shown_in_the_next_conversation_and_in_questions(category: str) -> None:
    """Two questions of one scenario: both start from what the conversations left, not from what the other one did."""
    model = Keeping(category, "Michael")
    items = asked(category, 0, 1)
    found, (row,) = evaluate_category(model, items, EvaluationConfig(), available=155)
    sessions = read_sessions(category, "customer", V4)
    opening = [question for question in model.questions if len(question.messages) == 2]
    assert len(opening) == len(sessions) + 2
    assert FIRST in opening[0].messages[1].content
    assert "There is no content in the" in opening[0].messages[0].content
    for before, question in pairwise(opening[:7]):  # a core memory has room for seven entries
        assert f"kept_{model.questions.index(before) + 1}" in question.messages[0].content
    one, two = opening[-2:]
    assert one.messages[0].content == two.messages[0].content  # the first question's own writing is lost
    assert "{'answer'" in one.messages[0].content
    assert one.messages[1].content == QUESTION
    assert [(item.correct, item.error_type) for item in found] == [(True, ""), (False, "agentic:answer_not_found")]
    assert (row["memory_conversations"], row["memory_conversations_broken_off"]) == (len(sessions), 0)
    turns = sum(len(session.turns) for session in sessions)
    assert row["memory_tokens"] == turns + len(sessions)  # one an answer, the calls and what follows them
    assert sum(item.response_tokens for item in found) == 4
    assert (row["accuracy"], row["items"], row["dialogues"], row["checker_failures"]) == (0.5, 2, 1, 0)


@pytest.mark.parametrize("category", RUNNABLE)
def test_items_do_not_depend_on_what_a_model_kept(category: str) -> None:
    """So that two models' answers to a question are compared: the hash is that of the question alone."""
    hashes = []
    for reply in ("Michael", "Nobody"):
        found, _ = evaluate_category(Keeping(category, reply), asked(category, 0), EvaluationConfig(), available=155)
        assert found[0].dialogue_id == f"{category}-customer"
        assert json.loads(found[0].completion)[0][-1] == reply
        hashes.append(found[0].prompt_hash)
    assert hashes[0] == hashes[1]


def test_a_failed_request_while_a_memory_is_filled_leaves_its_questions_without_a_verdict() -> None:
    items = asked("memory_kv", 0, 30)
    assert [item.scenario for item in items] == ["customer", "healthcare"]
    model = Keeping("memory_kv", "x", failing=FIRST)
    found, (row,) = evaluate_category(model, items, EvaluationConfig(), available=155)
    assert [item.correct for item in found] == [None, False]
    assert found[0].detail == "the server is gone"
    assert (row["missing"], row["items"]) == (1, 1)
    assert QUESTION not in [question.messages[-1].content for question in model.questions]


def test_a_conversation_that_breaks_off_leaves_the_memory_as_it_was() -> None:
    class Narrow(Keeping):
        def _say(self, question: Question) -> Generated:
            second = "order" in question.messages[0].content or len(self.questions) > 12
            return Generated("", 0, "no_room") if second else super()._say(question)

    model = Narrow("memory_kv")
    with CheckerProcess(version=V4) as checker:
        held, numbers = converse_with_memory(model, asked("memory_kv", 0), Sampling(max_tokens=9, seed=0), checker)
    assert numbers["memory_conversations"] == 10
    assert numbers["memory_conversations_broken_off"] > 5
    assert held[0].ending == "no_room"
    last = model.questions[-1].messages[0].content
    assert "kept_1" in last


OFFICIAL = """
from itertools import pairwise
from pathlib import Path
module = official("eval_checker.multi_turn_eval.func_source_code." + asked["module"])
answer = []
for name in asked["ids"]:
    memory = getattr(module, asked["class"])()
    setting = {"model_result_dir": Path("results"), "scenario": "customer", "test_id": name}
    memory._load_scenario(setting)
    shown = memory._dump_core_memory_to_context()
    answer.append([shown, [json.loads(json.dumps(eval("memory." + call))) for call in asked["calls"]]])
    memory._flush_memory_to_local_file()
"""
CALLS = {
    "memory_kv": [
        "core_memory_add(key='tea_time',value='five')",
        "core_memory_add(key='No Key',value='x')",
        "core_memory_add(key='coffee_time',value=7)",
        "core_memory_key_search(query='tea',k=2)",
        "archival_memory_add(key='long_tea',value='ü \"quoted\"')",
        "core_memory_retrieve_all()",
        "core_memory_remove(key='coffee_time')",
        "archival_memory_retrieve(key='long_tea')",
    ],
    "memory_rec_sum": [
        "memory_append(text='tea at five ü\\n')",
        "memory_replace(old_text='five',new_text='six')",
        "memory_retrieve()",
        "memory_update(text='x' * 10001)",
    ],
}


@pytest.mark.parametrize("category", RUNNABLE)
def test_snapshots_are_what_the_official_files_are(
    ask_v4: Callable[[str, Any], Any], checker_v4: CheckerProcess, category: str
) -> None:
    """Two conversations with the same calls, by the package with its files and here without."""
    sessions = read_sessions(category, "customer", V4)[:2]
    ids = [session.id for session in sessions]
    job = {"module": category, "class": sessions[0].involved_classes[0], "ids": ids, "calls": CALLS[category]}
    theirs = ask_v4(OFFICIAL, job)
    snapshot = EMPTY
    for session, (shown, results) in zip(sessions, theirs, strict=True):
        item = _starting(session, snapshot)
        assert checker_v4.remember(item).context == shown
        ours = checker_v4.execute(item, CALLS[category])
        assert [json.loads(result) for result in ours] == results
        snapshot = checker_v4.remember(item, [CALLS[category]]).snapshot


def _starting(item: BfclItem, snapshot: str) -> BfclItem:
    return dataclasses.replace(item, initial_config={item.involved_classes[0]: {"snapshot": snapshot}})


def test_a_memory_lost_with_its_process_is_made_again(checker_v4: CheckerProcess) -> None:
    session = _starting(read_sessions("memory_rec_sum", "customer", V4)[0], json.dumps({"memory": "before "}))
    step = ["memory_append(text='after')"]
    checker_v4.execute(session, step)
    assert checker_v4._process is not None
    checker_v4._stop()
    again = checker_v4.remember(session, [step])
    assert json.loads(again.snapshot) == {"memory": "before after"}
    assert again.context == "before after"


@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/passwd').read()",
        "__import__('socket').socket()",
        "__import__('pathlib').Path('x').write_text('x')",
    ],
)
def test_a_memory_reaches_no_file_and_no_network(checker_v4: CheckerProcess, code: str, v4: Package) -> None:
    session = _starting(read_sessions("memory_rec_sum", "notetaker", V4)[0], EMPTY)
    (result,) = checker_v4.execute(session, [f"memory_append(text={escaped(code)})"])
    assert "refused while model output is executed" in result
    assert not Path("x").exists()
