"""ToolRL's text prompt, read back by the project's reader of ToolRL's own data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from awpo.chat import parse_completion
from awpo.data.sources import toolrl
from awpo.types import Message, Tool, ToolCall
from evaluation.generate import Question
from evaluation.prompts import PromptFormat, rlla

SHARED = Path(os.environ.get("AWPO_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
ROWS = SHARED / "toolrl" / "rlla_4k_test.parquet"

WEATHER = Tool("weather", "Weather of a city.", {"type": "object", "properties": {"city": {"type": "string"}}})
ASKED = Message("user", "Weather in Oslo?")
CALLED = Message("assistant", "One moment.", (ToolCall("weather", {"city": "Oslo"}),), thought="I look it up.")


def read_back(question: Question) -> tuple[tuple[Tool, ...], tuple[Message, ...]]:
    """Tools and messages as the reader finds them in a row with this prompt."""
    row: dict[str, Any] = {
        "prompt": [message.to_json() for message in question.messages],
        "reward_model": {"ground_truth": "<response> x </response>"},
    }
    assert toolrl.sniff(row)
    dialogue = toolrl.read(row)
    return dialogue.tools, dialogue.messages[:-1]


@pytest.mark.skipif(not ROWS.exists(), reason="needs ../shared/data (AWPO_SHARED_DATA)")
def test_every_real_row_survives_the_way_there_and_back() -> None:
    rows = pq.read_table(ROWS).to_pylist()
    assert len(rows) == 80
    for row in rows:
        dialogue = toolrl.read(row)
        messages = dialogue.messages[:-1]
        assert read_back(rlla(Question(messages, dialogue.tools))) == (dialogue.tools, messages)


def test_a_history_with_calls_results_and_thoughts_survives() -> None:
    told = Message("tool", '{"name": "weather", "results": {"sky": "clear"}}', name="weather")
    system = Message("system", "Be brief.")
    messages = (system, ASKED, CALLED, told, Message("assistant", "Clear."), Message("user", "Thanks <b>!"))
    made = rlla(Question(messages, (WEATHER,)))
    assert [message.role for message in made.messages] == ["system", "user"]
    assert made.tools == ()
    assert read_back(made) == ((WEATHER,), messages)


def test_a_plain_result_is_put_under_the_name_of_its_tool() -> None:
    made = rlla(Question((ASKED, CALLED, Message("tool", "sunny", name="weather")), (WEATHER,)))
    assert '<obs> [{"name": "weather", "results": "sunny"}] </obs>' in (made.messages[1].content or "")


def test_required_parameters_are_told() -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    (found,), _ = read_back(rlla(Question((ASKED,), (tool,))))
    assert found == tool


def test_the_layout_that_is_asked_for_is_the_one_that_is_read() -> None:
    """The example between the fences parses, once its dots are values."""
    system = rlla(Question((ASKED,), (WEATHER,))).messages[0].content or ""
    example = system.split("```plaintext\n")[1].split("\n```")[0]
    completion = parse_completion(example)
    assert completion.errors == ()
    assert [call.name for call in completion.tool_calls] == ["name of the tool", "..."]
    assert (completion.thought, completion.content) == ("what you think", "what you say to the user")


def test_without_tools_a_question_stays_as_it_is() -> None:
    question = Question((ASKED,))
    assert rlla(question) == question
    assert PromptFormat("rlla").apply(question) == question
    assert PromptFormat().apply(Question((ASKED,), (WEATHER,))).tools == (WEATHER,)


def test_thinking_is_an_option_of_the_template() -> None:
    assert [PromptFormat(thinking=mode).template_options for mode in ("auto", "on", "off")] == [
        {},
        {"enable_thinking": True},
        {"enable_thinking": False},
    ]
