"""A chat endpoint that does wrong on command, in a process of its own: real HTTP by uvicorn, faults by script.

    with FaultServer() as server:
        server.script({"match": "weather", "times": 2, "do": "status", "status": 429, "headers": {"Retry-After": "1"}})
        ...                                   # requests to server.url, which ends in /v1
        server.log()                          # what was asked, and what came of it

The first rule whose `match` stands in a message of the request, and which has been used fewer than `times` times,
says what is done; without one the default answers. What a rule can `do`:

    answer    a chat completion: text, finish, usage (false: none is told)
    status    status, headers, message
    raw       status, headers, body (text), content_type
    hang      nothing, until the client leaves
    drop      the connection is closed before a byte of the answer
    half      the connection is closed in the middle of the answer
    drip      a byte now and then, for ever
    huge      `megabytes` of an answer
    die       the server's process ends, once it has written what it was asked to `log`, a file's path
Every rule may have `delay`, in seconds, before anything is done.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

DEFAULT = {"do": "answer", "text": "Good morning"}


class FaultApp:
    """The ASGI app. POST /script sets rules and forgets the log; GET /log tells it; POST /v1/... is answered.

    Any other path is 404.
    """

    def __init__(self) -> None:
        self.rules: list[dict[str, Any]] = []
        self.default: dict[str, Any] = DEFAULT
        self.requests: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/script":
            script = json.loads(body)
            self.rules, self.default = script["rules"], script["default"]
            self.requests, self.most_at_once = [], 0
            await self.whole(send, 200, {}, b"{}")
        elif scope["path"] == "/log":
            log = {"requests": self.requests, "most_at_once": self.most_at_once}
            await self.whole(send, 200, {}, json.dumps(log).encode())
        elif not scope["path"].startswith("/v1/"):
            await self.whole(send, 404, {}, b"{}")
        else:
            await self.chat(scope, receive, send, json.loads(body))

    async def chat(self, scope: dict[str, Any], receive: Any, send: Any, body: dict[str, Any]) -> None:
        rule = self.rule_for(" ".join(str(message.get("content")) for message in body.get("messages", [])))
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        entry = {"body": body, "headers": headers, "do": rule["do"], "time": time.monotonic(), "served": False}
        self.requests.append(entry)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(rule.get("delay", 0))
            await getattr(self, f"do_{rule['do']}")(rule, scope, receive, send)
            entry["served"] = rule["do"] not in ("hang", "drop", "half", "drip")
        finally:
            self.at_once -= 1

    def rule_for(self, text: str) -> dict[str, Any]:
        for rule in self.rules:
            if rule.get("match", "") in text and rule.get("used", 0) < rule.get("times", 1 << 30):
                rule["used"] = rule.get("used", 0) + 1
                return rule
        return self.default

    @staticmethod
    async def whole(send: Any, status: int, headers: dict[str, str], body: bytes, length: int | None = None) -> None:
        fields = {"Content-Type": "application/json", "Content-Length": str(length or len(body)), **headers}
        encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        await send({"type": "http.response.body", "body": body, "more_body": length is not None})

    @staticmethod
    def completion(rule: dict[str, Any]) -> bytes:
        message = {"role": "assistant", "content": rule.get("text", "Good morning")}
        value: dict[str, Any] = {"choices": [{"message": message, "finish_reason": rule.get("finish", "stop")}]}
        usage = rule.get("usage", {"prompt_tokens": 100, "completion_tokens": 10})
        return json.dumps({**value, **({"usage": usage} if usage else {})}).encode()

    async def do_answer(self, rule: dict[str, Any], scope: Any, receive: Any, send: Any) -> None:
        await self.whole(send, 200, {}, self.completion(rule))

    async def do_status(self, rule: dict[str, Any], scope: Any, receive: Any, send: Any) -> None:
        body = json.dumps({"error": {"message": rule.get("message", "no")}}).encode()
        await self.whole(send, rule["status"], rule.get("headers", {}), body)

    async def do_raw(self, rule: dict[str, Any], scope: Any, receive: Any, send: Any) -> None:
        headers = {"Content-Type": rule.get("content_type", "text/html"), **rule.get("headers", {})}
        await self.whole(send, rule.get("status", 200), headers, rule["body"].encode())

    async def do_hang(self, rule: dict[str, Any], scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def do_drop(self, rule: dict[str, Any], scope: Any, receive: Any, send: Any) -> None:
        scope["fault.transport"].abort()

    async def do_half(self, rule: dict[str, Any], scope: Any, receive: Any, send: Any) -> None:
        body = self.completion(rule)
        await self.whole(send, 200, {}, body[: len(body) // 2], length=len(body))
        scope["fault.transport"].close()

    async def do_drip(self, rule: dict[str, Any], scope: Any, receive: Any, send: Any) -> None:
        await self.whole(send, 200, {}, b" ", length=100_000)
        for _ in range(90_000):
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            await asyncio.sleep(0.02)

    async def do_huge(self, rule: dict[str, Any], scope: Any, receive: Any, send: Any) -> None:
        size = rule["megabytes"] << 20
        await self.whole(send, 200, {}, b'{"choices": [{"message": {"content": "', length=size)
        for _ in range(size // 65536 - 1):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        scope["fault.transport"].close()

    async def do_die(self, rule: dict[str, Any], scope: Any, receive: Any, send: Any) -> None:
        Path(rule["log"]).write_text(json.dumps(self.requests))
        os._exit(1)


def main(address_file: Path, port: int = 0) -> None:
    """Serves until SIGTERM, or until the parent is gone."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        def handle_events(self) -> None:
            super().handle_events()
            if self.scope:  # its app has not begun to run: tasks start at the loop's next turn
                self.scope["fault.transport"] = self.transport  # type: ignore[typeddict-unknown-key]

    async def end_with_parent() -> None:
        parent = os.getppid()
        while os.getppid() == parent:
            await asyncio.sleep(0.5)
        os._exit(1)

    async def serve() -> None:
        watch = asyncio.create_task(end_with_parent())
        await uvicorn.Server(config).serve(sockets=[listening])
        watch.cancel()

    listening = socket.create_server(("127.0.0.1", port), backlog=1024)
    # asyncio does this for sockets that it makes itself; without it each answer waits 40 ms for the client's kernel.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(FaultApp(), http=Protocol, lifespan="off", log_level="critical", backlog=1024)
    config.timeout_graceful_shutdown = 1
    partial = address_file.with_suffix(".part")
    partial.write_text(f"http://127.0.0.1:{listening.getsockname()[1]}")
    partial.rename(address_file)
    asyncio.run(serve())


class FaultServer:
    """Starts the process, at a port where one is given, writes its script and reads its log; a context manager."""

    def __init__(self, port: int = 0) -> None:
        self.port = port

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        address = Path(self._folder.name) / "address"
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(address), str(self.port)], stdin=subprocess.DEVNULL
        )
        while not address.exists():
            if self.process.poll() is not None:
                raise RuntimeError(f"the fault server ended with code {self.process.returncode}")
            time.sleep(0.02)
        self.root = address.read_text()
        self.port, self.url = int(self.root.rpartition(":")[2]), f"{self.root}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.process.wait()
        self._folder.cleanup()

    def script(self, *rules: dict[str, Any], default: dict[str, Any] | None = None) -> None:
        """Sets the rules, uses none of them yet, and forgets the log."""
        body = json.dumps({"rules": rules, "default": default or DEFAULT}).encode()
        urllib.request.urlopen(f"{self.root}/script", body, timeout=30).close()

    def _log(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.root}/log", timeout=30) as response:
            return json.load(response)

    def log(self) -> list[dict[str, Any]]:
        """The requests so far, oldest first: body, headers, do, time, served."""
        return self._log()["requests"]

    def most_at_once(self) -> int:
        return int(self._log()["most_at_once"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
