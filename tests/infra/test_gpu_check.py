"""The GPU check on a machine without a GPU: it says so, and its code runs on a CPU with tiny shapes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from awpo.config_training import PolicyConfig

CHECK = Path(__file__).resolve().parents[2] / "infra" / "gpu_check.sh"


def check(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    values = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [CHECK, *arguments], capture_output=True, text=True, cwd=folder, env=values, timeout=600, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: run infra/gpu_check.sh itself")
def test_without_a_gpu_it_says_so_in_a_line(tmp_path: Path):
    done = check(tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "no GPU" in done.stderr
    assert not (tmp_path / "gpu_check.json").exists()


def test_a_python_that_is_not_there_is_named(tmp_path: Path):
    done = check(tmp_path, PYTHON="/nowhere/python")
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "error: there is no /nowhere/python; run make install, or name a Python: PYTHON=... infra/gpu_check.sh"
    ]


@pytest.fixture(scope="module")
def scripts():
    """(gpu_check, gpu_check_parts) as modules."""
    path = list(sys.path)
    sys.path.insert(0, str(CHECK.parent))
    yield importlib.import_module("gpu_check"), importlib.import_module("gpu_check_parts")
    sys.path[:] = path
    for name in ("gpu_check", "gpu_check_parts"):
        del sys.modules[name]


@pytest.fixture
def parts(scripts):
    return scripts[1]


def test_on_a_cpu_a_part_runs_and_writes_its_numbers(tmp_path: Path):
    done = check(tmp_path, "--cpu", "--only", "rollout")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text("utf-8"))
    assert found["machine"]["device"] == "a CPU, tiny shapes"
    assert list(found["parts"]) == ["rollout"]
    assert found["parts"]["rollout"]["state"] == "ok"
    assert found["parts"]["rollout"]["numbers"]["tokens"] == 8 * 16
    assert "rollout    ok" in done.stdout


def test_a_step_lowers_the_loss_and_makes_up_no_measurement(parts, tmp_path: Path):
    found = parts.check_step(parts.CPU, tmp_path)
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["measured_bytes"] is None, "nothing counts tensors on a CPU"
    assert found["planned_bytes"] > 0
    assert found["tokens_per_second"] > 0


def test_the_ways_of_attention_agree_and_what_is_missing_is_told(parts, tmp_path: Path):
    found = parts.check_attention(parts.CPU, tmp_path)
    assert 0 < found["sdpa_difference"] < 1e-5
    assert "not tried" in found["flash_attention_2"]


def test_attention_that_is_wrong_is_found(parts, tmp_path: Path, monkeypatch):
    right = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def wrong(*arguments, scaling, **named):
        return right(*arguments, scaling=2 * scaling, **named)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", wrong)
    with pytest.raises(RuntimeError, match="differ by"):
        parts.check_attention(parts.CPU, tmp_path)


@pytest.mark.parametrize("name", ["policy", "zero3"])
def test_a_training_is_planned_beside_what_it_took(parts, tmp_path: Path, monkeypatch, name: str):
    """The worker's own training is tested elsewhere: here what is asked of it, and what is made of its answer."""
    if name == "zero3":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make install-deepspeed")
    asked = {}

    def worker(module, job, out, *, on_event, launch):
        asked.update(module=module, launch=launch, policy=PolicyConfig.read(job["config"], "job"))
        out.mkdir()
        (out / "summary.json").write_text('{"steps": 4, "seconds": 2.5}')
        on_event({"event": "memory", "gpu_bytes": 2**30})

    monkeypatch.setattr("awpo.processes.run_worker", worker)
    found = parts.PARTS[name](parts.CPU, tmp_path)
    assert asked["module"] == "awpo.training.policy"
    assert asked["launch"].accelerate == ("zero3" if name == "zero3" else None)
    assert (asked["launch"].processes, asked["policy"].steps) == (1, 4)
    assert found["measured_bytes"] == 2**30
    assert found["ratio"] == 2**30 / found["planned_bytes"]
    assert found["seconds"] == 2.5


def test_a_part_that_fails_says_why_and_one_that_dies_too(scripts, monkeypatch, capfd: pytest.CaptureFixture[str]):
    def broken(scale, folder):
        raise ValueError("the loss is 7")

    check, parts = scripts
    monkeypatch.setitem(parts.PARTS, "step", broken)
    check.part_main("step", parts.CPU)
    assert json.loads(capfd.readouterr().out) == {"state": "failed", "reason": "ValueError: the loss is 7"}
    monkeypatch.setattr(sys, "executable", "/bin/false")
    dead = check.run_part("step", True)
    assert dead["state"] == "failed"
    assert dead["reason"] == "exit code 1: nothing was said"
    assert "exit code 1: nothing was said" in check.told("step", dead)


def test_a_part_that_can_t_be_tried_is_no_failure(scripts, monkeypatch, capfd: pytest.CaptureFixture[str]):
    check, parts = scripts
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: None)
    check.part_main("zero3", parts.CPU)
    assert json.loads(capfd.readouterr().out)["state"] == "skipped"
