"""DeepSpeed's ZeRO and FSDP2 on two CPU processes through the project's launcher: the training is that of one process,
also where one of the two is killed on the way and the run is taken up again."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from awpo.config_training import AdapterConfig, PolicyConfig, SftConfig
from awpo.events import EVENTS, METRICS, Tail
from awpo.launch import read_launch
from awpo.processes import StageFailed, run_worker
from awpo.training.checkpoints import RESUME
from awpo.training.sft import trainer_arguments

DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not DEEPSPEED, reason="no DeepSpeed; make install-deepspeed")
STRATEGIES = [
    pytest.param("cpu-2-zero2", marks=needs_deepspeed),
    pytest.param("cpu-2-zero3", marks=needs_deepspeed),
    "cpu-2-fsdp2",
]
# All rows of a rollout batch are in one step, so that one process and two take the same steps. A learning rate at which
# the gradient's last bits do not decide the sign of AdamW's steps.
POLICY = PolicyConfig(
    steps=6,
    prompts_per_rollout=4,
    group_size=4,
    steps_per_rollout=1,
    micro_batch_size=4,
    learning_rate=3e-3,
    max_completion_length=12,
    save_every=2,
)
# Rollouts of three steps and a checkpoint every two: what is gone on from has used a part of its rollouts.
WITHIN = POLICY.model_copy(
    update={"prompts_per_rollout": 6, "group_size": 2, "steps_per_rollout": 3, "micro_batch_size": 2, "steps": 10}
)
SFT = SftConfig(steps=6, batch_size=8, micro_batch_size=2, learning_rate=3e-3, save_every=2)
# Policy training, with what each process rolls out written down.
MODULE = "recorded_policy"
RECORDED = """
import json
from awpo.processes import rank, worker_main
from awpo.training.policy import run
from awpo.training.policy_trainer import PolicyTrainer

begin = PolicyTrainer._begin_scoring


def recorded(self, rows, completion_ids):
    with open(self.run_log.folder / f"rollouts-{rank()}.jsonl", "a") as file:
        drawn = [[row["index"], ids] for row, ids in zip(rows, completion_ids)]
        file.write(json.dumps({"step": self.state.global_step + 1, "rows": drawn}) + "\\n")
    begin(self, rows, completion_ids)


PolicyTrainer._begin_scoring = recorded
worker_main(run)
"""
# Sums in another order: float32 has 6e-8, and a gradient is a sum of some hundred terms.
RELATIVE, ABSOLUTE = 1e-5, 1e-6


@dataclass
class Trainings:
    """Starts trainings as a task does, by a launch preset, in folders of their own."""

    model: Path
    instances: Path
    folder: Path
    events: dict[Path, list[dict[str, Any]]] = field(default_factory=dict)

    def __call__(
        self, launch: str, config: PolicyConfig | SftConfig, name: str = "", seen: Callable[[dict[str, Any]], None] = id
    ) -> Path:
        out = self.folder / (name or launch)
        events = self.events.setdefault(out, [])
        job = {
            "model": str(self.model),
            "instances": str(self.instances),
            "out": str(out),
            "config": config.model_dump(mode="json"),
            "launch": read_launch(launch).effect(),
        }

        def listen(row: dict[str, Any]) -> None:
            events.append(row)
            seen(row)

        module = MODULE if isinstance(config, PolicyConfig) else "awpo.training.sft"
        path = os.pathsep.join([str(self.folder), *sys.path])
        run_worker(module, job, out, on_event=listen, launch=read_launch(launch), environment={"PYTHONPATH": path})
        return out

    def killed(self, launch: str, config: PolicyConfig, name: str = "") -> str:
        """Begins a training, whose second process is killed once there is a checkpoint; returns what is told of it."""
        out = self.folder / (name or launch)

        def kill(row: dict[str, Any]) -> None:
            if row["event"] == "progress" and list((out / RESUME).glob("checkpoint-*/whole")):
                for process in processes_of(out, rank=1):
                    os.kill(process, signal.SIGKILL)

        with pytest.raises(StageFailed) as caught:
            self(launch, config, name, kill)
        assert processes_of(out) == [], "the others have ended when the run has"
        return str(caught.value)


def processes_of(out: Path, rank: int | None = None) -> list[int]:
    """The processes that train into `out`, or the one of a rank."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = process.joinpath("cmdline").read_bytes().decode().split("\0")
            environment = process.joinpath("environ").read_bytes().decode(errors="replace").split("\0")
            ours = "awpo.worker" in command and str(out / "job.json") in command
            if ours and (rank is None or f"RANK={rank}" in environment):
                found.append(int(process.name))
    return found


