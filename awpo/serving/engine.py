"""Completions for many requests at once from one model on this machine, by the loop of `awpo.decoding`."""

from __future__ import annotations

import queue
import secrets
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from awpo.chat import END_TOKENS
from awpo.decoding import Decoder, Row, ends_at, uniform_numbers
from awpo.errors import UserError
from awpo.models import HARMLESS, ModelChoice, no_weights

MOST_ROWS = 64
"""Completions generated at once; fewer where their keys and values would pass the memory set aside."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What is to be completed: prompt tokens, and how. `seed` None: by chance."""

    ids: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion: text with its tags, why it ended, and how many tokens it took, the closing one included."""

    text: str
    finish: Literal["stop", "length"]
    tokens: int


class Engine:
    """A model and its tokenizer behind a queue: requests that wait are completed together.

    A completion depends on its request alone (`awpo.decoding`): the same seed gives the same text whoever asks at
    the same time. `close` ends the thread that computes.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end_ids = _end_ids(model, tokenizer)
        self.decoder = Decoder(model.eval(), self.end_ids)
        self._hidden = {*self.end_ids, tokenizer.pad_token_id}
        self._queue: queue.SimpleQueue[tuple[ChatRequest, Future[list[Choice]]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def context(self) -> int:
        """The most tokens of prompt and completion together."""
        return self.decoder.context

    def submit(self, request: ChatRequest) -> Future[list[Choice]]:
        """The completions of a request, `n` of them, once they are there."""
        future: Future[list[Choice]] = Future()
        self._queue.put((request, future))
        return future

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            waiting = [self._queue.get()]
            rows = 0
            while not self._queue.empty() and rows < MOST_ROWS:
                waiting.append(self._queue.get())
                rows += waiting[-1][0].n if waiting[-1] else 0
            by_temperature: dict[float, list[tuple[ChatRequest, Future[list[Choice]]]]] = defaultdict(list)
            for entry in waiting:
                # An asker that has left while it waited costs nothing.
                if entry is not None and entry[1].set_running_or_notify_cancel():
                    by_temperature[entry[0].temperature].append(entry)
            for temperature, entries in by_temperature.items():
                try:
                    found = self._complete([request for request, _ in entries], temperature)
                except Exception as error:  # noqa: BLE001 -- whoever asked is told, and the server lives on
                    for _, future in entries:
                        future.set_exception(error)
                else:
                    for (_, future), choices in zip(entries, found, strict=True):
                        future.set_result(choices)
            if None in waiting:
                return

    def _complete(self, requests: Sequence[ChatRequest], temperature: float) -> list[list[Choice]]:
        rows: list[list[Row]] = []
        for number, request in enumerate(requests):
            seed = secrets.token_hex(16) if request.seed is None else str(request.seed)
            key = f"{seed}\0{request.ids}"
            ended = ends_at(request.stop, self._text)
            rows.append(
                [
                    Row(
                        number,
                        list(request.ids),
                        request.max_tokens,
                        uniform_numbers(f"{key}\0{sample}", request.max_tokens) if temperature > 0 else None,
                        ended,
                    )
                    for sample in range(request.n)
                ]
            )
        for _ in self.decoder.complete([row for group in rows for row in group], temperature, MOST_ROWS):
            pass
        return [[self._choice(row, request) for row in group] for request, group in zip(requests, rows, strict=True)]

    def _text(self, output: Sequence[int]) -> str:
        kept = [token for token in output if token not in self._hidden]
        text: str = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _choice(self, row: Row, request: ChatRequest) -> Choice:
        text = self._text(row.output)
        cuts = [place for stop in request.stop if (place := text.find(stop)) >= 0]
        if cuts:
            return Choice(text[: min(cuts)], "stop", len(row.output))
        return Choice(text, "stop" if row.finish == "stop" else "length", len(row.output))


def _end_ids(model: Any, tokenizer: Any) -> list[int]:
    """The model's own end tokens, and those of the ChatML family that the tokenizer has."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    ids = {declared} if isinstance(declared, int) else set(declared or ())
    vocabulary = tokenizer.get_vocab()
    ids |= {vocabulary[token] for token in END_TOKENS if token in vocabulary}
    return sorted(ids | ({tokenizer.eos_token_id} - {None}))


def load_engine(choice: ModelChoice) -> Engine:
    """The engine of a checkpoint's folder or a model on the hub; on the GPU where there is one. Raises UserError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gpu = torch.cuda.is_available()
    try:
        tokenizer = AutoTokenizer.from_pretrained(choice.location, revision=choice.revision, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            choice.location, revision=choice.revision, dtype="auto" if gpu else torch.float32, **HARMLESS
        )
    except (OSError, ValueError) as error:
        reason = no_weights(Path(choice.location)) or str(error).splitlines()[0]
        raise UserError(f"cannot load the model {choice.address!r}: {reason}; give a checkpoint's folder") from None
    if not tokenizer.chat_template:
        raise UserError(f"{choice.address!r} has no chat template; save one with its tokenizer")
    return Engine(model.to("cuda") if gpu else model, tokenizer)
