"""The judge's server ends in the middle of a training, and is there again later: nothing is paid for twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from awpo.artifacts import read_manifest
from awpo.chat import parse_completion
from awpo.config import EndpointConfig, JudgeConfig
from awpo.config_training import PolicyConfig
from awpo.errors import UserError
from awpo.events import METRICS, Tail
from awpo.files import file_hash
from awpo.training import scoring
from awpo.training.policy import train_policy
from tests.fault_server import FaultServer

STEPS, TRIES = 6, 3
GRADES = json.dumps({"reason": "so", "coherence": 8, "correctness": 6, "appropriateness": 4})
ANSWER = {"do": "answer", "text": GRADES}


@pytest.fixture(autouse=True)
def _each_completion_is_a_thought(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model of random weights says holds none, and of an empty thought no judge is asked."""
    monkeypatch.setattr(scoring, "parse_completion", lambda text: parse_completion(f"<think>{text}</think>Hello."))


def config(server: FaultServer, cache: Path, timeout: float = 30) -> PolicyConfig:
    # One request at a time: how many are answered when the server ends is known.
    # Answers are kept, as by default those of an endpoint on another machine are.
    options = {"concurrency": 1, "attempts": TRIES, "timeout_seconds": timeout, "cache": str(cache)}
    endpoint = EndpointConfig(base_url=server.url, model="m", **options)
    return PolicyConfig(
        steps=STEPS,
        prompts_per_rollout=4,
        group_size=2,
        steps_per_rollout=2,
        micro_batch_size=2,
        max_completion_length=8,
        learning_rate=3e-3,
        save_every=1,
        threads=1,
        judge=JudgeConfig(kind="endpoint", endpoint=endpoint, failure_limit=0.01),
    )


def asked(log: list[dict[str, Any]]) -> Counter[str]:
    return Counter(json.dumps(row["body"], sort_keys=True) for row in log if row["do"] == "answer")


def result(out: Path) -> list[Any]:
    """The weights, and of each step what does not tell of requests or time."""
    rows = [
        {name: value for name, value in row["metrics"].items() if "seconds" not in name and "judge/" not in name}
        for row in Tail(out / METRICS)
    ]
    return [rows, {path.name: file_hash(path) for path in (out / "checkpoint").glob("*.safetensors")}]


def test_a_judge_that_is_away_ends_the_run_in_one_line_and_what_it_answered_is_kept(
    tiny_model: Path, instances: Path, tmp_path: Path
) -> None:
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "log"
    kept = tmp_path / "answers.sqlite"
    with FaultServer() as server:
        server.script(default=ANSWER)
        train_policy(str(tiny_model), instances, whole, config(server, tmp_path / "others.sqlite"))
        once = asked(server.log())
    assert set(once.values()) == {1}
    answered = sum(once.values()) // 2 + 1  # in the middle of a rollout batch of eight
    with FaultServer(server.port) as again:
        settings = config(again, kept)
        again.script({**ANSWER, "times": answered}, default={"do": "die", "log": str(log)})
        told = rf"^the judge m failed on \d of \d thoughts .*cannot be reached.* \(the last of {TRIES} tries\)"
        with pytest.raises(UserError, match=told):
            train_policy(str(tiny_model), instances, cut, settings)
        # Still away: the same again fails the same way.
        with pytest.raises(UserError, match=told):
            train_policy(str(tiny_model), instances, cut, settings)
    assert read_manifest(cut) is None
    before = asked(json.loads(log.read_text()))
    assert sum(before.values()) == answered
    with FaultServer(server.port) as back:
        back.script(default=ANSWER)
        train_policy(str(tiny_model), instances, cut, config(back, kept))
        after = asked(back.log())
    assert before + after == once, "each thought is asked about once, over both lives of the server"
    assert result(cut) == result(whole)


WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "503": ({"do": "status", "status": 503, "message": "loading"}, "answered 503: loading"),
    "silence": ({"do": "hang"}, "gave no answer within 1 s"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_judge_that_is_there_and_answers_nothing_ends_the_run_alike(
    way: str, tiny_model: Path, instances: Path, tmp_path: Path
) -> None:
    does, told = WAYS[way]
    out, cache, answered = tmp_path / "out", tmp_path / "answers.sqlite", 20
    with FaultServer() as server:
        settings = config(server, cache, timeout=1)
        server.script({**ANSWER, "times": answered}, default=does)
        match = rf"^the judge m failed on (\d) of \d thoughts .*{told} \(the last of {TRIES} tries\); mend the endpoint"
        with pytest.raises(UserError, match=match):
            train_policy(str(tiny_model), instances, out, settings)
        log = server.log()
        batch = settings.prompts_per_rollout * settings.group_size
        assert answered < len(log) <= answered + batch * TRIES
        assert read_manifest(out) is None
        server.script(default=ANSWER)
        train_policy(str(tiny_model), instances, out, settings)
        once = asked(log) + asked(server.log())
    assert set(once.values()) == {1}, "each thought is asked about once"
    assert len(list(Tail(out / METRICS))) == STEPS
