"""Rollouts by vLLM, as far as they go without it: settings, TRL's arguments and correction, weights, refusals."""

from __future__ import annotations

import inspect
import re
import socket
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, import_utils

from awpo.config_rollouts import RolloutSettings
from awpo.config_training import AdapterConfig, PolicyConfig
from awpo.data.store import read_instances
from awpo.errors import UserError
from awpo.events import RunLog
from awpo.launch import LaunchSettings
from awpo.methods import get_method
from awpo.processes import StageFailed
from awpo.serving import vllm as vllm_serving
from awpo.serving.process import ModelServer
from awpo.serving.vllm import launch_for
from awpo.training import vllm_arguments as arguments_module
from awpo.training.lora import peft_config
from awpo.training.policy import prompt_rows, trainer_arguments
from awpo.training.policy_trainer import PolicyTrainer
from awpo.training.rollout_weights import merged_weights, write_weights
from awpo.training.scoring import Scorer
from awpo.training.vllm_arguments import TRL_WANTS, check_rollouts, vllm_arguments
from awpo.training.vllm_rollouts import log_probabilities, refuse_stale
from awpo.training.vllm_server import Sampling, ServerGone, VllmClient

SERVER = {"engine": "vllm_server", "url": "http://127.0.0.1:8000"}


def config(**rollouts: Any) -> PolicyConfig:
    return PolicyConfig(
        method="grpo",
        steps=4,
        prompts_per_rollout=4,
        group_size=4,
        steps_per_rollout=2,
        micro_batch_size=4,
        max_completion_length=12,
        rollouts=RolloutSettings.read(rollouts, "policy.rollouts"),
    )


# Settings


def test_who_samples_belongs_to_a_result_and_where_does_not() -> None:
    before = PolicyConfig().identity()
    assert "rollouts" not in before, "results of earlier versions were known without it"
    server = config(**SERVER)
    assert server.identity()["rollouts"] == {
        "engine": "vllm_server",
        "correction": "sequence_mask",
        "correction_limit": 3.0,
    }
    assert config(engine="vllm_server", largest_difference=0.5).identity() == server.identity()
    assert config(**SERVER, correction="token_truncate").identity() != server.identity()


def test_the_address_is_that_of_the_server() -> None:
    for url in ("http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"):
        assert config(engine="vllm_server", url=url).rollouts.url == "http://h:8000"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": "http://h:1"}, "'trainer' would never ask http://h:1; set engine: vllm_server"),
        ({"engine": "vllm_server", "url": "h:1"}, "is no address of a server"),
        ({"engine": "vllm_server", "sleep": False}, "sleep is read by engine vllm_colocate alone"),
        ({"correction": "token_mask"}, "correction is read by engine vllm_server and vllm_colocate alone"),
        ({"engine": "vllm"}, "must be 'trainer', 'vllm_server' or 'vllm_colocate', not 'vllm'"),
    ],
)
def test_what_would_be_ignored_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        config(**given)


# TRL's arguments


def test_on_a_cpu_trl_corrects_and_starts_no_engine(tmp_path: Path) -> None:
    asked = config(**SERVER, correction="token_truncate", correction_limit=2)
    arguments = trainer_arguments(asked, get_method("grpo"), tmp_path, 1)
    assert arguments.use_vllm is False
    assert arguments.vllm_importance_sampling_correction is True
    assert arguments.vllm_importance_sampling_mode == "token_truncate"
    assert arguments.vllm_importance_sampling_clip_max == 2.0
    plain = trainer_arguments(config(), get_method("grpo"), tmp_path, 1)
    assert (plain.use_vllm, plain.vllm_importance_sampling_correction) == (False, False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (SERVER, {"vllm_mode": "server", "vllm_server_base_url": SERVER["url"]}),
        (
            {"engine": "vllm_colocate", "gpu_memory_utilization": 0.4, "tensor_parallel": 2, "sleep": False},
            {
                "vllm_mode": "colocate",
                "vllm_gpu_memory_utilization": 0.4,
                "vllm_tensor_parallel_size": 2,
                "vllm_enable_sleep_mode": False,
                "vllm_max_model_length": 1024 + 12,
            },
        ),
    ],
)
def test_on_gpus_trl_is_told_which_engine(
    given: dict[str, Any], expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's own config takes them; nothing more can be seen without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = vllm_arguments(config(**given))
    assert expected.items() <= found.items()
    monkeypatch.undo()
    arguments = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, use_vllm=True, **found)
    for name, value in found.items():
        assert getattr(arguments, name) == value


def test_trls_versions_of_vllm_are_those_that_it_names() -> None:
    source = inspect.getsource(import_utils.is_vllm_available)
    assert tuple(re.findall(r'Version\("([\d.]+)"\)', source)) == TRL_WANTS


