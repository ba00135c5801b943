"""What judging will cost, by hand and against what a real server then counts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from awpo.artifacts import open_stage
from awpo.config import JudgeConfig
from awpo.data.store import write_instances
from awpo.endpoint_limits import estimated_tokens
from awpo.judge import make_judge
from awpo.judge_cost import USUAL_ANSWER, estimate_judgements
from awpo.judge_prompts import judge_messages
from awpo.judgement import Judgement
from awpo.types import Completion, Instance, Message, Tool, ToolCall

CALL = ToolCall("set_alarm", {"time": "7:30"})
TOOL = Tool("set_alarm", "Set an alarm", {"type": "object", "properties": {"time": {"type": "string"}}})
INSTANCE = Instance("s", "d", 0, 1, "train", (TOOL,), (Message("user", "Wake me at 7:30"),), Message("assistant", None, (CALL,)), "set_alarm fits: time is 7:30.")  # fmt: skip
RIGHT = Completion(INSTANCE.rationale, (CALL,), "")


def judge_of(
    url: str = "http://127.0.0.1:1/v1", endpoint: dict[str, Any] | None = None, **settings: Any
) -> JudgeConfig:
    asked = {"base_url": url, "model": "m", "max_tokens": 100, "cache": "off", **(endpoint or {})}
    return JudgeConfig.read({"kind": "endpoint", "endpoint": asked, **settings}, "the test")


def test_by_hand() -> None:
    prompt = estimated_tokens(judge_messages(INSTANCE, RIGHT, with_reference=True))
    found = estimate_judgements([INSTANCE], judge_of(endpoint={"input_price": 2, "output_price": 10}), 1000)
    assert found is not None
    assert (found.requests, found.prompt_tokens) == (1000, 1000 * prompt)
    assert (found.usual_completion_tokens, found.most_completion_tokens) == (60_000, 100_000)
    assert found.usual_cost == pytest.approx((1000 * prompt * 2 + 60_000 * 10) / 1e6)
    assert found.most_cost == pytest.approx((1000 * prompt * 2 + 100_000 * 10) / 1e6)


def test_samples_and_a_second_pass_are_counted() -> None:
    blind, shown = (estimated_tokens(judge_messages(INSTANCE, RIGHT, with_reference=one)) for one in (False, True))
    config = judge_of(endpoint={"temperature": 1, "max_tokens": 20}, samples=3, two_pass=True)
    found = estimate_judgements([INSTANCE], config, 10)
    assert found is not None
    assert (found.requests, found.prompt_tokens) == (60, 30 * (blind + shown))
    assert found.usual_completion_tokens == 60 * 20 < 60 * USUAL_ANSWER
    assert "no prices are given" in str(found)


def test_a_judge_that_asks_nobody_costs_nothing() -> None:
    assert estimate_judgements([INSTANCE], JudgeConfig(), 10) is None
    with pytest.raises(ValueError, match="needs instances"):
        estimate_judgements([], judge_of(), 10)


def test_as_many_requests_are_made_as_were_told(faults: Any) -> None:
    faults.script(default={"do": "answer", "text": json.dumps(dict.fromkeys(("coherence", "correctness", "appropriateness"), 5))})  # fmt: skip
    config = judge_of(faults.url, {"temperature": 1}, samples=2)
    found = estimate_judgements([INSTANCE], config, 3)
    asyncio.run(
        make_judge(config).score([Judgement(INSTANCE, Completion(f"Thought {n}", (CALL,), "")) for n in range(3)])
    )
    assert found is not None
    assert len(faults.log()) == found.requests == 6


def test_the_command(tmp_path: Path) -> None:
    from flows.cli import app

    with open_stage(tmp_path / "instances", "rationales", {}, {}) as stage:
        write_instances(stage.folder, [INSTANCE])
        stage.finish()
    judge = tmp_path / "judge.yaml"
    judge.write_text(
        "kind: endpoint\nendpoint: {base_url: 'http://localhost:1/v1', model: m, input_price: 2, output_price: 8}\n"
    )
    command = ["judge", "estimate", "--instances", str(tmp_path / "instances"), "--thoughts", "500", "--judge"]
    shown = CliRunner().invoke(app, [*command, str(judge)])
    assert shown.exit_code == 0, shown.output
    assert "m x3: 500 requests" in shown.stdout
    assert "at most" in shown.stdout
    printed = CliRunner().invoke(app, [*command, str(judge), "--json"])
    assert json.loads(printed.stdout.splitlines()[-1])["requests"] == 500
    assert "costs nothing" in CliRunner().invoke(app, [*command, "rubric"]).stdout
