"""Rollouts by the real vLLM (`make test-vllm`): runs that take them, and weights that are not those that are trained."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from awpo.artifacts import open_stage
from awpo.config import CorpusConfig
from awpo.config_rollouts import RolloutSettings
from awpo.config_training import AdapterConfig, PolicyConfig
from awpo.data.decompose import decompose
from awpo.data.store import read_instances, write_instances
from awpo.embedded.corpus import dialogues
from awpo.embedded.model import build_model
from awpo.errors import UserError
from awpo.events import EVENTS, METRICS, RunLog, Tail
from awpo.launch import read_launch
from awpo.methods import get_method
from awpo.processes import StageFailed, run_worker
from awpo.serving.process import ModelServer
from awpo.serving.vllm import vllm_python
from awpo.training import vllm_rollouts
from awpo.training.checkpoints import load_policy
from awpo.training.lora import peft_config
from awpo.training.policy import prompt_rows, train_policy, trainer_arguments
from awpo.training.policy_trainer import PolicyTrainer
from awpo.training.scoring import Scorer
from awpo.training.vllm_rollouts import WEIGHTS, open_rollouts, probe_prompts, rollout_server
from awpo.training.vllm_server import Sampling, VllmClient

try:
    vllm_python()
    MISSING = ""
except UserError as error:
    MISSING = f"{error} (make install-vllm, then make test-vllm)"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.servers,
    pytest.mark.vllm,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
NAMES = {"rollout/probe_difference", "rollout/sync_seconds", "rollout/server_restarts", "sampling/difference_mean"}
NAMES |= {"sampling/difference_max", "sampling/weight_min", "sampling/weight_mean", "sampling/weight_max"}
CONTEXT = 1024 + 24


def config(url: str | None, **changed: Any) -> PolicyConfig:
    settings = {
        "method": "grpo",
        "steps": 6,
        "prompts_per_rollout": 4,
        "group_size": 4,
        "steps_per_rollout": 2,
        "micro_batch_size": 4,
        "learning_rate": 1e-3,
        "max_completion_length": 24,
        "save_every": 2,
        "rollouts": RolloutSettings(engine="vllm_server", url=url),
    }
    return PolicyConfig(**{**settings, **changed})


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny untrained Qwen3, whose head is its embedding, and of instances."""
    folder = tmp_path_factory.mktemp("vllm")
    asked = CorpusConfig(train_dialogues=40, validation_dialogues=2, test_dialogues=2)
    with open_stage(folder / "instances", "decompose", {}, {}) as stage:
        write_instances(stage.folder, [item for dialogue in dialogues(asked) for item in decompose(dialogue)])
        stage.finish()
    build_model("embedded-1m", folder / "instances", folder / "tiny")
    return folder / "tiny", folder / "instances"