def test_what_cannot_be_had_is_told_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, processes: int = 1, **given: Any) -> None:
        with pytest.raises(UserError, match=match):
            check_rollouts(config(**given).rollouts, processes)

    check_rollouts(config().rollouts, 1)
    check_rollouts(config(**SERVER).rollouts, 2)
    refused("vllm_colocate needs GPUs", engine="vllm_colocate")
    monkeypatch.setenv(vllm_serving.VARIABLE, str(tmp_path / "python"))
    refused("vLLM is not installed: there is no .*python; set AWPO_VLLM_PYTHON", engine="vllm_server")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused("give its url, or set engine: vllm_colocate", engine="vllm_server")
    refused("3 processes cannot share vLLMs of tensor_parallel = 2", 3, engine="vllm_colocate", tensor_parallel=2)

    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(arguments_module, "version", absent)
    refused("has no vLLM; TRL takes vLLM 0.22.0 to 0.31.0; name a Python", **SERVER)
    monkeypatch.setattr(arguments_module, "version", lambda name: "0.32.0+cpu")
    refused(r"has vLLM 0.32.0\+cpu; TRL takes", **SERVER)
    monkeypatch.setattr(arguments_module, "version", lambda name: "0.31.0+cu130")
    check_rollouts(config(**SERVER).rollouts, 1)


def pretended_python(path: Path, answer: str) -> str:
    """A program that answers as an interpreter that is asked for its vLLM."""
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return str(path)


def test_another_python_that_trains_is_asked_for_its_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rollouts = config(engine="vllm_colocate").rollouts
    with pytest.raises(
        UserError, match=rf"the Python that trains \({sys.executable}\) has no vLLM; .* AWPO_VLLM_PYTHON"
    ):
        check_rollouts(rollouts, 1, sys.executable)  # really asked
    with pytest.raises(UserError, match=r"has vLLM 0\.32\.0; TRL takes vLLM 0\.22\.0 to 0\.31\.0"):
        check_rollouts(rollouts, 1, pretended_python(tmp_path / "new", "echo 0.32.0"))
    with pytest.raises(UserError, match="cannot be run"):
        check_rollouts(rollouts, 1, str(tmp_path / "nowhere"))
    check_rollouts(rollouts, 1, pretended_python(tmp_path / "fit", "echo 0.31.0"))


def test_rollouts_in_the_training_processes_take_vllms_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = pretended_python(tmp_path / "python", "")
    monkeypatch.setenv(vllm_serving.VARIABLE, python)
    launch = LaunchSettings(processes=2)
    assert launch_for("vllm_colocate", launch) == LaunchSettings(processes=2, interpreter=python)
    assert launch_for("vllm_server", launch) == launch_for("trainer", launch) == launch
    mine = LaunchSettings(interpreter=sys.executable)
    assert launch_for("vllm_colocate", mine) == mine
    monkeypatch.setenv(vllm_serving.VARIABLE, str(tmp_path / "nowhere"))
    assert launch_for("vllm_colocate", launch) == launch, "the training itself says what it lacks"


# Weights


def test_the_weights_that_are_written_are_the_models_with_its_head(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    write_weights(model, tmp_path / "w")
    written = load_file(tmp_path / "w" / "model.safetensors")
    assert written.keys() == model.state_dict().keys()
    assert all(written[name].equal(weight) for name, weight in model.state_dict().items())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_adapters_are_in_the_weights_that_are_written_and_the_model_stays(tiny_model: Path, tmp_path: Path) -> None:
    from peft import get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model), peft_config(AdapterConfig(rank=4, alpha=8))
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found = merged_weights(model)
    write_weights(model, tmp_path / "w")
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())
    merged = model.merge_and_unload()
    assert found.keys() == dict(merged.named_parameters()).keys()
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(found[name], weight)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "w").state_dict()
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(written[name], weight)


# The correction


class Shifted:
    """Samples as the trainer does, and tells log-probabilities that are off by known amounts."""

    def __init__(self, shifts: torch.Tensor) -> None:
        self.shifts = shifts

    def roll_out(self, trainer: Any, prompts: list[list[int]], group_size: int) -> tuple[list[list[int]], list[Any]]:
        ids = trainer._sample(prompts)
        with torch.no_grad():
            trained = log_probabilities(trainer, trainer.model, prompts, ids)
        told = [(row + shift[: len(row)]).tolist() for row, shift in zip(trained, self.shifts, strict=True)]
        return ids, told


