"""Answers on disk: what an answer is known by, many processes at once, files that are no cache."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import awpo.endpoint
from awpo.config import EndpointConfig
from awpo.endpoint import Endpoint, Reply
from awpo.endpoint_cache import CachedAnswer, EndpointCache, request_key, shared_cache_file
from awpo.errors import UserError

ANSWER = CachedAnswer("Grüße 早", "stop", 11, 5, 0.25)


def test_an_answer_comes_back_as_it_was(tmp_path: Path) -> None:
    with EndpointCache(tmp_path / "a" / "cache") as cache:
        assert cache.get("k") is None
        cache.put("k", "m", ANSWER)
        cache.put("k", "m", CachedAnswer("another", None, 0, 0, 0))
        assert cache.get("k") == ANSWER
    with EndpointCache(tmp_path / "a" / "cache") as cache:
        assert cache.get("k") == ANSWER
        assert len(cache) == 1


def test_what_an_answer_is_known_by() -> None:
    request = {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 0.0}
    key = request_key("https://host.example/v1", request)
    assert len(key) == 64
    # Where on the host, and in which order the fields stand, does not matter.
    same = [
        request_key("http://HOST.example:8000/other/v1", request),
        request_key("https://host.example/v1", dict(reversed(request.items()))),
    ]
    assert same == [key, key]
    others = [
        request_key("https://other.example/v1", request),
        request_key("https://host.example/v1", request, draw=1),
        *(
            request_key("https://host.example/v1", {**request, **change})
            for change in (
                {"model": "n"},
                {"temperature": 0.1},
                {"messages": [{"role": "user", "content": "y"}]},
                {"max_tokens": 5},
                {"response_format": {"type": "json_schema"}},
            )
        ),
    ]
    assert len({key, *others}) == 1 + len(others)


def _write(path: Path, process: int) -> None:
    with EndpointCache(path) as cache:
        for number in range(200):
            cache.put(f"{number}", "m", CachedAnswer(f"{process}", None, 0, 0, 0))
            assert cache.get(f"{number}") is not None


def test_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write, args=(path, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    with EndpointCache(path) as cache:
        assert len(cache) == 200


def test_a_file_that_is_no_cache_is_told_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("this is no database, this is a letter to a friend" * 50)
    other = tmp_path / "other"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE answers (name TEXT)")
    connection.close()
    for path in (text, other, text / "inside", tmp_path):
        with pytest.raises(UserError, match=r"cannot be used .*set cache to"):
            EndpointCache(path)
    assert text.read_text().startswith("this is no database")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awpo.endpoint, "FIRST_PAUSE", 0.001)


def client(faults: Any, **settings: Any) -> Endpoint:
    return Endpoint(EndpointConfig(base_url=faults.url, model="m", **{"timeout_seconds": 5, "attempts": 2, **settings}))


def replies(endpoint: Endpoint, *questions: str, **options: Any) -> list[Reply]:
    async def run() -> list[Reply]:
        async with endpoint:
            asked = [endpoint.ask([{"role": "user", "content": question}], **options) for question in questions]
            return await asyncio.gather(*asked)

    return asyncio.run(run())


def test_no_call_is_made_twice_by_whatever_run(faults: Any, tmp_path: Path) -> None:
    """verl#4107, slime#1361: rate limits and time-outs stall a step."""
    file = str(tmp_path / "cache")
    questions = ["a", "b", "a", "c", "a"]
    first = client(faults, cache=file)
    assert [reply.text for reply in replies(first, *questions)] == ["Good morning"] * 5
    assert (len(faults.log()), first.usage.requests, first.usage.cache_hits) == (3, 3, 2)
    second = client(faults, cache=file)
    assert all(reply.cached for reply in replies(second, *questions))
    assert (len(faults.log()), second.usage.requests, second.usage.cache_hits) == (3, 0, 5)
    replies(client(faults, cache=file), "a", temperature=1.0)
    replies(client(faults, cache=file), "a", draw=1)
    replies(client(faults, cache=file, max_tokens=7), "a")
    assert len(faults.log()) == 6
    assert all("draw" not in request["body"] for request in faults.log())


def test_failures_and_what_is_not_worth_it_are_not_kept(faults: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "cache")
    faults.script({"times": 2, "do": "status", "status": 500})
    with pytest.raises(UserError, match="500"):
        replies(client(faults, cache=file), "a")
    assert not replies(client(faults, cache=file), "a", keep=lambda text: "evening" in text)[0].cached
    assert not replies(client(faults, cache=file), "a", keep=lambda text: "morning" in text)[0].cached
    assert replies(client(faults, cache=file), "a")[0].cached


def test_which_file_it_is(faults: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_cache_file() == tmp_path / "runs" / "endpoint-cache.sqlite"
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    local = {"base_url": "http://127.0.0.1:1/v1", "model": "m"}
    away = {"base_url": "https://api.example.com/v1", "model": "m"}
    Endpoint(EndpointConfig(**local))
    Endpoint(EndpointConfig(**away, cache="off"))
    assert not shared_cache_file().exists()  # a local server's answers are not shared between runs
    Endpoint(EndpointConfig(**away))
    assert shared_cache_file().exists()
    own = tmp_path / "own"
    Endpoint(EndpointConfig(**local), cache=own)
    assert own.exists()
