"""Further targets, of what stands behind the readers: answers of servers, requests to ours, forms, records of stages.

Their rules are those of targets.py. Two take a text in parts, which blank lines divide.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai

from awpo.artifacts import MANIFEST, read_manifest
from awpo.chat import parse_completion
from awpo.config import EndpointConfig
from awpo.endpoint import Endpoint
from awpo.endpoint_answers import EndpointError, retry_after
from awpo.endpoint_connections import Connections, _bound
from awpo.errors import UserError
from awpo.events import Tail
from awpo.types import ToolCall
from awpo.unfinished import Mark
from evaluation.api_bank.dialogues import mistake
from evaluation.api_bank.toolrl import compat_mistake, strict_mistake
from evaluation.bfcl.decode import decoded_calls, ends_turn, executable, without_thought
from evaluation.endpoint_generator import read_reply
from evaluation.generate import Generated
from evaluation.items import calls_json
from evaluation.mmlu_pro.extraction import LETTERS, extract
from flows.form_parameters import Allowed, check
from flows.preflight import check_own
from tasks.tracking import RunFile

# On a busy disk a file that is written over costs ten milliseconds.
MEMORY = Path("/dev/shm")


def new_folder() -> Path:
    """A folder for one process, in memory where the system has such a place."""
    folder = Path(tempfile.mkdtemp(prefix="awpo-fuzz-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_folder = new_folder()
REFERENCE = ToolCall("AddMeeting", {"attendees": "['Ann', 'Bo']", "location": "Rome"})
ALLOWED = Allowed((Path("/srv/runs"),), frozenset({("https://llm.example", "TEAM_KEY")}))


def text_of(data: bytes) -> str:
    """Text in UTF-8, in which lone surrogates may stand; bytes that are none are characters of their own."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def check_message(error: Exception) -> None:
    assert "\n" not in str(error), f"more than one line: {error}"
    assert len(str(error)) < 4000, f"{len(str(error))} characters"


class _Canned(httpx2.AsyncBaseTransport):
    """The network: whatever is asked, this comes back."""

    def __init__(self) -> None:
        self.status, self.headers, self.body = 200, [(b"content-type", b"application/json")], b""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(self.status, headers=self.headers, stream=httpx2.ByteStream(self.body))


class _CannedConnections(Connections):
    network = _Canned()

    def _new(self) -> openai.AsyncOpenAI:
        client = openai.DefaultAsyncHttpxClient(
            transport=self.network, follow_redirects=False, event_hooks={"response": [_bound]}
        )
        return openai.AsyncOpenAI(base_url=self._config.base_url, api_key="key", max_retries=0, http_client=client)


@functools.cache
def _endpoint() -> tuple[Endpoint, asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    config = EndpointConfig(base_url="http://127.0.0.1:1/v1", model="m", attempts=1, cache="off")
    endpoint = Endpoint(config, whole=True)
    connections = _CannedConnections(config, "key")
    endpoint._connect = lambda: connections  # type: ignore[method-assign]
    return endpoint, loop


def endpoint(data: bytes) -> None:
    """A server's response, as status, headers, a blank line and a body: an answer that can be written down, or an error."""
    head, _, body = data.partition(b"\n\n")
    status, *headers = head.split(b"\n")
    network = _CannedConnections.network
    network.status = min(max(int(status), 200), 599) if status.isdigit() and len(status) < 5 else 200
    pairs = (line.partition(b":")[::2] for line in headers if b":" in line)
    network.headers = [
        (name, value) for name, value in pairs if name.isalnum() or name in (b"Retry-After", b"Content-Type")
    ]
    network.body = body
    asked, loop = _endpoint()
    asked._not_before, asked._length_option = 0.0, "max_tokens"
    retry_after(text_of(data[:100]))
    try:
        reply = loop.run_until_complete(asked.ask([{"role": "user", "content": "Hi"}]))
    except EndpointError as error:
        check_message(error)
        return
    generated = read_reply(reply, {"sent": "own"})
    generated.text.encode()
    calls_json(generated.completion().tool_calls)


def answers(data: bytes) -> None:
    """A model's answer is read as each benchmark reads it, and gets a verdict."""
    text = text_of(data)
    found = extract(text)
    assert found is None or found[0] in LETTERS
    mistake(REFERENCE, text)
    answer = Generated(text, 1)
    for judge in (compat_mistake, strict_mistake):
        assert len(judge(REFERENCE, answer)[1]) < 2000
    completion = parse_completion(text)
    ends_turn(executable(decoded_calls(completion)))
    without_thought(text)


def records(data: bytes) -> None:
    """What stands in a stage's folder is of this project, or is refused in a line; it may have been damaged."""
    out = _folder / "stage"
    out.mkdir(exist_ok=True)
    run_file = RunFile.path_for(out)
    for path in (out / MANIFEST, out / "events.jsonl", out / ".in_progress", run_file):
        path.write_bytes(data)
    for event in Tail(out / "events.jsonl"):
        json.dumps(event)
    RunFile.read(out)
    with _refused():
        if mark := Mark.read(out / ".in_progress"):
            mark.text()
            mark.attempts([])
    with _refused():
        check_own(out)
    with _refused():
        if found := read_manifest(out):
            json.dumps(found.to_json())


def forms(data: bytes) -> None:
    """Parameters of a form, as JSON, name what is allowed or are refused in a line."""
    try:
        parameters = json.loads(text_of(data))
    except (ValueError, RecursionError):
        return
    if isinstance(parameters, dict):
        with _refused():
            check(parameters, ALLOWED)


@functools.cache
def tokenizer() -> Any:
    """The embedded model's, trained on a few dialogues."""
    from awpo.config import CorpusConfig
    from awpo.data.decompose import decompose
    from awpo.embedded.corpus import dialogues
    from awpo.embedded.tokenizer import train_tokenizer

    config = CorpusConfig(train_dialogues=4, validation_dialogues=1, test_dialogues=1)
    return train_tokenizer([item for dialogue in dialogues(config) for item in decompose(dialogue)])


def requests(data: bytes) -> None:
    """A request to the model server is understood, or refused with a status."""
    from awpo.serving.application import Refused, read_request

    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return
    try:
        asked = read_request(body, tokenizer(), 512, "m")
    except Refused as error:
        json.dumps({"error": {"message": str(error)}, "status": error.status}).encode()
        return
    assert asked.ids
    assert asked.max_tokens >= 1


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        check_message(error)


FURTHER = (endpoint, answers, records, forms, requests)
