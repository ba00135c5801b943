"""The server of rollouts is away: what its client says and when, and what comes of a training (`make test-vllm`)."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

from awpo.artifacts import open_stage, read_manifest
from awpo.config import CorpusConfig
from awpo.config_rollouts import RolloutSettings
from awpo.config_training import PolicyConfig
from awpo.data.decompose import decompose
from awpo.data.store import write_instances
from awpo.embedded.corpus import dialogues
from awpo.embedded.model import build_model
from awpo.errors import UserError
from awpo.events import EVENTS, METRICS, Tail
from awpo.files import file_hash
from awpo.processes import StageFailed
from awpo.serving.process import ModelServer
from awpo.serving.vllm import vllm_python
from awpo.training import vllm_rollouts, vllm_server
from awpo.training.policy import train_policy
from awpo.training.vllm_rollouts import rollout_server
from awpo.training.vllm_server import Sampling, ServerGone, VllmClient

try:
    vllm_python()
    MISSING = ""
except UserError as error:
    MISSING = f"{error} (make install-vllm, then make test-vllm)"

STEPS = 6
SLOW = 5.0
ONE = {"index": 0, "token_ids": [3, 4], "logprobs": {"token_logprobs": [-1.0, -2.0]}}
GOOD = json.dumps({"choices": [ONE]}).encode()


class Front:
    """Stands before a server, of which `behind` is the port, and is away when told to; without one it answers `GOOD`.

    `way` is what it does: "up"; "503"; "hang", no byte of an answer; "slow", where only its health is told at once;
    "page", one of HTML; "refuse", nobody listens. It turns to `turns_to` when it has passed on `passes` completions.
    """

    def __init__(self, behind: int | None = None) -> None:
        self.behind, self.way, self.turns_to, self.passes = behind, "up", "up", 1 << 30
        self.passed = self.requests = self.port = 0
        self._lock, self._over = threading.Lock(), threading.Event()

    def __enter__(self) -> Self:
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                front.handle(self)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                pass  # the client has left

        self._http = Server(("127.0.0.1", self.port), Handler)
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.leave()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def leave(self) -> None:
        """From now on connections are refused."""
        self._http.shutdown()
        self._http.server_close()

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        with self._lock:
            if handler.path != "/health":
                self.requests += 1
            if handler.path == "/v1/completions" and self.way == "up":
                if self.passed == self.passes:
                    self.way = self.turns_to
                    if self.way == "refuse":
                        threading.Thread(target=self.leave).start()
                else:
                    self.passed += 1
            way = self.way
        if way == "slow":
            self._over.wait(0 if handler.path == "/health" else SLOW)
            way = "up"
        if way == "refuse":
            handler.close_connection = True
            handler.connection.close()
            return
        if way == "hang":
            handler.close_connection = True
            self._over.wait()
            return
        status, content = {"503": (503, b"no\nupstream"), "page": (200, b"<html>Welcome!</html>")}.get(way, (0, b""))
        if not status:
            status, content = self.answer(handler.command, handler.path, body)
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    def answer(self, command: str, path: str, body: bytes) -> tuple[int, bytes]:
        if self.behind is None:
            return 200, GOOD
        connection = http.client.HTTPConnection("127.0.0.1", self.behind, timeout=600)
        try:
            connection.request(command, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "WATCH_SECONDS", 0.5)


# The client


WAYS = {
    "503": r"failed: status 503, no upstream$",
    "hang": r"does not answer \(nor, 4 times, whether it is well\)$",
    "page": r"is no vLLM server: for /v1/completions it says '<html>Welcome!</html>'$",
    "refuse": r"does not answer \(.*(refused|disconnected|reset).*\)$",
}
SAMPLING = Sampling(1, 0, 4, 1.0, ())


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_is_away_is_named_in_one_line_and_found_again(way: str) -> None:
    with Front() as front:
        client = VllmClient(front.url, "policy")
        assert client.complete([[1]] * 3, [SAMPLING] * 3)[2][0].ids == [3, 4]
        front.way = way
        if way == "refuse":
            front.leave()
        start = time.monotonic()
        with pytest.raises(ServerGone, match=f"{re.escape(front.url)} {WAYS[way]}") as raised:
            client.complete([[1]] * 200, [SAMPLING] * 200)
        assert time.monotonic() - start < 10, "an hour, were the answer alone waited for"
        assert "\n" not in str(raised.value)
        assert front.requests <= 3 + 200
        assert not client.is_well() or way == "page"
        front.way = "up"
        if way == "refuse":
            front.__enter__()
        assert len(client.complete([[1]] * 80, [SAMPLING] * 80)) == 80, "no connection is held by what was given up"
        client.close()


def test_a_server_that_takes_long_and_says_that_it_is_well_is_waited_for() -> None:
    with Front() as front:
        client = VllmClient(front.url, "policy")
        front.way = "slow"
        assert SLOW > 2 * vllm_server.WATCH_SECONDS * vllm_server.WATCH_TRIES
        assert client.complete([[1]], [SAMPLING])[0][0].ids == [3, 4]
        client.close()


def test_who_answers_something_else_is_no_server_of_rollouts() -> None:
    with Front() as front:
        client = VllmClient(front.url)
        with pytest.raises(
            UserError, match=rf"^what answers at {front.url} is no vLLM server; mend policy.rollouts.url"
        ):
            client.check(16)
        client.close()


# Trainings


def config(url: str) -> PolicyConfig:
    return PolicyConfig(
        method="grpo",
        steps=STEPS,
        prompts_per_rollout=4,
        group_size=4,
        steps_per_rollout=2,
        micro_batch_size=4,
        learning_rate=1e-3,
        max_completion_length=24,
        save_every=1,
        threads=1,
        rollouts=RolloutSettings(engine="vllm_server", url=url),
    )


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny untrained model and of instances."""
    folder = tmp_path_factory.mktemp("vllm")
    asked = CorpusConfig(train_dialogues=40, validation_dialogues=2, test_dialogues=2)
    with open_stage(folder / "instances", "decompose", {}, {}) as stage:
        write_instances(stage.folder, [item for dialogue in dialogues(asked) for item in decompose(dialogue)])
        stage.finish()
    build_model("embedded-1m", folder / "instances", folder / "tiny")
    return folder / "tiny", folder / "instances"


