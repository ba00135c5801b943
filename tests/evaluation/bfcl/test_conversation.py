"""Multi-turn conversations: what is asked, executed and kept, beside the official handler's loop."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from awpo.chat import parse_completion
from awpo.types import Message, ToolCall
from evaluation.bfcl.averages import MULTI_TURN
from evaluation.bfcl.conversation import MORE_FUNCTIONS, MOST_STEPS, Conversation, answer_text, converse
from evaluation.bfcl.data import BfclItem, read_category
from evaluation.bfcl.decode import decoded_calls
from evaluation.bfcl.golds import completion_text, reference_turns
from evaluation.bfcl.package import INSTALL
from evaluation.bfcl.process import CheckerProcess
from evaluation.generate import Generated, Question, Sampling

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason=f"needs: {INSTALL}")

LS = completion_text([ToolCall("ls", {})])


def call(name: str, **arguments: Any) -> str:
    return completion_text([ToolCall(name, arguments)])


def told(checker: CheckerProcess, item: BfclItem, texts: Sequence[str]) -> Conversation:
    """The conversation after these answers."""
    conversation = Conversation(item)
    for text in texts:
        conversation.take(Generated(text, 1), checker)
    checker.check([(item, [])])  # the next one begins anew
    return conversation


@pytest.fixture
def item() -> BfclItem:
    return read_category("multi_turn_base")[0]


def test_results_go_back_as_messages_of_the_tools(checker: CheckerProcess, item: BfclItem) -> None:
    calls = [ToolCall("cd", {"folder": "document"}), ToolCall("pwd", {}), ToolCall("no_such_function", {})]
    held = told(checker, item, [f"<think>\nFirst there.\n</think>\n\n{completion_text(calls)}"])
    asked, said, *results = held.question.messages
    assert asked == item.turns[0][0]
    assert said == Message("assistant", "", tuple(calls), "First there.")
    assert results == [
        Message("tool", '{"current_working_directory": "document"}', name="cd"),
        Message("tool", '{"current_working_directory": "/workspace/document"}', name="pwd"),
        Message("tool", "Error during execution: name 'no_such_function' is not defined", name="no_such_function"),
    ]
    assert held.ending == ""


@pytest.mark.parametrize("text", ["Done.", "", "<tool_call>\n{broken\n</tool_call>"])
def test_a_step_without_a_call_that_can_be_read_ends_the_turn(
    checker: CheckerProcess, item: BfclItem, text: str
) -> None:
    held = told(checker, item, [LS, text])
    assert [len(turn) for turn in held.answers] == [2, 0]
    assert held.question.messages[-2:] == (Message("assistant", text), item.turns[1][0])


def test_held_out_functions_join_at_their_turn(checker: CheckerProcess) -> None:
    item = read_category("multi_turn_miss_func")[3]
    ((turn, joining),) = item.held_out.items()
    held = Conversation(item)
    before = [tool.name for tool in held.question.tools]
    assert not {"find", "ls"} & set(before)
    for number in range(turn):
        assert MORE_FUNCTIONS not in [message.content for message in held.question.messages]
        held.take(Generated(f"Turn {number} is done.", 1), checker)
    assert [tool.name for tool in held.question.tools] == [*before, "find", "ls"]
    assert held.question.messages[-1] == Message("user", MORE_FUNCTIONS)
    assert [document["name"] for document in joining] == ["find", "ls"]


def test_a_model_that_never_ends_its_turn_is_cut_off_and_fails(checker: CheckerProcess, item: BfclItem) -> None:
    held = told(checker, item, [LS] * MOST_STEPS)
    assert held.ending == ""
    held = told(checker, item, [LS] * (MOST_STEPS + 1))
    assert held.ending == "cut_off"
    assert [len(turn) for turn in held.steps] == [MOST_STEPS + 1]
    assert checker.check([(item, held.steps)])[0].error_type == "multi_turn:force_terminated"


def test_the_end_comes_after_the_last_turn(checker: CheckerProcess, item: BfclItem) -> None:
    assert told(checker, item, ["Done."] * 3).ending == ""
    assert told(checker, item, ["Done."] * 4).ending == "done"


def test_an_answer_that_did_not_come_ends_the_conversation(checker: CheckerProcess, item: BfclItem) -> None:
    for finish, ending in (("failed", "failed"), ("no_room", "no_room"), ("length", "")):
        held = Conversation(item)
        held.take(Generated("", 0, finish), checker)  # type: ignore[arg-type]
        assert held.ending == ending


def test_calls_that_came_as_structure_are_executed_and_kept_as_text(checker: CheckerProcess, item: BfclItem) -> None:
    answer = Generated("I look.", 3, tool_calls=(ToolCall("ls", {"a": True}),))
    held = Conversation(item)
    held.take(answer, checker)
    checker.check([(item, [])])
    assert held.steps == [[["ls(a=True)"]]]
    text = answer_text(answer)
    assert decoded_calls(parse_completion(text)) == [{"ls": {"a": True}}]
    assert parse_completion(text).content == "I look."
    assert answer_text(Generated(LS, 1)) == LS


class Rounds:
    """Answers with the n-th of its texts to an item's n-th question, and counts how many were asked at once."""

    identity: Mapping[str, Any] = MappingProxyType({"model": "texts"})

    def __init__(self, texts: dict[str, list[str]], items: Sequence[BfclItem]) -> None:
        self.texts = {(item.turns[0][0].content or ""): iter(texts[item.id]) for item in items}
        self.sizes: list[int] = []

    def answer(self, questions: Sequence[Question], sampling: Sampling, **_: Any) -> list[list[Generated]]:
        self.sizes.append(len(questions))
        return [[Generated(next(self.texts[question.messages[0].content or ""]), 1)] for question in questions]

    def room(self, question: Question) -> None:
        return None


