"""The rationale writer's endpoint is away, in the middle or at the end: nothing is lost, and nothing is asked for twice."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import awpo.endpoint
from awpo.artifacts import open_stage, read_manifest
from awpo.config import RationaleConfig
from awpo.data.endpoint_rationales import FAILURES_IN_A_ROW, PROBE
from awpo.data.rationales import write_rationales
from awpo.data.store import read_instances, write_instances
from awpo.errors import UserError
from awpo.types import Instance, Message, Tool, ToolCall
from tests.fault_server import FaultServer

COUNT, TRIES, AT_ONCE = 40, 2, 4
TOOL = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})
GOOD = {"do": "answer", "text": "The user wants a sum, and add fits: its a is the 7 of the question."}
KEPT = "what was answered is kept, the same command goes on from there"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awpo.endpoint, "FIRST_PAUSE", 0.001)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Instances of which each asks another question."""
    with open_stage(tmp_path / "instances", "decompose", {}, {}) as stage:
        write_instances(stage.folder, [instance(number) for number in range(COUNT)])
        stage.finish()
    return tmp_path / "instances"


def instance(number: int) -> Instance:
    return Instance(
        source="s",
        dialogue_id=f"d{number}",
        step=0,
        steps=1,
        split="train",
        tools=(TOOL,),
        prompt=(Message("user", f"question {number}."),),
        target=Message("assistant", None, (ToolCall("add", {"a": 7}),)),
    )


def config(url: str, **settings: Any) -> RationaleConfig:
    endpoint = {"base_url": url, "model": "m", "timeout_seconds": 1, "attempts": TRIES, "concurrency": AT_ONCE}
    return RationaleConfig.read({"writer": "endpoint", "endpoint": {**endpoint, **settings}}, "test")


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in [*out.glob("*.parquet"), out / "failed.jsonl"]}


def answered(log: list[dict[str, Any]]) -> Counter[str]:
    return Counter(json.dumps(row["body"], sort_keys=True) for row in log if row["do"] == "answer" and row["served"])


@pytest.fixture
def undisturbed(source: Path, tmp_path: Path) -> dict[str, bytes]:
    with FaultServer() as server:
        server.script(default=GOOD)
        write_rationales(source, tmp_path / "undisturbed", config(server.url))
        assert len(answered(server.log())) == COUNT
    return content(tmp_path / "undisturbed")


WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "503": ({"do": "status", "status": 503, "message": "loading"}, r"answered 503: loading \(the last of 2 tries\)"),
    "silence": ({"do": "hang"}, r"gave no answer within 1 s \(the last of 2 tries\)"),
    "dropped connections": ({"do": "drop"}, r"cannot be reached .*\(the last of 2 tries\)"),
    "a long Retry-After": (
        {"do": "status", "status": 503, "headers": {"Retry-After": "3600"}},
        "answered 503 and asks to wait 3600 s; start again later",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_endpoint_that_is_away_ends_the_stage_soon_and_the_same_command_goes_on(
    way: str, source: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    does, told = WAYS[way]
    out = tmp_path / "out"
    with FaultServer() as server:
        server.script({**GOOD, "times": 15}, default=does)
        for _ in range(2):  # still away: the same again
            with pytest.raises(UserError, match=rf"^the endpoint {server.url} {told}; {KEPT}$") as raised:
                write_rationales(source, out, config(server.url))
            assert raised.value.passes
            assert read_manifest(out) is None
        log = server.log()
        assert len(log) - 15 <= 2 * TRIES * (FAILURES_IN_A_ROW + AT_ONCE)
        server.script(default=GOOD)
        write_rationales(source, out, config(server.url))
        asked = answered(log) + answered(server.log())
    assert len(asked) == COUNT
    assert set(asked.values()) == {1}, "what was answered is not asked again"
    assert content(out) == undisturbed


def test_an_endpoint_that_refuses_connections_is_found_again(
    source: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """Its process ends in the middle of the stage."""
    out, log = tmp_path / "out", tmp_path / "log"
    with FaultServer() as server:
        server.script({**GOOD, "times": 15}, default={"do": "die", "log": str(log)})
        with pytest.raises(UserError, match=rf"^the endpoint \S+ cannot be reached .*; {KEPT}$"):
            write_rationales(source, out, config(server.url, concurrency=1))
    with FaultServer(server.port) as back:
        back.script(default=GOOD)
        write_rationales(source, out, config(back.url))
        asked = answered(json.loads(log.read_text())) + answered(back.log())
    assert len(asked) == COUNT
    assert set(asked.values()) == {1}
    assert content(out) == undisturbed


def test_an_endpoint_that_is_away_for_the_last_few_leaves_no_hole(
    source: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """Fewer failures than tell that it is down: a finished result would have been without these for good."""
    out = tmp_path / "out"
    with FaultServer() as server:
        server.script({**GOOD, "times": COUNT - 3}, default={"do": "status", "status": 503})
        with pytest.raises(UserError, match=rf"answered 503: .*; {KEPT}$"):
            write_rationales(source, out, config(server.url))
        assert read_manifest(out) is None
        server.script(default=GOOD)
        write_rationales(source, out, config(server.url))
        assert len(answered(server.log())) == 3
    assert content(out) == undisturbed


def test_what_failed_while_the_endpoint_was_away_for_a_moment_is_asked_again(
    source: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    with FaultServer() as server:
        server.script({**GOOD, "times": 10}, {"do": "status", "status": 502, "times": 5 * TRIES}, default=GOOD)
        manifest = write_rationales(source, out, config(server.url))
    assert manifest.counts["failed"] == {}
    assert content(out) == undisturbed


def test_a_request_that_fails_by_itself_is_listed_and_holds_nothing_up(source: Path, tmp_path: Path) -> None:
    """As many as would tell that the endpoint is down, were they not known to fail while others are answered."""
    out = tmp_path / "out"
    bad = {number for number in range(COUNT) if number % 2}
    rules = [{"match": f"question {number}.", "do": "status", "status": 500, "message": "boom"} for number in bad]
    with FaultServer() as server:
        server.script(*rules, default=GOOD)
        manifest = write_rationales(source, out, config(server.url, concurrency=1))
        probes = [row for row in server.log() if row["body"]["messages"][-1]["content"] == PROBE]
    assert manifest.counts["failed"] == {"the endpoint failed": len(bad)}
    assert len(probes) == 3
    missing = {item.dialogue_id for item in read_instances(out) if item.rationale is None}
    assert missing == {f"d{number}" for number in bad}


def test_the_command_ends_with_one_line(source: Path, tmp_path: Path) -> None:
    """As a person calls it; the port is one where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    writer = tmp_path / "writer.yaml"
    writer.write_text(f"base_url: http://127.0.0.1:{port}/v1\nmodel: m\nattempts: 1\n")
    command = [sys.executable, "-m", "flows.cli", "data", "rationales", str(source), "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, "--writer", str(writer)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: the endpoint http://127.0.0.1:{port}/v1 cannot be reached")
    assert last.endswith(KEPT)
    assert "Traceback" not in done.stderr
