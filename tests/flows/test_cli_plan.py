"""`awpo plan`: what it prints, when it refuses, and that what it proposes is accepted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from flows.cli import app

LARGE = ("--model", "qwen3-8b", "--method", "awpo")


def plan(*arguments: str, columns: int = 100) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": str(columns)})


def as_json(*arguments: str) -> dict[str, Any]:
    return json.loads(plan(*arguments, "--json").stdout.splitlines()[-1])


def test_a_preset_that_fits_is_told_by_part_with_its_assumptions():
    done = plan(*LARGE, "--gpus", "8x80")
    assert done.exit_code == 0, done.output
    for told in ("weights", "gradients", "AdamW", "activations", "rollouts", "zero3-8; 8 of 8 GPUs"):
        assert told in done.stdout
    assert "8,190,735,360" in done.stdout
    assert "Estimate, not measured" in done.stdout
    assert "h100: 989 TFLOP/s x mfu 0.35, 3.35 TB/s x decoding 0.4" in done.stdout
    assert done.stderr == ""


def test_json_has_the_numbers_that_are_printed():
    done, found = plan(*LARGE, "--gpus", "8x80"), as_json(*LARGE, "--gpus", "8x80")
    totals = re.search(r"^total +([\d.]+) +([\d.]+) +([\d.]+)", done.stdout, re.MULTILINE)
    assert totals
    moments = found["memory"]["moments"]
    assert [f"{parts['total'] / 2**30:.1f}" for parts in moments.values()] == list(totals.groups())
    assert f"{sum(found['hours']['expected'].values()):.1f}" in done.stdout
    assert found["fits"] is True
    assert found["proposals"] == found["obstacles"] == []
    assert (found["model"], found["method"], found["gpu"]) == ("qwen3-8b", "awpo", "h100")


def test_what_can_t_fit_ends_with_2_and_what_is_proposed_does_fit():
    asked = (*LARGE, "--gpus", "8x80", "--launch", "ddp-8")
    done = plan(*asked)
    assert done.exit_code == 2
    assert "does not fit: " in done.stderr
    assert re.search(r"would fit, with a peak of [\d.]+ GiB: launch: zero2-8$", done.stderr, re.MULTILINE)
    found = as_json(*asked)
    assert found["fits"] is False
    assert found["proposals"][0]["fits"] is True
    assert plan(*LARGE, "--gpus", "8x80", "--launch", "zero2-8").exit_code == 0


def test_a_pipeline_of_one_s_own_is_planned_with_the_proposal_that_was_made(tmp_path: Path):
    mine = tmp_path / "mine.yaml"
    policy: dict[str, Any] = {
        "steps": 8, "prompts_per_rollout": 512, "group_size": 4, "micro_batch_size": 64,
        "max_prompt_length": 2048, "max_completion_length": 1024,
        "rollouts": {"engine": "vllm_colocate", "gpu_memory_utilization": 0.4, "tensor_parallel": 2},
    }  # fmt: skip
    values = {"model": "qwen3-8b", "methods": ["grpo"], "launch": "zero3-8", "policy": policy}
    mine.write_text(yaml.safe_dump(values))
    asked = ("--preset", str(mine), "--gpus", "8x80")
    assert plan(*asked).exit_code == 2
    (change,) = as_json(*asked)["proposals"][0]["changes"]
    key, _, value = change.partition(": ")
    assert key == "policy.micro_batch_size"
    policy["micro_batch_size"] = int(value)
    mine.write_text(yaml.safe_dump(values))
    assert plan(*asked).exit_code == 0


def test_the_preset_s_launch_is_taken_on_the_gpus_that_there_are():
    found = as_json(*LARGE, "--gpus", "16x80")
    assert found["launch"] == {"processes": 8, "machines": 2, "accelerate": "zero3"}
    assert as_json(*LARGE, "--gpus", "16x80", "--launch", "zero3-8")["launch"]["processes"] == 8


def test_assumptions_can_be_changed():
    usual, slower = (as_json(*LARGE, "--gpus", "8x80", *more)["hours"]["expected"] for more in ((), ("--mfu", "0.175")))
    assert slower["updates"] == pytest.approx(2 * usual["updates"])
    a100 = as_json(*LARGE, "--gpus", "8x80", "--gpu", "a100", "--decoding", "0.2")
    assert a100["assumptions"]["tflops"] == 312
    assert a100["hours"]["expected"]["rollouts"] > 2 * usual["rollouts"]


@pytest.mark.parametrize("model", [None, "embedded-3m", "smollm2-135m"])
def test_models_that_are_built_here_are_planned_and_so_is_the_default(model: str | None):
    arguments = ("--gpus", "1x80", *(("--model", model) if model else ()))
    done, found = plan(*arguments), as_json(*arguments)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    assert found["fits"] is True
    assert f"{found['parameters']:,}" in done.stdout
    assert found["method"] == "awpo"
    hours = re.search(r"^ *hours expected +([\d.e-]+)", done.stdout, re.MULTILINE)
    assert hours
    assert float(hours[1]) == pytest.approx(sum(found["hours"]["expected"].values()), rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpus", "eight"), "such as 8x80, not 'eight'"),
        (("--gpus", "8x80", "--gpu", "tpu"), "known: a100, h100, h200"),
        (("--gpus", "8x80", "--launch", "zero9"), "no launch preset 'zero9'"),
        (("--gpus", "8x80", "--method", "awpoo"), "did you mean 'awpo'"),
        (("--gpus", "8x80", "--model", "qwen3-9b"), "unknown model 'qwen3-9b'"),
        (("--gpus", "8x80", "--method", "sft"), "the plan is of policy training, and 'sft' is none; give one of "),
        ((), "Missing option '--gpus'"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], says: str):
    done = plan(*LARGE, *arguments)  # the last of an option counts
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