@pytest.fixture(scope="module")
def server(parts: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    with rollout_server(str(parts[0]), tmp_path_factory.mktemp("server"), 1024 + 24) as running:
        yield running


def port_of(server: ModelServer) -> int:
    return int(server.url.removesuffix("/v1").rpartition(":")[2])


def result(out: Path) -> list[Any]:
    """The weights, and of each step what does not tell of time or of the server's absence."""
    rows = [
        {name: value for name, value in row["metrics"].items() if "seconds" not in name and "restarts" not in name}
        for row in Tail(out / METRICS)
    ]
    return [rows, {path.name: file_hash(path) for path in (out / "checkpoint").glob("*.safetensors")}]


@pytest.fixture(scope="module")
def undisturbed(parts: tuple[Path, Path], server: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    out = tmp_path_factory.mktemp("undisturbed")
    with Front(port_of(server)) as front:
        train_policy(str(parts[0]), parts[1], out, config(front.url))
    return result(out)


NEEDS_VLLM = [
    pytest.mark.slow,
    pytest.mark.servers,
    pytest.mark.vllm,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]


def needs_vllm(test: Any) -> Any:
    for mark in NEEDS_VLLM:
        test = mark(test)
    return test


AWAY = ["503", "hang", "refuse"]
"""In each of three rollout batches 4 probes and 4 groups are asked for; the server leaves in the middle of the second."""


@needs_vllm
@pytest.mark.parametrize("way", AWAY)
def test_a_server_that_stays_away_ends_the_run_in_one_line_and_it_goes_on(
    way: str,
    parts: tuple[Path, Path],
    server: ModelServer,
    undisturbed: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_rollouts, "AWAY_SECONDS", 2.0)
    with Front(port_of(server)) as front:
        front.turns_to, front.passes = way, 8 + 4 + 2
        settings = config(front.url)
        told = (
            rf"^the vLLM server at {front.url} (does not answer|failed: status 503).*, and was waited for 2 s; once it "
        )
        with pytest.raises(
            StageFailed, match=told + r"is well, start again: training goes on from the last checkpoint$"
        ):
            train_policy(str(parts[0]), parts[1], tmp_path, settings)
        assert read_manifest(tmp_path) is None
        assert len(list(Tail(tmp_path / METRICS))) == 2
        asked = front.requests
        # Still away: said at once.
        with pytest.raises(UserError, match=rf"^the vLLM server at {front.url} .*; start one there, or leave policy"):
            train_policy(str(parts[0]), parts[1], tmp_path, settings)
        assert front.requests <= asked + 1
    with Front(port_of(server)) as back:
        train_policy(str(parts[0]), parts[1], tmp_path, config(back.url))
        assert back.passed == 8 + 8, "the rollouts of the first two steps are not sampled again"
    notes = [row["message"] for row in Tail(tmp_path / EVENTS) if row["event"] == "note"]
    assert any(message.startswith("goes on after step 2") for message in notes)
    assert result(tmp_path) == undisturbed


@needs_vllm
def test_a_server_that_comes_back_soon_is_waited_for(
    parts: tuple[Path, Path],
    server: ModelServer,
    undisturbed: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_rollouts, "AWAY_PAUSE", 0.1)
    with Front(port_of(server)) as front:
        front.turns_to, front.passes = "503", 8 + 4 + 2

        def come_back() -> None:
            while front.way == "up":
                time.sleep(0.05)
            time.sleep(3)
            front.passes, front.way = 1 << 30, "up"

        threading.Thread(target=come_back, daemon=True).start()
        train_policy(str(parts[0]), parts[1], tmp_path, config(front.url))
    warnings = [row["message"] for row in Tail(tmp_path / EVENTS) if row["event"] == "warning"]
    assert any("status 503, no upstream; it is waited for, 120 s at most (1 of 2)" in line for line in warnings)
    assert result(tmp_path) == undisturbed