def shifted_trainer(
    model: Path, instances: Path, out: Path, asked: PolicyConfig, shifts: torch.Tensor
) -> PolicyTrainer:
    tokenizer = AutoTokenizer.from_pretrained(model)
    chosen = read_instances(instances, {"train"})
    rows, _ = prompt_rows(tokenizer, chosen, 2000)
    method = get_method("grpo")
    trainer = PolicyTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=tokenizer,
        args=trainer_arguments(asked, method, out, 1),
        train_dataset=rows,
        method=method,
        scorer=Scorer(method, asked, None),
        instances=chosen,
        log=RunLog(out),
        rollouts=Shifted(shifts),  # type: ignore[arg-type]
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_correction_by_hand(correction: str, tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    """Weights are trained / told probability; a loss is that of TRL's without vLLM times them, token by token.
    trl#4772, open-instruct#1473: log-probabilities of trainer and rollout drift apart.
    """
    shifts = 0.3 * torch.randn((16, 12), generator=torch.Generator().manual_seed(1))
    asked = config(**SERVER, correction=correction, correction_limit=1.25, largest_difference=9)
    trainer = shifted_trainer(tiny_model, instances, tmp_path, asked, shifts)
    batch = trainer._generate_and_score_completions([dict(trainer.train_dataset[i // 4]) for i in range(16)])

    mask = batch["completion_mask"].bool()
    shifts = shifts[:, : mask.shape[1]].where(mask, 0)
    logs = -shifts if correction.startswith("token") else -shifts.sum(dim=1, keepdim=True)
    raw = logs.exp()
    assert (raw > 1.25).any()
    expected = raw.clamp(max=1.25) if correction.endswith("truncate") else raw.where(raw <= 1.25, 0)
    torch.testing.assert_close(batch["importance_sampling_ratio"], expected, rtol=1e-4, atol=1e-5)

    metrics = trainer._metrics["train"]
    told = shifts.abs()[mask]
    assert metrics["sampling/sampling_logp_difference/mean"] == [pytest.approx(told.mean().item(), rel=1e-4)]
    assert metrics["sampling/sampling_logp_difference/max"] == [pytest.approx(told.max().item(), rel=1e-4)]

    generator = torch.Generator().manual_seed(3)
    batch["advantages"] = torch.randn(16, generator=generator)
    weights = batch["importance_sampling_ratio"].expand(mask.shape)
    # The policy is the one that sampled: each token's loss is minus its advantage, times its weight.
    per_token = -(batch["advantages"][:, None] * weights) * mask
    loss = trainer._compute_loss(trainer.model, batch)
    by_hand = (per_token.sum(dim=1) / mask.sum(dim=1)).mean()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-4)
    batch["importance_sampling_ratio"] = torch.ones_like(batch["importance_sampling_ratio"])
    plain = (-(batch["advantages"][:, None] * mask).sum(dim=1) / mask.sum(dim=1)).mean()
    assert trainer._compute_loss(trainer.model, batch).item() == pytest.approx(plain.item(), rel=1e-4)
    assert abs(plain.item() - by_hand.item()) > 1e-3


def test_rollouts_of_another_policy_end_the_run(tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    """vllm#9744, vllm#29341: stale cache or weights after an update (trl#4772, open-instruct#1473)."""
    trainer = shifted_trainer(tiny_model, instances, tmp_path, config(**SERVER), torch.full((16, 12), 0.002))
    with pytest.raises(UserError, match=r"differ from the trainer's by 0\.002 in the mean, more than .* = 0\.001"):
        trainer._generate_and_score_completions([dict(trainer.train_dataset[i // 4]) for i in range(16)])


def test_a_difference_that_is_no_number_is_no_agreement() -> None:
    """trl#4772, open-instruct#1473: log-probabilities of trainer and rollout drift apart."""
    refuse_stale(9e-4, config(**SERVER), "they")
    refuse_stale(0.04, config(**SERVER, largest_difference=0.05), "they")
    for difference in (2e-3, float("nan")):
        with pytest.raises(UserError, match="they differ"):
            refuse_stale(difference, config(**SERVER), "they")


# The client


def test_who_does_not_answer_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = VllmClient(f"http://127.0.0.1:{port}", "policy")
    sampling = Sampling(1, 0, 4, 1.0, ())
    with pytest.raises(ServerGone, match="does not answer"):
        client.complete([[1, 2]], [sampling])
    with pytest.raises(UserError, match=r"does not answer .*; start one there, or leave policy\.rollouts\.url out"):
        client.check(16)


@pytest.mark.slow
@pytest.mark.servers
def test_a_server_that_takes_no_weights_is_refused(tiny_model: Path) -> None:
    """The project's own server has neither completions of tokens nor vLLM's addresses for weights."""
    with ModelServer(tiny_model) as server:
        client = VllmClient(server.url.removesuffix("/v1"))
        with pytest.raises(
            UserError, match=r"takes no new weights .*status 404.*; start vLLM with VLLM_SERVER_DEV_MODE=1"
        ):
            client.check(16)
        with pytest.raises(StageFailed, match="status 404 for /v1/completions"):
            client.complete([[1, 2]], [replace(Sampling(1, 0, 4, 1.0, ()), count=2)])