def test_conversations_go_on_together(checker: CheckerProcess) -> None:
    items = read_category("multi_turn_base")[:3]
    texts = {item.id: ["Done."] * (len(item.turns) + 3) for item in items}
    texts[items[1].id].insert(0, LS)
    generator = Rounds(texts, items)
    told_of: list[int] = []
    held = converse(generator, items, Sampling(), checker, progress=lambda done, total, what="": told_of.append(done))
    rounds = [len(item.turns) for item in items]
    rounds[1] += 1
    assert generator.sizes == [sum(needed > done for needed in rounds) for done in range(max(rounds))]
    assert [conversation.ending for conversation in held] == ["done"] * 3
    assert told_of == sorted(told_of)
    assert told_of[-1] == 3
    for item in items:
        checker.check([(item, [])])


@pytest.mark.parametrize("category", MULTI_TURN)
def test_what_is_asked_is_what_the_official_handler_asks(
    checker: CheckerProcess, official: Callable[[str], Any], category: str
) -> None:
    """The same answers given to the official loop and to ours: equal messages, tools and results, step by step."""
    generation = official("_llm_response_generation")
    for item in read_category(category)[:6]:
        texts = [
            [completion_text(calls), call("no_such_function", a=1), "Done."] if calls else ["I cannot."]
            for calls in reference_turns(item)
        ]
        handler = _scripted(official, [text for turn in texts for text in turn])
        (entry,) = generation.process_multi_turn_test_case([_entry(official, category, item.id)])
        result, _ = handler.inference_multi_turn_FC(entry, False, True)
        ours = Conversation(item)
        asked = []
        for text in (text for turn in texts for text in turn):
            asked.append(ours.question)
            ours.take(Generated(text, 1), checker)
        checker.check([(item, [])])
        assert ours.ending == "done"
        assert [len(turn) for turn in ours.answers] == [len(turn) for turn in result]
        assert len(asked) == len(handler.asked)
        for question, (messages, names) in zip(asked, handler.asked, strict=True):
            assert [tool.name for tool in question.tools] == names
            assert [(message.role, message.content or "") for message in question.messages] == messages


def _entry(official: Callable[[str], Any], category: str, name: str) -> dict[str, Any]:
    folder = official("constants.eval_config").PROMPT_PATH
    rows = official("utils").load_file(folder / f"BFCL_v3_{category}.json")
    return next(row for row in rows if row["id"] == name)


def _scripted(official: Callable[[str], Any], texts: Sequence[str]) -> Any:
    """The official handler of OpenAI's chat format, with answers from a list in place of an endpoint's."""
    base = official("model_handler.api_inference.openai_completion").OpenAICompletionsHandler
    answers = iter(texts)

    class Scripted(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.model_name = f"scripted-FC-{id(self)}"
            self.model_name_underline_replaced = self.model_name.replace("-", "_")
            self.model_style = official("model_handler.model_style").ModelStyle.OpenAI_Completions
            self.is_fc_model = True
            self.asked: list[Any] = []

        def _query_FC(self, inference_data: dict[str, Any]) -> Any:
            messages = [
                (message["role"], message["content"])
                if isinstance(message, dict)
                else ("assistant", message.content or "")
                for message in inference_data["message"]
            ]
            names = [tool["function"]["name"] for tool in inference_data["tools"]]
            self.asked.append((copy.deepcopy(messages), names))
            completion = parse_completion(next(answers))
            calls = [
                SimpleNamespace(
                    id=str(number), function=SimpleNamespace(name=made.name, arguments=json.dumps(made.arguments))
                )
                for number, made in enumerate(completion.tool_calls)
            ]
            message = SimpleNamespace(role="assistant", content=completion.content, tool_calls=calls or None)
            usage = SimpleNamespace(prompt_tokens=0, completion_tokens=0)
            return SimpleNamespace(choices=[SimpleNamespace(message=message)], usage=usage), 0.0

    return Scripted()
