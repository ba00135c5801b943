"""The project's own model server, by real HTTP: what it does, what it refuses, and that it ends with its parent."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from awpo.artifacts import open_stage, read_manifest
from awpo.config import CorpusConfig, EndpointConfig, JudgeConfig, RationaleConfig
from awpo.data.decompose import decompose
from awpo.data.rationales import write_rationales
from awpo.data.store import read_instances, write_instances
from awpo.embedded.corpus import dialogues
from awpo.embedded.model import build_model
from awpo.endpoint import Endpoint
from awpo.errors import UserError
from awpo.judge_endpoint import EndpointJudge
from awpo.judgement import Judgement
from awpo.processes import children_of
from awpo.serving import vllm
from awpo.serving.application import LARGEST_BODY
from awpo.serving.process import ModelServer
from awpo.types import Completion

pytestmark = [pytest.mark.slow, pytest.mark.servers]

try:
    vllm.vllm_python()
    MISSING = ""
except UserError as error:
    MISSING = f"{error} (make install-vllm, then make test-vllm)"
needs_vllm = pytest.mark.skipif(bool(MISSING), reason=MISSING)

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny untrained Qwen3 and of instances."""
    folder = tmp_path_factory.mktemp("serving")
    config = CorpusConfig(train_dialogues=30, validation_dialogues=2, test_dialogues=2)
    with open_stage(folder / "instances", "decompose", {}, {}) as stage:
        write_instances(stage.folder, [item for dialogue in dialogues(config) for item in decompose(dialogue)])
        stage.finish()
    build_model("embedded-1m", folder / "instances", folder / "tiny")
    return folder / "tiny", folder / "instances"


@pytest.fixture(scope="module")
def server(parts: tuple[Path, Path]) -> Iterator[ModelServer]:
    with ModelServer(parts[0]) as running:
        yield running


