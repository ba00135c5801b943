"""A vLLM server as training asks it: completions of token ids with their log-probabilities, and new weights.

The addresses are vLLM's own (0.31 and 0.32 were looked at): /v1/completions, and with VLLM_SERVER_DEV_MODE=1 in its
environment /collective_rpc, /reset_prefix_cache and /server_info. Nothing here imports vLLM or torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from awpo.errors import UserError
from awpo.processes import StageFailed

CONNECTIONS = 64
CONNECT_SECONDS, ANSWER_SECONDS = 30.0, 3600.0
CACHE_TRIES, CACHE_PAUSE = 50, 0.1
"""The cache of prefixes cannot be emptied while a request holds on to it, and vLLM lets go a moment after its answer."""


class ServerGone(RuntimeError):
    """The server does not answer, or says that its engine has died."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a prompt is completed: `seed` is that of the first completion, the next ones have seed + 1, seed + 2, ..."""

    count: int
    seed: int
    limit: int
    temperature: float
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion: its tokens, the closing one included, and the log-probability with which each was drawn."""

    ids: list[int]
    logprobs: list[float]


class VllmClient:
    """Speaks with the server at `url` (without /v1), of which `name` is the model; by default its only one."""

    def __init__(self, url: str, name: str = "") -> None:
        self.url, self.name = url, name
        timeout = httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        limits = httpx2.Limits(max_connections=CONNECTIONS)
        # A proxy that the environment names is not for a server that is told its own address.
        self._http = httpx2.Client(base_url=url, timeout=timeout, limits=limits, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def check(self, context: int) -> None:
        """Raises UserError where the server is not one that rollouts of `context` tokens can be taken from."""
        try:
            names = [model["id"] for model in self._get("/v1/models")["data"]]
        except ServerGone as error:
            raise UserError(f"{error}; start one there, or leave policy.rollouts.url out") from None
        self.name = self.name or names[0]
        try:
            told = self._get("/server_info", config_format="json")["vllm_config"]
        except _Refused as error:
            raise UserError(
                f"the server at {self.url} takes no new weights ({error}); start vLLM with VLLM_SERVER_DEV_MODE=1"
            ) from None
        model = told["model_config"]
        if model["logprobs_mode"] != "processed_logprobs":
            raise UserError(
                f"the server at {self.url} tells log-probabilities before the temperature; start vLLM with "
                "--logprobs-mode processed_logprobs"
            )
        if model["max_model_len"] < context:
            raise UserError(
                f"the server at {self.url} takes {model['max_model_len']} tokens, and prompt and completion may have "
                f"{context}; start vLLM with --max-model-len {context}"
            )

    def complete(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[list[Sampled]]:
        """The completions of each prompt, all prompts at once. Raises ServerGone, StageFailed where one is refused."""
        with ThreadPoolExecutor(max_workers=min(CONNECTIONS, len(prompts)), thread_name_prefix="rollouts") as pool:
            return list(pool.map(self._complete, prompts, samplings))

    def _complete(self, ids: Sequence[int], sampling: Sampling) -> list[Sampled]:
        answer = self._post(
            "/v1/completions",
            {
                "model": self.name,
                "prompt": list(ids),
                "n": sampling.count,
                "seed": sampling.seed,
                "max_tokens": sampling.limit,
                "temperature": sampling.temperature,
                # The model's own distribution, whatever its generation_config.json says.
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "logprobs": 0,
                "return_token_ids": True,
                # The trainer's end tokens alone.
                "ignore_eos": True,
                "stop_token_ids": list(sampling.end_ids),
            },
        )
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        found = [Sampled(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]
        if len(found) != sampling.count or any(len(one.ids) != len(one.logprobs) or not one.ids for one in found):
            raise StageFailed(f"the server at {self.url} gave {len(found)} of {sampling.count} completions, or not all")
        return found

    def load(self, folder: Path) -> None:
        """Has the server take the weights of a checkpoint's folder, which it must see under the same path."""
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})

    def forget(self) -> None:
        """Empties the cache of prefixes: what it holds was computed by the weights before."""
        for _ in range(CACHE_TRIES):
            answer = self._post("/reset_prefix_cache", {})
            # Before 0.26 vLLM answered nothing.
            if answer is None or answer["success"]:
                return
            time.sleep(CACHE_PAUSE)
        raise StageFailed(f"the server at {self.url} could not empty its cache of prefixes: is anybody else asking it?")

    def _get(self, path: str, **parameters: str) -> Any:
        return self._answer(self._http.build_request("GET", path, params=parameters))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._answer(self._http.build_request("POST", path, json=body))

    def _answer(self, request: httpx2.Request) -> Any:
        try:
            response = self._http.send(request)
        except httpx2.TransportError as error:
            told = str(error) or type(error).__name__
            raise ServerGone(f"the vLLM server at {self.url} does not answer ({told})") from None
        if response.status_code >= 500:
            raise ServerGone(
                f"the vLLM server at {self.url} failed: status {response.status_code}, {response.text:.300}"
            )
        if response.status_code >= 400:
            raise _Refused(f"status {response.status_code} for {request.url.path}: {response.text:.300}")
        return response.json() if response.content else None


class _Refused(StageFailed):
    """The server says that a request is wrong."""
