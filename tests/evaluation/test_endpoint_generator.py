"""The client of endpoints: what is sent, how answers are read, and what becomes of requests that fail. Real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import awpo.endpoint
from awpo.config import EndpointConfig
from awpo.endpoint import Reply
from awpo.errors import UserError
from awpo.types import Message, Tool, ToolCall
from evaluation.endpoint_generator import (
    EndpointGenerator,
    _sent_names,
    messages_for_endpoint,
    read_reply,
)
from evaluation.generate import Question, Sampling
from evaluation.prompts import PromptFormat
from evaluation.target import endpoint_identity
from tests.fault_server import FaultServer

WEATHER = Tool("geo.weather", "Weather", {"type": "object", "properties": {"city": {"type": "string"}}})


def question(text: str, tools: tuple[Tool, ...] = ()) -> Question:
    return Question((Message("user", text),), tools)


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer() as running:
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awpo.endpoint, "FIRST_PAUSE", 0.001)


def config(server: FaultServer, **settings: Any) -> EndpointConfig:
    return EndpointConfig(base_url=server.url, model="m", **{"timeout_seconds": 5, "attempts": 2, **settings})


def test_greedy_and_samples_are_asked_apart_each_with_a_seed_of_its_own(server: FaultServer) -> None:
    server.script()
    generator = EndpointGenerator(config(server), PromptFormat(thinking="off"))
    sampling = Sampling(samples=2, temperature=0.7, max_tokens=9, seed=3, with_greedy=True, stop=("Question:",))
    progress: list[tuple[int, int]] = []
    answers = generator.answer(
        [question("a", (WEATHER,)), question("b")],
        sampling,
        progress=lambda done, total, what="": progress.append((done, total)),
    )
    assert [[answer.text for answer in row] for row in answers] == [["Good morning"] * 3] * 2
    assert {(answer.prompt_tokens, answer.tokens, answer.finish) for row in answers for answer in row} == {
        (100, 10, "stop")
    }
    bodies = [entry["body"] for entry in server.log()]
    assert all(body["max_tokens"] == 9 and body["stop"] == ["Question:"] for body in bodies)
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in bodies)
    of_a = [body for body in bodies if body["messages"][0]["content"] == "a"]
    assert [body["tools"] for body in of_a] == [[WEATHER.to_json()]] * 3
    assert sorted(body["temperature"] for body in of_a) == [0.0, 0.7, 0.7]
    seeds = {body.get("seed") for body in of_a}
    assert len(seeds) == 3
    assert None in seeds
    assert progress[0] == (0, 6)
    assert progress[-1] == (6, 6)
    assert generator.room(question("a")) is None  # this server counts no tokens


def test_fields_of_the_configuration_win(server: FaultServer) -> None:
    server.script()
    made = config(server, options={"temperature": None, "reasoning_effort": "low"})
    EndpointGenerator(made).answer([question("a")], Sampling())
    body = server.log()[0]["body"]
    assert body["temperature"] is None
    assert body["reasoning_effort"] == "low"


def test_the_text_prompt_sends_no_tools(server: FaultServer) -> None:
    server.script()
    EndpointGenerator(config(server), PromptFormat("rlla")).answer([question("a", (WEATHER,))], Sampling())
    body = server.log()[0]["body"]
    assert "tools" not in body
    assert "1. Name: geo.weather" in body["messages"][0]["content"]


def test_a_failed_request_is_an_answer_that_says_so_and_the_others_come(server: FaultServer) -> None:
    server.script({"match": "bad", "do": "status", "status": 500, "message": "out of memory"})
    generator = EndpointGenerator(config(server))
    (good,), (bad,), (last,) = generator.answer([question("good"), question("bad"), question("last")], Sampling())
    assert (good.finish, last.finish) == ("stop", "stop")
    assert (bad.finish, bad.text, bad.tokens) == ("failed", "", 0)
    assert "answered 500: out of memory (the last of 2 tries)" in bad.failure


def test_kept_answers_are_not_asked_for_again_and_failed_ones_are(server: FaultServer, tmp_path: Path) -> None:
    server.script({"match": "bad", "times": 2, "do": "status", "status": 500})
    questions = [question("good"), question("bad")]
    first = EndpointGenerator(config(server), cache=tmp_path / "answers.sqlite")
    assert [row[0].finish for row in first.answer(questions, Sampling())] == ["stop", "failed"]
    first.close()
    second = EndpointGenerator(config(server), cache=tmp_path / "answers.sqlite")
    assert [row[0].finish for row in second.answer(questions, Sampling())] == ["stop", "stop"]
    assert [entry["body"]["messages"][0]["content"] for entry in server.log()].count("good") == 1


def test_a_server_that_is_down_ends_it_with_one_line(server: FaultServer) -> None:
    server.script(default={"do": "status", "status": 503})
    generator = EndpointGenerator(config(server, concurrency=4))
    with pytest.raises(UserError, match=r"so did 20 requests in a row.*the same command goes on") as caught:
        generator.answer([question(str(number)) for number in range(60)], Sampling())
    assert "\n" not in str(caught.value)
    assert len({entry["body"]["messages"][0]["content"] for entry in server.log()}) < 30


@pytest.mark.parametrize("status", [401, 404])
def test_what_all_requests_would_meet_is_raised_at_once(server: FaultServer, status: int) -> None:
    server.script(default={"do": "status", "status": status})
    with pytest.raises(UserError, match=f"answered {status}"):
        EndpointGenerator(config(server, concurrency=1)).answer([question("a"), question("b")], Sampling())
    assert len(server.log()) == 1


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
        "'messages' take 5000 tokens, and the model has a context of 4096",
    ],
)
def test_a_prompt_past_the_context_is_no_failure(server: FaultServer, message: str) -> None:
    server.script(default={"do": "status", "status": 400, "message": message})
    ((answer,),) = EndpointGenerator(config(server)).answer([question("a")], Sampling())
    assert (answer.finish, answer.text) == ("no_room", "")


def test_an_answer_without_text_is_an_answer(server: FaultServer) -> None:
    server.script(default={"do": "answer", "text": ""})
    ((answer,),) = EndpointGenerator(config(server)).answer([question("a")], Sampling())
    assert (answer.text, answer.finish, answer.tokens) == ("", "stop", 10)


def reply(finish: str | None = "stop", **message: Any) -> Reply:
    return Reply(json.dumps(message), finish, False, 7, 3, 0.5)


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_structured_calls_and_thoughts_are_read_and_shown_in_the_text() -> None:
    answer = read_reply(
        reply(
            "tool_calls",
            content="I look.",
            reasoning_content="Oslo it is.",
            tool_calls=[call("geo_weather", '{"city": "Oslo"}'), call("other", {"a": 1})],
        ),
        {"geo_weather": "geo.weather"},
    )
    assert answer.tool_calls == (ToolCall("geo.weather", {"city": "Oslo"}), ToolCall("other", {"a": 1}))
    completion = answer.completion()
    assert completion.tool_calls == answer.tool_calls
    assert (completion.thought, completion.content, completion.errors) == ("Oslo it is.", "I look.", ())
    assert (answer.prompt_tokens, answer.tokens, answer.seconds, answer.finish) == (7, 3, 0.5, "stop")


@pytest.mark.parametrize("arguments", ['{"city": ', "[1]", 3])
def test_a_structured_call_that_cannot_be_read_is_malformed_and_kept_as_it_came(arguments: Any) -> None:
    answer = read_reply(reply(tool_calls=[call("f", arguments), call("g", "{}")]), {})
    assert answer.tool_calls == (ToolCall("g", {}),)
    assert answer.completion().calls_malformed
    assert str(arguments) in answer.text


def test_ends_are_told_apart() -> None:
    assert read_reply(reply("length", content="a"), {}).finish == "length"
    assert read_reply(reply("content_filter"), {}).finish == "failed"
    assert read_reply(reply(None, content="a"), {}).finish == "stop"


def test_calls_in_the_text_are_left_to_the_parser() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    answer = read_reply(reply(content=text), {})
    assert answer.tool_calls is None
    assert answer.completion().tool_calls == (ToolCall("f", {}),)


def test_results_refer_to_their_calls() -> None:
    calls = (ToolCall("a.b", {"é": 1}), ToolCall("c", {}))
    history = (
        Message("user", "?"),
        Message("assistant", None, calls, thought="hm"),
        Message("tool", "1", name="a.b"),
        Message("tool", "2", name="c"),
    )
    made = messages_for_endpoint(history, {"a.b": "a_b"}, thoughts=False)
    first, second = made[1]["tool_calls"]
    assert (made[2]["tool_call_id"], made[3]["tool_call_id"]) == (first["id"], second["id"])
    assert first["id"] != second["id"]
    assert first["function"] == {"name": "a_b", "arguments": '{"é": 1}'}
    assert "reasoning_content" not in made[1]
    assert messages_for_endpoint(history, {}, thoughts=True)[1]["reasoning_content"] == "hm"


def test_names_that_openai_refuses_are_sent_as_others_one_for_each() -> None:
    names = ["a.b", "a_b", "a b", "x" * 70, "é"]
    sent = _sent_names(names)
    assert sent["a_b"] == "a_b"
    assert len(set(sent.values())) == len(names)
    assert all(len(name) <= 64 and name.isascii() and " " not in name for name in sent.values())


def test_the_identity_is_model_host_and_options() -> None:
    made = EndpointConfig(base_url="https://api.example.com/v1", model="m")
    assert endpoint_identity(made) == "m at api.example.com"
    assert endpoint_identity(made.model_copy(update={"concurrency": 3})) == "m at api.example.com"
    assert endpoint_identity(made.model_copy(update={"options": {"a": 1}})) != "m at api.example.com"
