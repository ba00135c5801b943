"""Completions from a checkpoint on this machine, on a CPU or one GPU, by the loop of `awpo.decoding`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from awpo.artifacts import input_identity
from awpo.chat import END_TOKENS, render_messages
from awpo.decoding import Decoder, Row, uniform_numbers
from awpo.events import Progress, silent
from evaluation.generate import Generated, Question, Sampling
from evaluation.loading import load


class LocalGenerator:
    """Generates with the checkpoint in a Hugging Face folder (safetensors and tokenizer).

    `threads`: torch threads, 0 leaves it to the launcher. `batch_size` limits the completions generated at once;
    fewer are where their keys and values would pass the memory set aside. Raises UserError where the folder cannot be
    loaded or the model keeps a state other than keys and values.
    """

    def __init__(self, checkpoint: Path, threads: int = 0, batch_size: int = 64) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.checkpoint, self.batch_size = checkpoint, batch_size
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer, model = load(checkpoint, "auto" if self.device.type == "cuda" else torch.float32)
        self.model = model.to(self.device).eval()
        self.end_ids = self._end_ids()
        self.decoder = Decoder(self.model, self.end_ids)

    @property
    def identity(self) -> dict[str, Any]:
        return {"model": input_identity(self.checkpoint), "dtype": str(self.model.dtype).removeprefix("torch.")}

    def render(self, question: Question) -> str:
        """The prompt of a question, by the tokenizer's own template."""
        return render_messages(self.tokenizer, question.messages, question.tools)

    def room(self, question: Question) -> int:
        return max(0, self.decoder.context - len(self._ids(self.render(question))))

    def _ids(self, prompt: str) -> list[int]:
        ids: list[int] = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return ids

    def answer(
        self, questions: Sequence[Question], sampling: Sampling, *, progress: Progress = silent
    ) -> list[list[Generated]]:
        return self.generate([self.render(question) for question in questions], sampling, progress=progress)

    def _end_ids(self) -> list[int]:
        """The model's own end tokens, and those of the ChatML family that the tokenizer has."""
        declared = getattr(self.model.generation_config, "eos_token_id", None)
        ids = {declared} if isinstance(declared, int) else set(declared or ())
        vocabulary = self.tokenizer.get_vocab()
        ids |= {vocabulary[token] for token in END_TOKENS if token in vocabulary}
        ids |= {self.tokenizer.eos_token_id} - {None}
        return sorted(ids)

    def generate(
        self, prompts: Sequence[str], sampling: Sampling, *, progress: Progress = silent
    ) -> list[list[Generated]]:
        """As `answer`, for prompts that are texts already. Raises ValueError for an empty prompt."""
        rows = self._rows(prompts, sampling)
        done = sum(row.limit == 0 for row in rows)
        progress(done, len(rows), "completions")
        for finished in self.decoder.complete(rows, sampling.temperature, self.batch_size):
            done += finished
            progress(done, len(rows), "completions")
        answers: list[list[Generated]] = [[] for _ in prompts]
        for row in rows:
            answers[row.prompt].append(self._generated(row, sampling))
        return answers

    def _rows(self, prompts: Sequence[str], sampling: Sampling) -> list[Row]:
        """The completions to make, prompt by prompt, each with its own random numbers."""
        rows: list[Row] = []
        seen: Counter[str] = Counter()
        for index, prompt in enumerate(prompts):
            ids = self._ids(prompt)
            if not ids:
                raise ValueError(f"prompt {index} is empty")
            limit = max(0, min(sampling.max_tokens, self.decoder.context - len(ids)))
            # The same prompt twice in the list is two draws, not one draw twice.
            seen[prompt] += 1
            for sample in range(-1 if sampling.with_greedy else 0, sampling.samples):
                uniform = None
                if sampling.temperature > 0 and sample >= 0 and limit:
                    uniform = uniform_numbers(f"{sampling.seed}\0{seen[prompt]}\0{sample}\0{prompt}", limit)
                rows.append(Row(index, ids, limit, uniform, finish="length" if limit else "no_room"))
        return rows

    def _generated(self, row: Row, sampling: Sampling) -> Generated:
        text, finish = self._text(row.output), row.finish
        if cuts := [place for stop in sampling.stop if (place := text.find(stop)) >= 0]:
            text, finish = text[: min(cuts)], "stop"
        return Generated(text, len(row.output), finish, prompt_tokens=len(row.ids), seconds=row.seconds)

    def _text(self, ids: list[int]) -> str:
        hidden = {*self.end_ids, self.tokenizer.pad_token_id}
        kept = [token for token in ids if token not in hidden]
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
