"""A vLLM server as training asks it: completions of token ids with their log-probabilities, and new weights.

The addresses are vLLM's own (0.31 and 0.32 were looked at): /v1/completions, and with VLLM_SERVER_DEV_MODE=1 in its
environment /collective_rpc, /reset_prefix_cache and /server_info. Nothing here imports vLLM or torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import httpx2

from awpo.errors import UserError
from awpo.processes import StageFailed

CONNECTIONS = 64
CONNECT_SECONDS, ANSWER_SECONDS = 30.0, 3600.0
WATCH_SECONDS, WATCH_TRIES = 30.0, 4
"""So often, and with so long a time limit, a server that owes an answer is asked for its health. Completions may take
long, but a server that is there says so: after so many failures in a row it is taken for gone."""
CACHE_TRIES, CACHE_PAUSE = 50, 0.1
"""The cache of prefixes cannot be emptied while a request holds on to it, and vLLM lets go a moment after its answer."""


class ServerGone(RuntimeError):
    """The server does not answer, says that its engine has died, or answers what vLLM does not."""


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
        self._http = self._open()

    def _open(self) -> httpx2.Client:
        timeout = httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        limits = httpx2.Limits(max_connections=CONNECTIONS)
        # A proxy that the environment names is not for a server that is told its own address.
        return httpx2.Client(base_url=self.url, timeout=timeout, limits=limits, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def check(self, context: int) -> None:
        """Raises UserError where the server is not one that rollouts of `context` tokens can be taken from."""
        try:
            names = [model["id"] for model in self._get("/v1/models")["data"]]
            self.name = self.name or names[0]
            told = self._get("/server_info", config_format="json")["vllm_config"]
        except (LookupError, TypeError):
            raise UserError(f"what answers at {self.url} is no vLLM server; mend policy.rollouts.url") from None
        except ServerGone as error:
            raise UserError(f"{error}; start one there, or leave policy.rollouts.url out") from None
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
        requests = [
            self._http.build_request("POST", "/v1/completions", json=self._completion(ids, sampling))
            for ids, sampling in zip(prompts, samplings, strict=True)
        ]
        return [
            self._sampled(answer, sampling) for answer, sampling in zip(self._answers(requests), samplings, strict=True)
        ]

    def _completion(self, ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        return {
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
        }

    def _sampled(self, answer: Any, sampling: Sampling) -> list[Sampled]:
        try:
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            found = [Sampled(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]
        except (LookupError, TypeError, ValueError):
            raise StageFailed(f"what answers at {self.url} gives no completions as vLLM does") from None
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

    def is_well(self) -> bool:
        """Whether the server answers within `WATCH_SECONDS` that it is well."""
        # Not by the client's own connections, all of which may be waiting.
        with suppress(httpx2.TransportError):
            return httpx2.get(f"{self.url}/health", timeout=WATCH_SECONDS, trust_env=False).status_code == 200
        return False

    def _get(self, path: str, **parameters: str) -> Any:
        return self._answers([self._http.build_request("GET", path, params=parameters)])[0]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._answers([self._http.build_request("POST", path, json=body)])[0]

    def _answers(self, requests: Sequence[httpx2.Request]) -> list[Any]:
        """The answers to requests that are under way together, as JSON. Raises ServerGone, _Refused."""
        jobs: SimpleQueue[tuple[httpx2.Request, Future[Any]]] = SimpleQueue()
        futures: list[Future[Any]] = [Future() for _ in requests]
        for job in zip(requests, futures, strict=True):
            jobs.put(job)

        def work(http: httpx2.Client) -> None:
            with suppress(Empty):
                while True:
                    request, future = jobs.get_nowait()
                    try:
                        future.set_result(self._answer(http, request))
                    except BaseException as error:  # noqa: BLE001 - raised where the answer is asked for
                        future.set_exception(error)

        for _ in range(min(CONNECTIONS, len(requests))):
            # Daemons: nobody waits for a server that was given up.
            threading.Thread(target=work, args=(self._http,), name="rollouts", daemon=True).start()
        try:
            self._watch(futures)
            return [future.result() for future in futures]
        except BaseException:
            with suppress(Empty):
                while True:
                    jobs.get_nowait()
            # What is still under way keeps its connections.
            self._http.close()
            self._http = self._open()
            raise

    def _watch(self, futures: Sequence[Future[Any]]) -> None:
        """Returns when all is answered. Raises what the first request to fail did, ServerGone where the server hangs."""
        silent = 0
        while True:
            done, waiting = wait(futures, timeout=WATCH_SECONDS, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            if not waiting:
                return
            silent = 0 if self.is_well() else silent + 1
            if silent == WATCH_TRIES:
                raise ServerGone(
                    f"the vLLM server at {self.url} does not answer (nor, {WATCH_TRIES} times, whether it is well)"
                )

    def _answer(self, http: httpx2.Client, request: httpx2.Request) -> Any:
        try:
            response = http.send(request)
        except httpx2.TransportError as error:
            told = str(error) or type(error).__name__
            raise ServerGone(f"the vLLM server at {self.url} does not answer ({told})") from None
        said = " ".join(response.text[:2000].split())[:300]
        if response.status_code >= 500:
            raise ServerGone(f"the vLLM server at {self.url} failed: status {response.status_code}, {said}")
        if response.status_code >= 400:
            raise _Refused(f"status {response.status_code} for {request.url.path}: {said}")
        try:
            return response.json() if response.content else None
        except ValueError:
            raise ServerGone(
                f"what answers at {self.url} is no vLLM server: for {request.url.path} it says {said!r}"
            ) from None


class _Refused(StageFailed):
    """The server says that a request is wrong."""
