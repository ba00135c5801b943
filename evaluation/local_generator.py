"""Answers of a checkpoint on this machine, on a CPU or one GPU, by the loop of `awpo.decoding`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from awpo.artifacts import input_identity
from awpo.chat import END_TOKENS, render_messages
from awpo.decoding import Decoder, Row, ends_at, uniform_numbers
from awpo.endpoint_cache import CachedAnswer, EndpointCache
from awpo.events import Progress, silent
from awpo.types import content_hash
from evaluation.generate import Finish, Generated, Question, Sampling
from evaluation.loading import load
from evaluation.prompts import PromptFormat


class LocalGenerator:
    """Generates with the checkpoint in a Hugging Face folder (safetensors and tokenizer).

    `threads`: torch threads, 0 leaves it to the launcher. `batch_size` limits the completions generated at once;
    fewer are where their keys and values would pass the memory set aside. `cache` keeps every finished answer, so
    that work that was interrupted goes on with those that are missing. Raises UserError where the folder cannot be
    loaded or the model keeps a state other than keys and values.
    """

    def __init__(
        self,
        checkpoint: Path,
        threads: int = 0,
        batch_size: int = 64,
        prompt_format: PromptFormat = PromptFormat(),  # noqa: B008 -- it cannot be changed
        cache: EndpointCache | None = None,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.batch_size, self.prompt_format, self.cache = batch_size, prompt_format, cache
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer, model = load(checkpoint, "auto" if self.device.type == "cuda" else torch.float32)
        self.model = model.to(self.device).eval()
        self.end_ids = self._end_ids()
        self.decoder = Decoder(self.model, self.end_ids)
        self.identity: dict[str, Any] = {
            "model": input_identity(checkpoint),
            "engine": "in_process",
            "precision": str(self.model.dtype).removeprefix("torch."),
            **prompt_format.identity,
        }

    def render(self, question: Question) -> str:
        """The prompt of a question, by the tokenizer's own template."""
        asked = self.prompt_format.apply(question)
        return render_messages(self.tokenizer, asked.messages, asked.tools, self.prompt_format.template_options)

    def room(self, question: Question) -> int:
        return max(0, self.decoder.context - len(self._ids(self.render(question))))

    def _ids(self, prompt: str) -> list[int]:
        ids: list[int] = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return ids

    def _end_ids(self) -> list[int]:
        """The model's own end tokens, and those of the ChatML family that the tokenizer has."""
        declared = getattr(self.model.generation_config, "eos_token_id", None)
        ids = {declared} if isinstance(declared, int) else set(declared or ())
        vocabulary = self.tokenizer.get_vocab()
        ids |= {vocabulary[token] for token in END_TOKENS if token in vocabulary}
        ids |= {self.tokenizer.eos_token_id} - {None}
        return sorted(ids)

    def answer(
        self, questions: Sequence[Question], sampling: Sampling, *, progress: Progress = silent
    ) -> list[list[Generated]]:
        return self.generate([self.render(question) for question in questions], sampling, progress=progress)

    def generate(
        self, prompts: Sequence[str], sampling: Sampling, *, progress: Progress = silent
    ) -> list[list[Generated]]:
        """As `answer`, for prompts that are texts already. Raises ValueError for an empty prompt."""
        rows, keys = self._rows(prompts, sampling)
        found = [self._known(key, row) for key, row in zip(keys, rows, strict=True)]
        waiting = [index for index, known in enumerate(found) if known is None]
        done = len(rows) - len(waiting)
        progress(done, len(rows), "completions")
        unfinished = dict.fromkeys(waiting)
        for finished in self.decoder.complete([rows[i] for i in waiting], sampling.temperature, self.batch_size):
            for index in [index for index in unfinished if rows[index].seconds]:
                found[index] = self._generated(rows[index], sampling)
                self._keep(keys[index], found[index])
                del unfinished[index]
            done += finished
            progress(done, len(rows), "completions")
        answers: list[list[Generated]] = [[] for _ in prompts]
        for row, answer in zip(rows, found, strict=True):
            answers[row.prompt].append(answer or self._generated(row, sampling))
        return answers

    def _rows(self, prompts: Sequence[str], sampling: Sampling) -> tuple[list[Row], list[str]]:
        """The completions to make, prompt by prompt, each with its own random numbers; and what each depends on."""
        rows: list[Row] = []
        keys: list[str] = []
        seen: Counter[str] = Counter()
        ended = ends_at(sampling.stop, self._text)
        for index, prompt in enumerate(prompts):
            ids = self._ids(prompt)
            if not ids:
                raise ValueError(f"prompt {index} is empty")
            limit = max(0, min(sampling.max_tokens, self.decoder.context - len(ids)))
            # The same prompt twice in the list is two draws, not one draw twice.
            seen[prompt] += 1
            for sample in range(-1 if sampling.with_greedy else 0, sampling.samples):
                drawn = sampling.temperature > 0 and sample >= 0
                key = f"{sampling.seed}\0{seen[prompt]}\0{sample}\0{prompt}" if drawn else prompt
                uniform = uniform_numbers(key, limit) if drawn and limit else None
                rows.append(Row(index, ids, limit, uniform, ended, finish="length" if limit else "no_room"))
                keys.append(content_hash([self.identity, key, drawn and sampling.temperature, limit, sampling.stop]))
        return rows, keys

    def _known(self, key: str, row: Row) -> Generated | None:
        """The answer where nothing is to be computed for it: a prompt without room, or one that is kept."""
        if not row.limit:
            return Generated("", 0, "no_room", prompt_tokens=len(row.ids))
        known = None if self.cache is None else self.cache.get(key)
        if known is None:
            return None
        finish = cast(Finish, known.finish)
        return Generated(known.text, known.completion_tokens, finish, known.prompt_tokens, known.seconds)

    def _keep(self, key: str, answer: Generated | None) -> None:
        if self.cache is not None and answer:
            text = answer.text.encode("utf-8", "replace").decode("utf-8")
            kept = CachedAnswer(text, answer.finish, answer.prompt_tokens, answer.tokens, answer.seconds)
            self.cache.put(key, self.identity["model"], kept)

    def _generated(self, row: Row, sampling: Sampling) -> Generated:
        text, finish = self._text(row.output), row.finish
        if cuts := [place for stop in sampling.stop if (place := text.find(stop)) >= 0]:
            text, finish = text[: min(cuts)], "stop"
        return Generated(text, len(row.output), finish, prompt_tokens=len(row.ids), seconds=row.seconds)

    def _text(self, ids: Sequence[int]) -> str:
        hidden = {*self.end_ids, self.tokenizer.pad_token_id}
        kept = [token for token in ids if token not in hidden]
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
