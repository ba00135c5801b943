"""The client against a server process that does wrong on command; the names of real defects stand at the tests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import awpo.endpoint
from awpo.config import EndpointConfig
from awpo.endpoint import Endpoint
from awpo.endpoint_answers import EndpointError


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awpo.endpoint, "FIRST_PAUSE", 0.001)


def endpoint(faults: Any, **settings: Any) -> Endpoint:
    values = {"timeout_seconds": 5, "attempts": 3, "concurrency": 4, **settings}
    return Endpoint(EndpointConfig(base_url=faults.url, model="m", **values))


def ask(client: Endpoint, *questions: str) -> list[str | EndpointError]:
    async def all_of_them() -> list[Any]:
        async with client:
            chats = [client.chat([{"role": "user", "content": question}]) for question in questions]
            return await asyncio.gather(*chats, return_exceptions=True)

    found = asyncio.run(all_of_them())
    for answer in found:
        if isinstance(answer, BaseException) and not isinstance(answer, EndpointError):
            raise answer
    return found


ONCE: dict[str, dict[str, Any]] = {
    "429": {"do": "status", "status": 429},
    "500": {"do": "status", "status": 500},
    "502 in HTML": {"do": "raw", "status": 502, "body": "<html>Bad gateway</html>"},
    "no answer": {"do": "hang"},
    "an answer without end": {"do": "drip"},
    "dropped before the answer": {"do": "drop"},
    "dropped in the answer": {"do": "half"},
}


@pytest.mark.parametrize("fault", ONCE)
def test_what_passes_is_tried_again(faults: Any, fault: str) -> None:
    faults.script({**ONCE[fault], "times": 2})
    client = endpoint(faults, timeout_seconds=0.4)
    assert ask(client, "hello") == ["Good morning"]
    assert [request["do"] for request in faults.log()] == [ONCE[fault]["do"]] * 2 + ["answer"]
    assert (client.usage.requests, client.usage.retries, client.usage.answers, client.usage.failures) == (3, 2, 1, 0)


FOR_GOOD: dict[str, tuple[dict[str, Any], str]] = {
    "HTML with status 200": ({"do": "raw", "body": "<html>Welcome</html>"}, "not a chat completion: <html>Welcome"),
    "no choices": ({"do": "raw", "body": '{"choices": []}'}, "not a chat completion"),
    "JSON cut off": ({"do": "raw", "body": '{"choices": [{"mess'}, "not a chat completion"),
    "no text": ({"do": "answer", "text": None, "finish": "length"}, "no text .*length"),
    "a huge body": ({"do": "huge", "megabytes": 20}, "longer than 8388608 bytes"),
    "a redirect to another host": (
        {"do": "status", "status": 307, "headers": {"Location": "http://elsewhere.example/v1/chat/completions"}},
        "redirects to http://elsewhere.example",
    ),
}


@pytest.mark.parametrize("fault", FOR_GOOD)
def test_what_stays_is_told_after_one_try(faults: Any, fault: str) -> None:
    rule, message = FOR_GOOD[fault]
    faults.script(rule)
    client = endpoint(faults)
    [failure] = ask(client, "hello")
    with pytest.raises(EndpointError, match=message):
        raise failure  # type: ignore[misc]
    assert len(faults.log()) == 1
    assert (client.usage.retries, client.usage.failures) == (0, 1)


def test_one_refusal_holds_all_requests_back(faults: Any) -> None:
    """Rate limits stall a step (verl#4107; slime#1361): Retry-After counts for every request of the client."""
    faults.script({"match": "first", "times": 1, "do": "status", "status": 429, "headers": {"Retry-After": "1"}})
    client = endpoint(faults, concurrency=1)
    assert ask(client, "first", "second", "third") == ["Good morning"] * 3
    refused, *others = [request["time"] for request in faults.log()]
    assert len(others) == 3
    assert all(moment - refused >= 1 for moment in others)


def test_a_bad_mixture_of_faults_loses_nothing(faults: Any) -> None:
    """Time-outs, refusals and lost connections at once (verl#4107; slime#1361)."""
    kinds = ["hang", "drop", "half", "status"]
    faults.script(*({"match": f"about {kind}", "times": 2, "do": kind, "status": 503} for kind in kinds))
    questions = [f"number {number} about {kinds[number % 4]}" for number in range(24)]
    client = endpoint(faults, timeout_seconds=0.5, attempts=4)
    assert ask(client, *questions) == ["Good morning"] * 24
    assert len(faults.log()) == 24 + 2 * 4
    assert faults.most_at_once() <= 4 + 2  # a hanging request is known to be left only a moment later
    assert client.usage.retries == 8


def test_tokens_are_the_servers_count_or_an_estimate(faults: Any) -> None:
    faults.script({"match": "told", "do": "answer", "usage": {"prompt_tokens": 11, "completion_tokens": 5}})
    client = endpoint(faults)
    ask(client, "told", "told too")
    usage = client.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.estimated) == (22, 10, 0)
    assert usage.seconds > 0
    faults.script({"do": "answer", "text": "x" * 60, "usage": False})
    client = endpoint(faults)
    ask(client, "y" * 90)
    # 90 and 60 bytes and 12 for a message's frame, at 3 bytes a token.
    assert (client.usage.prompt_tokens, client.usage.completion_tokens, client.usage.estimated) == (34, 24, 1)


@pytest.mark.parametrize("told", [10**30, -1, 1.5, "11", True, None])
def test_a_count_of_tokens_that_cannot_be_is_estimated(faults: Any, told: Any) -> None:
    faults.script({"do": "answer", "usage": {"prompt_tokens": told, "completion_tokens": 5}})
    client = endpoint(faults, token_limit=10_000)
    assert ask(client, "y" * 90) == ["Good morning"]
    assert (client.usage.prompt_tokens, client.usage.estimated) == (34, 1)


@pytest.mark.parametrize("charset", ["base64", "rot13", "idna", "utf-16", "undefined", "no-such", "a b"])
def test_a_charset_that_is_none_harms_nothing(faults: Any, charset: str) -> None:
    """The client decodes a body by the codec that the server names: base64 gives no text, utf-16 raises without a mark."""
    headers = {"Content-Type": f"text/plain; charset={charset}"}
    faults.script(
        {"do": "status", "status": 500, "headers": headers, "message": "out of room", "times": 1},
        {"do": "raw", "body": "<html>Welcome</html>", "headers": headers, "times": 1},
    )
    client = endpoint(faults, attempts=1)
    for message in ("answered 500: out of room", "not a chat completion: <html>Welcome"):
        [failure] = ask(client, "Hi")
        assert isinstance(failure, EndpointError)
        assert message in str(failure)
    assert ask(client, "Hi") == ["Good morning"]


def test_a_wait_without_end_is_told_in_a_line(faults: Any) -> None:
    faults.script({"do": "status", "status": 429, "headers": {"Retry-After": "1e300"}})
    [failure] = ask(endpoint(faults), "Hi")
    assert "asks to wait 1e+300 s; start again later" in str(failure)


def test_further_fields_of_the_settings_are_sent(faults: Any) -> None:
    client = endpoint(faults, options={"chat_template_kwargs": {"enable_thinking": False}})
    ask(client, "hello")
    assert faults.log()[0]["body"]["chat_template_kwargs"] == {"enable_thinking": False}
