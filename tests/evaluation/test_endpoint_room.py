"""Counting a prompt's tokens at a server that means harm. Real HTTP, each server on a port of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from awpo.config import EndpointConfig
from evaluation.endpoint_room import LARGEST_RESPONSE, PromptCounter

Answer = Callable[[BaseHTTPRequestHandler], None]
QUESTION = {"messages": [{"role": "user", "content": "hello"}]}


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers so; its address, and the headers of what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(dict(self.headers))
            with suppress(OSError):
                answer(self)

        do_GET = do_POST

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()


def says(body: bytes, status: int = 200, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def count(url: str) -> tuple[int, int] | None:
    counter = PromptCounter(EndpointConfig(base_url=url, model="m"))
    try:
        return counter.count(QUESTION)
    finally:
        counter.close()


def test_an_honest_server_is_believed() -> None:
    with serving(says(json.dumps({"count": 7, "max_model_len": 100}).encode())) as (url, _):
        assert count(url) == (7, 100)


@pytest.mark.parametrize(
    "body",
    [
        b'{"count": 7, "max_model_len": 100, "tokens": "' + b"x" * (LARGEST_RESPONSE + 1) + b'"}',
        b'{"count": ' + b"[" * 100_000,
        b"\x1f\x8b\x08 not JSON",
        b'["count"]',
    ],
    ids=["endless", "nested", "compressed", "other"],
)
def test_what_is_no_answer_is_not_read_on(body: bytes) -> None:
    with serving(says(body)) as (url, _):
        assert count(url) is None


def test_a_redirect_gets_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "planted-key")
    with serving(says(b"{}")) as (elsewhere, asked_elsewhere):
        with serving(says(b"", 307, Location=f"{elsewhere}/tokenize")) as (url, asked):
            assert count(url) is None
    assert [one["Authorization"] for one in asked] == ["Bearer planted-key"]
    assert asked_elsewhere == []