def post(server: ModelServer, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"model": server.name, "messages": QUESTION, "max_tokens": 12, **fields}).encode()
    request = urllib.request.Request(f"{server.url}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        value: dict[str, Any] = json.load(response)
    return value


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


def test_a_prompt_is_counted_as_it_is_answered(server: ModelServer) -> None:
    body = json.dumps({"model": server.name, "messages": QUESTION}).encode()
    request = urllib.request.Request(
        server.url.removesuffix("/v1") + "/tokenize", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        told = json.load(response)
    assert told["count"] == post(server)["usage"]["prompt_tokens"]
    assert told["max_model_len"] > told["count"]


def test_greedy_is_what_the_library_generates(server: ModelServer, parts: tuple[Path, Path]) -> None:
    answer = post(server, temperature=0)
    tokenizer, model = (kind.from_pretrained(parts[0]) for kind in (AutoTokenizer, AutoModelForCausalLM))
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert texts(answer) == [tokenizer.decode([t for t in expected if t not in (tokenizer.eos_token_id,)])]
    assert answer["usage"]["prompt_tokens"] == ids.shape[1]
    assert answer["usage"]["completion_tokens"] == len(expected)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert server.name == "tiny"


def test_samples_follow_the_seed_whoever_asks_at_the_same_time(server: ModelServer) -> None:
    alone = texts(post(server, n=3, seed=5))
    assert len(set(alone)) == 3
    assert texts(post(server, n=3, seed=6)) != alone

    async def crowd() -> list[list[str]]:
        asked = [asyncio.to_thread(post, server, n=3, seed=seed) for seed in (5, 6, 7, 5)]
        return [texts(answer) for answer in await asyncio.gather(*asked)]

    found = asyncio.run(crowd())
    assert found[0] == found[3] == alone
    assert texts(post(server, n=2)) != texts(post(server, n=2))  # without a seed by chance


def test_stop_cuts_the_text(server: ModelServer) -> None:
    complete = post(server, temperature=0)
    [whole] = texts(complete)
    stop = whole[len(whole) // 2 :][:3]
    answer = post(server, temperature=0, stop=["never, never", stop])
    assert texts(answer) == [whole[: whole.index(stop)]]
    assert answer["choices"][0]["finish_reason"] == "stop"
    # Nothing is generated behind it.
    assert answer["usage"]["completion_tokens"] < complete["usage"]["completion_tokens"]


def test_tools_stand_in_the_prompt(server: ModelServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    told = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "20"}]
    plain, tools, all_of_it = (
        post(server, **fields)["usage"]["prompt_tokens"]
        for fields in ({}, {"tools": [tool]}, {"tools": [tool], "messages": told})
    )
    assert plain < tools < all_of_it


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "response_format": ({"response_format": {"type": "json_schema"}}, 400, "'response_format' is not done"),
    "logprobs": ({"logprobs": True}, 400, "'logprobs' is not done"),
    "stream": ({"stream": True}, 400, "'stream' is not done"),
    "top_p": ({"top_p": 0.5}, 400, "'top_p' is not done"),
    "an unknown field": ({"best_of": 3}, 400, "unknown field 'best_of'"),
    "another model": ({"model": "gpt-4o"}, 404, "this is 'tiny'"),
    "temperature": ({"temperature": 3}, 400, "'temperature' must be a number from 0 to 2"),
    "n": ({"n": 0}, 400, "'n' must be a whole number"),
    "max_tokens": ({"max_tokens": True}, 400, "'max_tokens'"),
    "no messages": ({"messages": []}, 400, "'messages' must be a list"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "parts of text only"),
    "a broken call": (
        {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        400,
        "'tool_calls' cannot be read",
    ),
    "a template of the client's": (
        {"chat_template_kwargs": {"chat_template": "{% for i in range(99999) %}{{ i }}{% endfor %}"}},
        400,
        "may not set chat_template",
    ),
    "a long prompt": ({"messages": [{"role": "user", "content": "x y " * 20_000}]}, 400, "context of 16384"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_done_is_refused_not_ignored(server: ModelServer, name: str) -> None:
    fields, status, message = REFUSED[name]
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, **fields)
    assert caught.value.code == status
    assert message in json.load(caught.value)["error"]["message"]


def test_a_body_in_chunks_is_bounded(server: ModelServer) -> None:
    """It tells no length."""
    address = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    parts = (b" " * 2**20 for _ in range(LARGEST_BODY // 2**20 + 1))
    connection.request("POST", "/v1/chat/completions", parts, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert len(texts(post(server))) == 1


def test_fields_that_ask_for_nothing_are_taken(server: ModelServer) -> None:
    neutral = {"stream": False, "top_p": 1.0, "logprobs": False, "response_format": {"type": "text"}, "user": "me"}
    assert len(post(server, **neutral, stop=None, max_tokens=None, max_completion_tokens=3)["choices"]) == 1


def test_models_and_health(server: ModelServer) -> None:
    with urllib.request.urlopen(f"{server.url}/models", timeout=30) as response:
        [model] = json.load(response)["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 16384)
    with urllib.request.urlopen(server.url.removesuffix("/v1") + "/health", timeout=30) as response:
        assert json.load(response) == {"status": "ok"}


def test_the_rationale_writer_and_the_judge_speak_with_it(
    server: ModelServer, parts: tuple[Path, Path], tmp_path: Path
) -> None:
    """Real HTTP and a real model that knows nothing: every answer is refused, and every failure is told as one."""
    endpoint = {"base_url": server.url, "model": server.name, "max_tokens": 24, "temperature": 1.0, "attempts": 1}
    config = RationaleConfig.read({"writer": "endpoint", "endpoint": endpoint, "rewrites": 1}, "test")
    few = [item.with_rationale(None) for item in read_instances(parts[1])[:6]]
    with open_stage(tmp_path / "few", "decompose", {}, {}) as stage:
        write_instances(stage.folder, few)
        stage.finish()
    with pytest.raises(UserError, match=r"of 6 rationales failed \(mostly: "):
        write_rationales(tmp_path / "few", tmp_path / "out", config)
    assert read_manifest(tmp_path / "out") is None
    listed = [json.loads(line) for line in (tmp_path / "out" / "failed.jsonl").read_text("utf-8").splitlines()]
    assert len(listed) > 3
    assert "the endpoint failed" not in {row["reason"] for row in listed}

    judge = EndpointJudge(JudgeConfig(kind="endpoint", endpoint=EndpointConfig(**endpoint)))
    thoughts = [Judgement(item, Completion(f"Thought {n}.", item.target.tool_calls, "")) for n, item in enumerate(few)]
    scores = asyncio.run(judge.score(thoughts))
    assert len(scores) == judge.judged == 6
    assert judge.failures == sum(score != score for score in scores)
    # A response_format is refused by this server and left out by the judge.
    assert judge.metrics()["answers"] == 6
    assert judge.metrics()["prompt_tokens"] > 6 * 100


def test_the_client_asks_by_the_servers_own_count(server: ModelServer) -> None:
    async def ask() -> Endpoint:
        async with Endpoint(EndpointConfig(base_url=server.url, model=server.name, max_tokens=5)) as endpoint:
            await endpoint.chat(QUESTION, seed=1)
        return endpoint

    usage = asyncio.run(ask()).usage
    assert (usage.answers, usage.estimated) == (1, 0)
    assert 1 <= usage.completion_tokens <= 5


def test_what_cannot_be_served_is_told(tmp_path: Path, parts: tuple[Path, Path]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no config\.json"):
        ModelServer(tmp_path / "empty").__enter__()
    with pytest.raises(UserError, match="made by a pipeline"):
        ModelServer("embedded-1m").__enter__()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(UserError, match="choose another port"):
            ModelServer(parts[0], port=taken.getsockname()[1]).__enter__()


PARENT = """
import sys, time
from awpo.serving.process import ModelServer
with ModelServer(sys.argv[1], engine=sys.argv[2], further=sys.argv[3:]) as server:
    print(server.url, server._process.pid, flush=True)
    time.sleep(600)
"""


def descendants(process: int) -> set[int]:
    children = {int(identity.split(":")[1]) for identity in children_of(process)}
    return children.union(*(descendants(child) for child in children))


def alive(processes: set[int]) -> bool:
    def state(process: int) -> str:
        try:
            return Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return "Z"

    return any(state(process) != "Z" for process in processes)


@pytest.mark.parametrize(
    ("engine", "further", "processes"),
    [
        ("transformers", (), 1),
        pytest.param("vllm", ("--enforce-eager", "--max-model-len", "512"), 3, marks=[needs_vllm, pytest.mark.vllm]),
    ],
)
def test_the_server_ends_with_a_parent_that_is_killed(
    engine: str, further: tuple[str, ...], processes: int, parts: tuple[Path, Path]
) -> None:
    """vLLM's own processes, too: the one that answers, the engine, its workers."""
    command = [sys.executable, "-c", PARENT, str(parts[0]), engine, *further]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    _, pid = parent.stdout.readline().split()
    before = {int(pid)} | descendants(int(pid))
    assert len(before) >= processes
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    while alive(before):
        time.sleep(0.1)


def test_auto_is_vllm_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm.VARIABLE, sys.executable)
    assert vllm.engine_at_hand() == "vllm"
    monkeypatch.setenv(vllm.VARIABLE, str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"vLLM is not installed: there is no .*; set AWPO_VLLM_PYTHON"):
        vllm.engine_at_hand()
    monkeypatch.delenv(vllm.VARIABLE)
    monkeypatch.setattr(vllm, "__file__", str(tmp_path / "awpo" / "serving" / "vllm.py"))
    assert vllm.engine_at_hand() == "transformers", "this test runs without vLLM in its own environment"
    assert vllm.engine_at_hand("in_process") == "in_process"
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert vllm.engine_at_hand() == "vllm"
