"""The client against a real HTTP server on this machine, with what real servers do wrong."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from email.utils import formatdate
from typing import Any

import pytest

import awpo.endpoint
import awpo.endpoint_connections
from awpo.config import EndpointConfig
from awpo.endpoint import Endpoint
from awpo.endpoint_answers import EndpointError, retry_after
from awpo.errors import UserError

QUESTION = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of milliseconds."""
    monkeypatch.setattr(awpo.endpoint, "FIRST_PAUSE", 0.001)


def config(url: str, **settings: Any) -> EndpointConfig:
    return EndpointConfig(base_url=url, model="m", **{"timeout_seconds": 5, "attempts": 3, **settings})


def ask(endpoint: Endpoint, **options: Any) -> str:
    async def once() -> str:
        async with endpoint:
            return await endpoint.chat(QUESTION, **options)

    return asyncio.run(once())


def test_sends_the_settings_and_returns_the_text(serve: Any) -> None:
    server = serve(lambda number, body: serve.answer("Grüße 早"))
    assert ask(Endpoint(config(server.url, temperature=0.5, max_tokens=7)), seed=3) == "Grüße 早"
    assert server.requests == [{"model": "m", "messages": QUESTION, "temperature": 0.5, "max_tokens": 7, "seed": 3}]


def test_options_win_over_the_settings(serve: Any) -> None:
    server = serve(lambda number, body: serve.answer())
    ask(Endpoint(config(server.url)), temperature=1.5, model="other")
    assert (server.requests[0]["temperature"], server.requests[0]["model"]) == (1.5, "other")


def test_one_endpoint_serves_one_event_loop_after_another(serve: Any) -> None:
    server = serve(lambda number, body: serve.answer(str(number)))
    endpoint = Endpoint(config(server.url))
    assert [ask(endpoint) for _ in range(3)] == ["0", "1", "2"]
    assert asyncio.run(endpoint.chat(QUESTION)) == "3"  # not closed
    assert asyncio.run(endpoint.chat(QUESTION)) == "4"


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529])
def test_tries_again_where_it_can_help(serve: Any, quick: None, status: int) -> None:
    server = serve(lambda number, body: serve.refusal(status) if number < 2 else serve.answer("at last"))
    assert ask(Endpoint(config(server.url))) == "at last"
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_does_not_try_again_where_it_cannot(serve: Any, quick: None, status: int) -> None:
    server = serve(lambda number, body: serve.refusal(status, "too bad"))
    with pytest.raises(EndpointError, match=f"answered {status}: too bad") as caught:
        ask(Endpoint(config(server.url)))
    assert len(server.requests) == 1
    assert caught.value.status == status
    assert caught.value.hopeless == (status in (401, 403, 404))
    assert "\n" not in str(caught.value)


def test_gives_up_after_the_last_try(serve: Any, quick: None) -> None:
    server = serve(lambda number, body: serve.refusal(503, "busy"))
    with pytest.raises(EndpointError, match=r"answered 503: busy \(the last of 3 tries\)"):
        ask(Endpoint(config(server.url)))
    assert len(server.requests) == 3


