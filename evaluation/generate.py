"""Completions from a checkpoint on this machine, on a CPU or one GPU, by the loop of `awpo.decoding`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from awpo.chat import END_TOKENS, render_prompt
from awpo.decoding import Decoder, Row, uniform_numbers
from awpo.events import Progress, silent
from awpo.types import Instance
from evaluation.loading import load


@dataclass(frozen=True, slots=True)
class Generated:
    """A completion: its text with the tags kept, and the tokens generated, the closing one included.

    `finish` tells why it ended: "stop" at an end token, "length" at the limit, and "no_room" where the prompt
    alone fills the model's context (text empty, 0 tokens).
    """

    text: str
    tokens: int
    finish: Literal["stop", "length", "no_room"] = "stop"


class Generator(Protocol):
    """What the benchmarks ask of a source of completions."""

    def render(self, instance: Instance) -> str:
        """The text of an instance's prompt."""
        ...

    def generate(
        self,
        prompts: Sequence[str],
        *,
        samples: int = 1,
        temperature: float = 0.0,
        max_tokens: int = 160,
        seed: int = 0,
        batch_size: int = 64,
        with_greedy: bool = False,
        progress: Progress = silent,
    ) -> list[list[Generated]]: ...


class LocalGenerator:
    """Generates with the checkpoint in a Hugging Face folder (safetensors and tokenizer).

    `threads`: torch threads, 0 leaves it to the launcher. Raises UserError where the folder cannot be loaded or
    the model keeps a state other than keys and values.
    """

    def __init__(self, checkpoint: Path, threads: int = 0) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer, model = load(checkpoint, "auto" if self.device.type == "cuda" else torch.float32)
        self.model = model.to(self.device).eval()
        self.end_ids = self._end_ids()
        self.decoder = Decoder(self.model, self.end_ids)

    def render(self, instance: Instance) -> str:
        """The prompt of an instance, by the tokenizer's own template."""
        return render_prompt(self.tokenizer, instance)

    def _end_ids(self) -> list[int]:
        """The model's own end tokens, and those of the ChatML family that the tokenizer has."""
        declared = getattr(self.model.generation_config, "eos_token_id", None)
        ids = {declared} if isinstance(declared, int) else set(declared or ())
        vocabulary = self.tokenizer.get_vocab()
        ids |= {vocabulary[token] for token in END_TOKENS if token in vocabulary}
        ids |= {self.tokenizer.eos_token_id} - {None}
        return sorted(ids)

    def generate(
        self,
        prompts: Sequence[str],
        *,
        samples: int = 1,
        temperature: float = 0.0,
        max_tokens: int = 160,
        seed: int = 0,
        batch_size: int = 64,
        with_greedy: bool = False,
        progress: Progress = silent,
    ) -> list[list[Generated]]:
        """`samples` completions per prompt, in the order of `prompts`.

        `temperature` 0 is greedy. `with_greedy` puts a greedy completion before the samples of each prompt, from
        the same prefill. `max_tokens` limits a completion, `batch_size` the completions generated at once; fewer
        are where their keys and values would pass the memory set aside. `progress` counts completions.
        Raises ValueError for an empty prompt.
        """
        rows = self._rows(prompts, samples, temperature, max_tokens, seed, with_greedy)
        done = sum(row.limit == 0 for row in rows)
        progress(done, len(rows), "completions")
        for finished in self.decoder.complete(rows, temperature, batch_size):
            done += finished
            progress(done, len(rows), "completions")
        answers: list[list[Generated]] = [[] for _ in prompts]
        for row in rows:
            answers[row.prompt].append(Generated(self._text(row.output), len(row.output), row.finish))
        return answers

    def _rows(
        self, prompts: Sequence[str], samples: int, temperature: float, max_tokens: int, seed: int, with_greedy: bool
    ) -> list[Row]:
        """The completions to make, prompt by prompt, each with its own random numbers."""
        rows: list[Row] = []
        seen: Counter[str] = Counter()
        for index, prompt in enumerate(prompts):
            ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
            if not ids:
                raise ValueError(f"prompt {index} is empty")
            limit = max(0, min(max_tokens, self.decoder.context - len(ids)))
            # The same prompt twice in the list is two draws, not one draw twice.
            seen[prompt] += 1
            for sample in range(-1 if with_greedy else 0, samples):
                uniform = None
                if temperature > 0 and sample >= 0 and limit:
                    uniform = uniform_numbers(f"{seed}\0{seen[prompt]}\0{sample}\0{prompt}", limit)
                rows.append(Row(index, ids, limit, uniform, finish="length" if limit else "no_room"))
        return rows

    def _text(self, ids: list[int]) -> str:
        hidden = {*self.end_ids, self.tokenizer.pad_token_id}
        kept = [token for token in ids if token not in hidden]
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
