"""Commands that speak with endpoints: what they would cost, whom they ask, what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from awpo.artifacts import open_stage
from awpo.data.rationales import rationale_writer
from awpo.data.store import write_instances
from awpo.types import Instance, Message, Tool, ToolCall
from flows.cli import app

TOOL = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = Message("assistant", None, (ToolCall("add", {"a": 7}),))
    with open_stage(tmp_path / "instances", "decompose", {}, {}) as stage:
        rows = [Instance("s", f"d{n}", 0, 1, "train", (TOOL,), (Message("user", f"{n}"),), target) for n in range(5)]
        write_instances(stage.folder, rows)
        stage.finish()
    return tmp_path / "instances"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_rationales_by_a_writer_of_a_file_with_its_cost_before(folder: Path, tmp_path: Path, faults: Any) -> None:
    text = "The user wants a sum, and add fits with its a as 7."
    faults.script(default={"do": "answer", "text": text})
    writer = tmp_path / "writer.yaml"
    writer.write_text(f"base_url: {faults.url}\nmodel: m\ninput_price: 2\noutput_price: 8\nmax_tokens: 100\n")
    out = tmp_path / "out"
    command = ("data", "rationales", folder, "--out", out, "--writer", writer)
    asked = run(*command, "--estimate")
    assert asked.exit_code == 0, asked.output
    assert "m: 5 requests (0 more are answered already)" in asked.stdout
    found = json.loads(run(*command, "--estimate", "--json").stdout.splitlines()[-1])
    assert (found["requests"], found["most_completion_tokens"]) == (5, 500)
    assert faults.log() == []
    assert not out.exists()
    refused = run(*command, "--spending-limit", "0.0001")
    assert refused.exit_code == 2
    assert "spending_limit 0.0001 cannot suffice" in refused.output
    done = run(*command, "--json")
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout.splitlines()[-1])
    assert (value["written"], value["writer"], value["endpoint"]["requests"]) == (5, "endpoint m", 5)
    assert rationale_writer(out) == "endpoint m"


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    base = ("data", "rationales", folder, "--out", tmp_path / "out")
    for arguments, message in (
        (("--writer", "gpt4o"), "did you mean 'gpt-4o'"),
        (("--writer", "local", "--endpoint", "http://x/v1", "--endpoint-model", "m"), "two writers"),
        (("--writer", "local", "--spending-limit", "1"), "needs input_price"),
    ):
        refused = run(*base, *arguments)
        assert refused.exit_code == 2, refused.output
        assert message in refused.output
    assert "costs nothing" in run(*base, "--estimate").stdout
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_served(tmp_path: Path) -> None:
    for arguments, message in (
        (("--model", "embedded-1m"), "made by a pipeline"),
        (("--model", tmp_path), "config.json"),
        (("--model", tmp_path, "--engine", "vlm"), "known: auto, transformers"),
    ):
        refused = run("serve", *arguments)
        assert refused.exit_code == 2, refused.output
        assert message in refused.output