def test_pauses_grow_are_random_and_follow_the_seed(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl#4107, slime#1361: rate limits and time-outs stall a step."""
    server = serve(lambda number, body: serve.refusal(500))
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    def pauses(seed: int) -> list[float]:
        slept.clear()
        with monkeypatch.context() as patch:
            patch.setattr(awpo.endpoint.asyncio, "sleep", sleep)
            with pytest.raises(EndpointError):
                ask(Endpoint(config(server.url, attempts=12), seed=seed))
        return list(slept)

    first = pauses(1)
    assert len(first) == 11
    bounds = [min(awpo.endpoint.LONGEST_PAUSE, awpo.endpoint.FIRST_PAUSE * 2**n) for n in range(11)]
    assert all(0 <= pause <= bound for pause, bound in zip(first, bounds, strict=True))
    assert max(first) > awpo.endpoint.FIRST_PAUSE  # they grow
    assert pauses(1) == first != pauses(2)


def test_retry_after_holds_back_every_request(serve: Any, quick: None) -> None:
    """verl#4107, slime#1361: rate limits and time-outs stall a step."""
    wait = 1
    refused, times, lock = [], [], threading.Lock()

    def reply(number: int, body: dict[str, Any]) -> Any:
        with lock:
            times.append(time.monotonic())
            if number == 0:
                refused.append(times[-1])
                return serve.refusal(429, Retry_After=str(wait))
        return serve.answer()

    server = serve(reply)

    async def several() -> None:
        async with Endpoint(config(server.url, concurrency=1)) as endpoint:
            await asyncio.gather(*(endpoint.chat(QUESTION) for _ in range(4)))

    asyncio.run(several())
    assert len(times) == 5
    assert all(moment - refused[0] >= wait for moment in times[1:])


def test_a_longer_wait_than_anybody_has_is_an_error_at_once(serve: Any) -> None:
    server = serve(lambda number, body: serve.refusal(429, Retry_After="86400"))
    with pytest.raises(EndpointError, match="asks to wait 86400 s"):
        ask(Endpoint(config(server.url)))
    assert len(server.requests) == 1


def test_retry_after_is_read_in_both_forms() -> None:
    assert retry_after("1.5") == 1.5
    assert retry_after("-3") == 0
    in_an_hour = retry_after(formatdate(time.time() + 3600, usegmt=True))
    assert in_an_hour is not None
    assert 3500 < in_an_hour <= 3600
    assert retry_after(formatdate(time.time() - 3600, usegmt=True)) == 0
    assert [retry_after(value) for value in (None, "", "soon", "nan", "Mon, 99 Foo 2026")] == [None] * 5


@pytest.mark.parametrize("year", ["99999999999", "2026 00:00:00 +9999999999999999999", "2026 99999999999999999999:0:0"])
def test_a_date_past_all_calendars_asks_for_nothing(year: str) -> None:
    assert retry_after(f"Mon, 01 Jan {year}") is None
    assert retry_after(f"Mon, 01 Jan {year} 00:00:00 GMT") is None


def test_never_more_requests_at_once_than_allowed(serve: Any) -> None:
    """verl#4107, slime#1361: rate limits and time-outs stall a step."""

    def reply(number: int, body: dict[str, Any]) -> Any:
        time.sleep(0.02)
        return serve.answer(body["messages"][0]["content"])

    server = serve(reply)

    async def many() -> list[str]:
        async with Endpoint(config(server.url, concurrency=3)) as endpoint:
            return await asyncio.gather(*(endpoint.chat([{"role": "user", "content": str(n)}]) for n in range(20)))

    assert asyncio.run(many()) == [str(n) for n in range(20)]
    assert server.most_at_once == 3


def test_a_slow_answer_is_given_up_and_asked_again(serve: Any, quick: None) -> None:
    release = threading.Event()

    def reply(number: int, body: dict[str, Any]) -> Any:
        if number == 0:
            release.wait(10)
        return serve.answer("quick")

    server = serve(reply)
    try:
        assert ask(Endpoint(config(server.url, timeout_seconds=0.3))) == "quick"
    finally:
        release.set()
    assert len(server.requests) == 2


def test_an_answer_that_drips_does_not_outlast_the_time_limit(quick: None) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        try:
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)
        except ConnectionError:
            pass

    async def run() -> None:
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with Endpoint(config(f"http://127.0.0.1:{port}/v1", timeout_seconds=0.3, attempts=2)) as endpoint:
            with pytest.raises(EndpointError, match=r"no answer within 0\.3 s"):
                await endpoint.chat(QUESTION)
        server.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_connection_that_breaks_off_is_tried_again(quick: None) -> None:
    served: list[int] = []

    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(1)
        await reader.read(1)
        if len(served) > 1:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(break_off, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with Endpoint(config(f"http://127.0.0.1:{port}/v1")) as endpoint:
            with pytest.raises(EndpointError, match=r"cannot be reached"):
                await endpoint.chat(QUESTION)
        server.close()

    asyncio.run(asyncio.wait_for(run(), 20))
    assert len(served) == 3


def test_nobody_there(quick: None) -> None:
    with pytest.raises(EndpointError, match=r"cannot be reached .* is it running, is base_url right") as caught:
        ask(Endpoint(config("http://127.0.0.1:9/v1")))
    assert caught.value.status is None


@pytest.mark.parametrize(
    "body",
    [
        b"<html>It works!</html>",
        b"",
        b"[]",
        b"null",
        b"{}",
        b'{"choices": []}',
        b'{"choices": {"0": 1}}',
        b'{"choices": [{"message": null}]}',
        b'{"choices": [{"message": {"content": 3}}]}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ],
)
def test_garbage_is_an_error_that_shows_it(serve: Any, body: bytes) -> None:
    server = serve(lambda number, request: (200, {}, body))
    with pytest.raises(EndpointError, match="cannot be used") as caught:
        ask(Endpoint(config(server.url)))
    assert len(str(caught.value)) < 500
    assert len(server.requests) == 1


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_an_answer_without_text_is_an_error_that_names_the_reason(serve: Any, text: str | None) -> None:
    server = serve(lambda number, body: serve.answer(text, finish_reason="length"))
    with pytest.raises(EndpointError, match=r"no text .*'length'"):
        ask(Endpoint(config(server.url)))


@pytest.mark.parametrize("status", [200, 500])
def test_a_response_without_end_is_cut_off(serve: Any, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(awpo.endpoint_connections, "LARGEST_RESPONSE", 1000)
    server = serve(lambda number, body: (status, {}, serve.answer("x" * 100_000)[2]))
    with pytest.raises(EndpointError, match="longer than 1000 bytes"):
        ask(Endpoint(config(server.url)))


def test_a_compressed_response_is_not_unpacked(serve: Any) -> None:
    server = serve(lambda number, body: (200, {"Content-Encoding": "gzip"}, gzip.compress(serve.answer()[2])))
    with pytest.raises(EndpointError, match="compresses"):
        ask(Endpoint(config(server.url)))
    assert server.headers[0]["accept-encoding"] == "identity"


def test_redirects_are_not_followed(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key-1")
    other = serve(lambda number, body: serve.answer())
    server = serve(lambda number, body: (307, {"Location": f"{other.url}/chat/completions"}, b""))
    with pytest.raises(EndpointError, match=r"redirects to .*set base_url"):
        ask(Endpoint(config(server.url)))
    assert other.requests == []


def test_the_key_is_sent_and_shown_nowhere(serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("MY_KEY", "secret-key-1")
    caplog.set_level("DEBUG")
    server = serve(lambda number, body: serve.refusal(401, "Incorrect API key provided: secret-key-1"))
    endpoint = Endpoint(config(server.url, api_key_variable="MY_KEY"))
    with pytest.raises(EndpointError, match="check the key in MY_KEY") as caught:
        ask(endpoint)
    assert server.headers[0]["authorization"] == "Bearer secret-key-1"
    assert "secret-key-1" not in str(caught.value) + repr(endpoint) + caplog.text


@pytest.mark.parametrize("where", ["error", "answer", "redirect"])
def test_a_server_that_repeats_the_key_does_not_have_it_written_down(
    serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, where: str
) -> None:
    """Also where a cut to the length of a line goes through it."""
    monkeypatch.setenv("MY_KEY", "secret-key-1")
    for place in (0, 150, 190, 195):
        told = "x" * place + "secret-key-1"
        replies = {
            "error": lambda told=told: serve.refusal(400, told),
            "answer": lambda told=told: serve.answer(told),
            "redirect": lambda told=told: (307, {"Location": told}, b""),
        }
        server = serve(lambda number, body, reply=replies[where]: reply())
        cache = tmp_path / f"cache{place}"
        endpoint = Endpoint(config(server.url, api_key_variable="MY_KEY", cache=str(cache)))
        try:
            shown = ask(endpoint)
        except EndpointError as error:
            shown = str(error)
        assert "secr" not in shown
        assert "x" * min(place, 100) in shown
        assert b"secret-key" not in cache.read_bytes()


def test_words_that_a_local_server_takes_for_a_key_stay_in_answers(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "EMPTY")
    server = serve(lambda number, body: serve.answer("EMPTY is no answer"))
    assert ask(Endpoint(config(server.url, api_key_variable="MY_KEY"))) == "EMPTY is no answer"


def test_a_missing_key_is_told_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(UserError, match="set the environment variable SOME_KEY"):
        Endpoint(config("https://api.example.com/v1", api_key_variable="SOME_KEY"))
    for host in ("localhost", "127.0.0.1", "127.1.2.3", "[::1]"):
        Endpoint(config(f"http://{host}:8000/v1", api_key_variable="SOME_KEY"))
    with pytest.raises(UserError, match="SOME_KEY"):
        Endpoint(config("http://localhost.example.com/v1", api_key_variable="SOME_KEY"))


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://localhost/v1", "", "http://"])
def test_a_bad_address_is_told(url: str) -> None:
    with pytest.raises(UserError, match="not an http"):
        Endpoint(config(url))


def test_a_password_in_the_address_is_not_shown(quick: None) -> None:
    endpoint = Endpoint(config("http://user:hunter2@127.0.0.1:9/v1"))
    with pytest.raises(EndpointError) as caught:
        ask(endpoint)
    assert "hunter2" not in str(caught.value) + repr(endpoint)


def test_models_that_know_only_max_completion_tokens(serve: Any) -> None:
    def reply(number: int, body: dict[str, Any]) -> Any:
        if "max_tokens" in body:
            return serve.refusal(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        return serve.answer()

    server = serve(reply)
    endpoint = Endpoint(config(server.url, max_tokens=9))
    ask(endpoint)
    ask(endpoint)
    assert ["max_tokens" in body for body in server.requests] == [True, False, False]
    assert server.requests[-1]["max_completion_tokens"] == 9


def test_lone_surrogates_pass_in_neither_direction_as_a_crash(serve: Any) -> None:
    server = serve(lambda number, body: serve.answer("a \ud800 b"))

    async def once() -> str:
        async with Endpoint(config(server.url)) as endpoint:
            return await endpoint.chat([{"role": "user", "content": "\udfff"}])

    assert asyncio.run(once()).encode("utf-8") == b"a ? b"


def test_cancelling_leaves_no_slot_taken(serve: Any) -> None:
    release = threading.Event()

    def reply(number: int, body: dict[str, Any]) -> Any:
        if number == 0:
            release.wait(10)
        return serve.answer()

    server = serve(reply)

    async def run() -> str:
        async with Endpoint(config(server.url, concurrency=1)) as endpoint:
            task = asyncio.create_task(endpoint.chat(QUESTION))
            while not server.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await endpoint.chat(QUESTION)

    try:
        assert asyncio.run(run()) == "Good morning"
    finally:
        release.set()