@pytest.fixture(scope="module")
def trainings(tiny_model: Path, instances: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    folder = tmp_path_factory.mktemp("shards")
    (folder / f"{MODULE}.py").write_text(RECORDED)
    return Trainings(tiny_model, instances, folder)


@pytest.fixture(scope="module")
def alone(trainings: Trainings) -> Path:
    return trainings("cpu", POLICY)


@pytest.fixture(scope="module", params=STRATEGIES)
def interrupted(request: pytest.FixtureRequest, trainings: Trainings) -> tuple[Path, str]:
    """A training of two processes, one of which was killed, taken up again; and what was told of the kill."""
    told = trainings.killed(request.param, POLICY)
    return trainings(request.param, POLICY), told


def rollouts_of(out: Path, processes: int) -> list[dict[int, list[Any]]]:
    """Of each process: for each step, the rows that it rolled out (number of the instance, completion's ids)."""
    files = [out / f"rollouts-{rank}.jsonl" for rank in range(processes)]
    return [{row["step"]: row["rows"] for row in Tail(file)} for file in files]


def steps_of(out: Path) -> dict[int, dict[str, float]]:
    """Every number of every step but times."""
    return {
        row["step"]: {name: value for name, value in row["metrics"].items() if "seconds" not in name}
        for row in Tail(out / METRICS)
    }


def assert_same_steps(found: Path, expected: Path) -> None:
    assert steps_of(found).keys() == steps_of(expected).keys()
    for step, numbers in steps_of(expected).items():
        assert steps_of(found)[step] == pytest.approx(numbers, rel=RELATIVE, abs=ABSOLUTE), step


def log_probabilities(out: Path) -> torch.Tensor:
    """Of the next token at each place of a text, (tokens, vocabulary), by the saved model as anybody loads it."""
    model = AutoModelForCausalLM.from_pretrained(out / "checkpoint").eval()
    assert model.lm_head.weight is model.get_input_embeddings().weight, "tied embeddings are one"
    ids = AutoTokenizer.from_pretrained(out / "checkpoint")("weather in Paris now", return_tensors="pt")
    with torch.no_grad():
        return model(**ids).logits[0].log_softmax(-1)


def assert_same_model(found: Path, expected: Path) -> None:
    assert torch.allclose(log_probabilities(found), log_probabilities(expected), atol=1e-4)
    one, two = (load_file(out / "checkpoint" / "model.safetensors") for out in (expected, found))
    assert {name: tensor.shape for name, tensor in one.items()} == {name: tensor.shape for name, tensor in two.items()}


@pytest.mark.slow
def test_two_ranks_are_two(alone: Path, interrupted: tuple[Path, str]) -> None:
    """Each rolls out prompts of its own, and both step along the gradient of all: what one process does alone."""
    out, _ = interrupted
    (whole,), halves = rollouts_of(alone, 1), rollouts_of(out, 2)
    for step, rows in whole.items():
        assert [len(half[step]) for half in halves] == [8, 8]
        assert {row[0] for row in halves[0][step]}.isdisjoint(row[0] for row in halves[1][step])
        assert halves[0][step] + halves[1][step] == rows, "the same completions, too"
    norms = [steps_of(run)[1]["gradient_norm"] for run in (alone, out)]
    assert norms[0] > 0.01
    assert norms[1] == pytest.approx(norms[0], rel=RELATIVE)


@pytest.mark.slow
def test_a_training_in_shards_is_that_of_one_process_even_if_one_of_two_is_killed(
    alone: Path, interrupted: tuple[Path, str]
) -> None:
    """DeepSpeed#3841: ZeRO-3 saves empty tensors."""
    out, told = interrupted
    assert re.match(
        r"rank 1 of 2 of recorded_policy was killed by SIGKILL, likely out of memory, and the others", told
    ), told
    (note,) = [row["message"] for row in Tail(out / EVENTS) if row["event"] == "note"]
    assert re.match(r"goes on after step [24] of 6", note)
    assert_same_steps(out, alone)
    assert sum(numbers["gradient_norm"] > 0.01 for numbers in steps_of(out).values()) >= 3
    assert_same_model(out, alone)


@pytest.mark.study
@pytest.mark.parametrize("launch", STRATEGIES)
def test_a_run_is_taken_up_within_a_rollout_batch(launch: str, trainings: Trainings) -> None:
    """Two processes without shards say what comes out: one process has other rows in a step."""
    whole = trainings.folder / "within-whole"
    if not whole.exists():
        trainings("cpu-2", WITHIN, "within-whole")
    trainings.killed(launch, WITHIN, f"within-{launch}")
    out = trainings(launch, WITHIN, f"within-{launch}")
    (note,) = [row["message"] for row in Tail(out / EVENTS) if row["event"] == "note"]
    assert re.match(r"goes on after step [248] of 10", note)
    assert_same_steps(out, whole)
    assert_same_model(out, whole)


@pytest.mark.study
@pytest.mark.parametrize("launch", STRATEGIES)
@pytest.mark.parametrize("kind", ["policy", "sft"])
def test_adapters_are_trained_in_shards_and_merged(kind: str, launch: str, trainings: Trainings) -> None:
    adapter = AdapterConfig(rank=4, alpha=8)
    config = (SFT if kind == "sft" else POLICY).model_copy(update={"lora": adapter, "steps": 4, "save_every": 4})
    whole = trainings.folder / f"lora-{kind}"
    if not whole.exists():
        trainings("cpu", config, whole.name)
    out = trainings(launch, config, f"lora-{kind}-{launch}")
    assert_same_steps(out, whole)
    assert_same_model(out, whole)
    one, two = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (whole, out))
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)


@pytest.mark.study
@needs_deepspeed
def test_offloading_keeps_the_optimiser(trainings: Trainings) -> None:
    """Betas other than those of the AdamW that accelerate would put in its place."""
    preset = trainings.folder / "offload.yaml"
    preset.write_text("processes: 2\naccelerate: zero3-offload\ndevice: cpu\n")
    assert trainer_arguments(SFT, trainings.folder).adam_beta2 == 0.95
    whole = trainings("cpu", SFT, "offload-alone")
    out = trainings(str(preset), SFT, "offload")
    assert_same_steps(out, whole)
    assert_same_model(out, whole)


@pytest.mark.study
@pytest.mark.parametrize("launch", STRATEGIES)
def test_fine_tuning_in_shards_is_that_of_one_process(launch: str, trainings: Trainings) -> None:
    whole = trainings.folder / "sft"
    if not whole.exists():
        trainings("cpu", SFT, "sft")
    trainings.killed(launch, SFT, f"sft-{launch}")
    out = trainings(launch, SFT, f"sft-{launch}")
    assert_same_steps(out, whole)
    assert_same_model(out, whole)
