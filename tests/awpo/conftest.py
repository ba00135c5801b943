"""A chat endpoint for tests that need one: real HTTP, answered as the test's own code says, from a thread of its process.

(One that does wrong by script, in a process of its own, is `faults` of tests/conftest.py.)
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers, body."""
Reply = Callable[[int, dict[str, Any]], Answer]
"""Makes the answer to a POST from the request's number, from 0, and its JSON body."""


@dataclass
class ChatServer:
    """A running server and what it was asked; `url` ends in /v1."""

    reply: Reply
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    most_at_once: int = 0
    _at_once: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.headers.append({name.casefold(): value for name, value in handler.headers.items()})
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            status, headers, content = self.reply(number, body)
            handler.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(content)
        except OSError:
            pass  # the client has left, as some tests want
        finally:
            with self._lock:
                self._at_once -= 1


class ChatServers:
    """Starts servers, serve(reply) -> ChatServer, and makes the usual answers."""

    def __init__(self) -> None:
        self.running: list[ThreadingHTTPServer] = []

    def __call__(self, reply: Reply) -> ChatServer:
        server = ChatServer(reply)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server.handle(self)

            def log_message(self, *_: object) -> None:
                pass

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        self.running.append(http)
        server.url = f"http://127.0.0.1:{http.server_port}/v1"
        return server

    def stop(self) -> None:
        for http in self.running:
            http.shutdown()
            http.server_close()

    @staticmethod
    def answer(text: str | None = "Good morning", **choice: Any) -> Answer:
        """A chat completion with one choice."""
        body = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop", **choice}]}
        return 200, {}, json.dumps(body).encode()

    @staticmethod
    def refusal(status: int, message: str = "no", **headers: str) -> Answer:
        """An error as OpenAI words it."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return status, named, json.dumps({"error": {"message": message}}).encode()


@pytest.fixture
def serve() -> Iterator[ChatServers]:
    servers = ChatServers()
    yield servers
    servers.stop()


@pytest.fixture(autouse=True)
def _runs_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache that all runs share is the test's own."""
    monkeypatch.setenv("AWPO_RUNS", str(tmp_path / "runs"))