@pytest.fixture(scope="module")
def server(parts: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    with rollout_server(str(parts[0]), tmp_path_factory.mktemp("server"), CONTEXT) as running:
        yield running


@pytest.fixture(scope="module")
def url(server: ModelServer) -> str:
    return server.url.removesuffix("/v1")


def metrics_of(out: Path) -> list[dict[str, float]]:
    return [row["metrics"] for row in Tail(out / METRICS)]


def engines_of(model: Path) -> list[int]:
    """The processes that serve the model by vLLM, of whoever started them."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "vllm.entrypoints.openai.api_server" in words and str(model) in words:
            found.append(int(file.parent.name))
    return found


class Trainer:
    """A trainer that asks the server at `url`, outside of a training loop."""

    def __init__(self, parts: tuple[Path, Path], out: Path, url: str, lora: AdapterConfig | None = None) -> None:
        model, tokenizer = load_policy(str(parts[0]))
        asked, method, log = config(url, lora=lora), get_method("grpo"), RunLog(out)
        instances = read_instances(parts[1], {"train"})
        rows, _ = prompt_rows(tokenizer, instances, 1024)
        self.closing = ExitStack()
        probes = probe_prompts(tokenizer, rows["prompt"])
        assert min(map(len, probes)) > 128, "vLLM would keep nothing of them"
        rollouts = self.closing.enter_context(open_rollouts(asked, str(parts[0]), probes, out, log, main=True))
        assert rollouts
        self.trainer = PolicyTrainer(
            model=model,
            processing_class=tokenizer,
            args=trainer_arguments(asked, method, out, 1),
            peft_config=peft_config(lora),
            train_dataset=rows,
            method=method,
            scorer=Scorer(method, asked, None),
            instances=instances,
            log=log,
            rollouts=rollouts,
        )
        self.trainer.model.train()

    def batch(self, step: int) -> float:
        """A rollout batch as at an optimiser step; returns what the probe found."""
        self.trainer.state.global_step = step
        rows = [dict(self.trainer.train_dataset[index // 4]) for index in range(16)]
        output = self.trainer._generate_and_score_completions(rows)
        assert output["importance_sampling_ratio"].shape == (16, 1)
        return float(self.trainer._metrics["train"]["rollout/probe_difference"][-1])

    def change(self, part: str) -> None:
        """Moves the weights whose names contain `part`, far enough to be seen."""
        torch.manual_seed(1)
        with torch.no_grad():
            for name, weight in self.trainer.model.named_parameters():
                if part in name:
                    weight.add_(0.02 * torch.randn_like(weight))


@pytest.fixture
def asking(parts: tuple[Path, Path], tmp_path: Path, url: str) -> Iterator[Trainer]:
    found = Trainer(parts, tmp_path, url)
    with found.closing:
        yield found


# What is sampled


def test_completions_follow_their_seeds_and_end_where_the_trainer_says(url: str) -> None:
    client = VllmClient(url)
    client.check(CONTEXT)
    prompts = [[(7 * place + 13 * number) % 900 for place in range(150)] for number in range(3)]

    def ask(seed: int, count: int = 4, end_ids: tuple[int, ...] = ()) -> list[list[list[int]]]:
        found = client.complete(prompts, [Sampling(count, seed, 12, 1.0, end_ids)] * 3)
        assert all(max(one.logprobs) < 0 for group in found for one in group)
        return [[one.ids for one in group] for group in found]

    first = ask(5)
    assert first == ask(5)
    assert len({tuple(ids) for group in first for ids in group}) == 12
    assert [group[:3] for group in ask(6)] == [group[1:] for group in first], "the next completion has the next seed"
    end = first[0][0][5]
    assert ask(5, end_ids=(end,))[0][0] == first[0][0][: first[0][0].index(end) + 1]
    client.close()


def test_the_trainer_and_the_server_agree_after_each_change(asking: Trainer) -> None:
    assert asking.batch(0) < 1e-4
    for step, part in enumerate(("embed_tokens", "norm", "mlp", ""), 1):
        asking.change(part)
        assert asking.batch(step) < 1e-4
    assert max(asking.trainer._metrics["train"]["sampling/sampling_logp_difference/mean"]) < 1e-4
    # Another round at the same step hands nothing over.
    before = len(asking.trainer._metrics["train"]["rollout/probe_difference"])
    asking.batch(4)
    assert len(asking.trainer._metrics["train"]["rollout/probe_difference"]) == before


BROKEN = {
    "the weights are not loaded": (VllmClient, "load", lambda client, folder: None),
    "the cache of prefixes is not emptied": (VllmClient, "forget", lambda client: None),
    "the head is left as it was": (vllm_rollouts, "write_weights", lambda model, folder: model.save_pretrained(folder)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_server_without_the_trained_weights_is_seen(
    what: str, asking: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asking.batch(0) < 1e-4
    monkeypatch.setattr(*BROKEN[what])
    asking.change("embed_tokens")
    with pytest.raises(UserError, match=r"vLLM does not have the trained weights: after step 1 .* of a probe differ"):
        asking.batch(1)
    monkeypatch.undo()
    assert asking.batch(2) < 1e-4


def test_adapters_reach_the_server(parts: tuple[Path, Path], tmp_path: Path, url: str) -> None:
    asking = Trainer(parts, tmp_path, url, AdapterConfig(rank=4, alpha=8))
    with asking.closing:
        asking.change("lora_B")
        assert asking.batch(0) < 1e-4
        asking.change("lora_")
        assert asking.batch(1) < 1e-4


# Runs


def test_a_run_starts_its_server_and_again_when_it_dies(parts: tuple[Path, Path], tmp_path: Path) -> None:
    """Killed behind the first of three rollout batches."""
    killed = []

    def kill() -> None:
        while not list(Tail(tmp_path / "run" / METRICS)):
            time.sleep(0.05)
        for process in engines_of(parts[0]):
            if process not in others:
                os.kill(process, signal.SIGKILL)
                killed.append(process)

    others = engines_of(parts[0])
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    train_policy(str(parts[0]), parts[1], tmp_path / "run", config(None))
    assert len(killed) == 1
    assert engines_of(parts[0]) == others, "the run's server ends with it"
    assert not (tmp_path / "run" / WEIGHTS).exists()
    rows = [row for row in metrics_of(tmp_path / "run") if "rollout/probe_difference" in row]
    assert len(rows) == 3
    told = PAGE.read_text("utf-8")
    for row in rows:
        assert set(row) >= NAMES
        assert max(row["rollout/probe_difference"], row["sampling/difference_mean"]) < 1e-4
        assert row["sampling/weight_min"] == pytest.approx(1, abs=1e-2)
    assert all(f"`{name}`" in told for name in NAMES)
    assert [row["rollout/server_restarts"] for row in rows][-1] == 1
    warnings = [row["message"] for row in Tail(tmp_path / "run" / EVENTS) if row["event"] == "warning"]
    assert any(re.search(r"it is started again \(1 of 2\)", message) for message in warnings)


def test_trl_takes_the_vllm_of_its_environment() -> None:
    """Imported by vLLM's Python as on GPUs; TRL warns of a version that it does not take."""
    code = (
        "from trl.import_utils import is_vllm_available; assert is_vllm_available(); import vllm; "
        "from trl.generation.vllm_generation import VLLMGeneration; import awpo.training.sft, awpo.training.policy"
    )
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[1])}
    done = subprocess.run([vllm_python(), "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "TRL currently supports vLLM" not in done.stderr


def test_two_processes_take_the_rollouts_of_one(parts: tuple[Path, Path], tmp_path: Path, url: str) -> None:
    """Whole weights in each, and in shards (FSDP2)."""
    found = {}
    for launch in ("cpu", "cpu-2", "cpu-2-fsdp2"):
        asked, out = read_launch(launch), tmp_path / launch
        job = {"model": str(parts[0]), "instances": str(parts[1]), "out": str(out), "launch": asked.effect()}
        job["config"] = config(url, steps=4).model_dump(mode="json")
        run_worker("awpo.training.policy", job, out, launch=asked)
        rows = [row for row in metrics_of(out) if "rollout/probe_difference" in row]
        assert len(rows) == 2
        assert max(row["rollout/probe_difference"] for row in rows) < 1e-4
        found[launch] = (rows[0]["response_length"], rows[0]["reward/outcome"])
    assert found["cpu"] == found["cpu-2"] == found["cpu-2-fsdp2"]


def test_a_run_whose_server_elsewhere_ends_goes_on_with_another(
    parts: tuple[Path, Path], tmp_path: Path, server: ModelServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one: it ends the server of the others."""
    monkeypatch.setattr(vllm_rollouts, "AWAY_SECONDS", 1.0)

    def kill() -> None:
        while not list(Tail(tmp_path / METRICS)):
            time.sleep(0.05)
        for process in engines_of(parts[0]):
            os.kill(process, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(StageFailed, match=r"does not answer .*; once it is well, start again: training goes on"):
        train_policy(str(parts[0]), parts[1], tmp_path, config(url))
    killer.join()
    done = len(metrics_of(tmp_path))
    assert 0 < done < 6
    train_policy(str(parts[0]), parts[1], tmp_path, config(None))
    assert len(metrics_of(tmp_path)) == 6
    notes = [row["message"] for row in Tail(tmp_path / EVENTS) if row["event"] == "note"]
    assert any(message.startswith("goes on after step") for message in notes)
