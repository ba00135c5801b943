"""Completions from a checkpoint on this machine, on a CPU or one GPU.

`LocalGenerator` has a loop of its own instead of `model.generate`, for three reasons that were measured on one core
with a model of a million parameters (64 rows, prompts of about 400 tokens: 1,140 tokens/s by `model.generate`,
1,800 here, 3,800 with eight samples a prompt): the samples of a prompt share one prefill; keys and values go into buffers made once, where the library's cache
copies all of them at every token; and rows that have ended leave the batch instead of being computed to its end.

What a completion is does not depend on its neighbours: greedy rows take the largest logit, and a sampled row
inverts the distribution function with uniform numbers drawn for this prompt and sample alone. Another batch
size or order of prompts changes results only where floating point breaks a tie differently.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from awpo.chat import END_TOKENS, render_prompt
from awpo.errors import UserError
from awpo.events import Progress, silent
from awpo.types import Instance
from evaluation.decoding import BufferLayer, choose, growing_cache, load

# Tokens of one prefill. On a CPU small pieces stay in the processor's cache (17,000 tokens/s in one piece of
# 64 x 400, 26,000 in pieces of 8 x 400); a GPU wants large ones.
PREFILL_TOKENS = {"cpu": 4096, "cuda": 65536}
# Bytes of keys and values held at once on a CPU; on a GPU it is half of what is free.
CACHE_BYTES = 1 << 30
# The batch is packed anew when no more than this share of its rows is still running.
PACK_BELOW = 0.75


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


@dataclass(slots=True)
class _Row:
    """One completion in the making. `uniform` holds its random numbers, or None where it is greedy."""

    prompt: int
    sample: int
    ids: list[int]
    limit: int
    uniform: np.ndarray | None
    output: list[int] = field(default_factory=list)
    finish: Literal["stop", "length", "no_room"] = "length"


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
        config = self.model.config.get_text_config(decoder=True)
        other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if other:
            raise UserError(f"{checkpoint}: layers of type {', '.join(sorted(other))} cannot be evaluated locally")
        self.context = int(getattr(config, "max_position_embeddings", 0) or 1 << 30)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.bytes_per_token = 2 * config.num_hidden_layers * heads * head_size * self.model.dtype.itemsize
        self.end_ids = self._end_ids()

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
        waiting = sorted((row for row in rows if row.limit > 0), key=lambda row: -len(row.ids))
        done = len(rows) - len(waiting)
        progress(done, len(rows), "completions")
        for batch in self._batches(waiting, batch_size):
            for finished in self._run(batch, temperature):
                done += finished
                progress(done, len(rows), "completions")
        answers: list[list[Generated]] = [[] for _ in prompts]
        for row in rows:
            answers[row.prompt].append(Generated(self._text(row.output), len(row.output), row.finish))
        return answers

    def _rows(
        self, prompts: Sequence[str], samples: int, temperature: float, max_tokens: int, seed: int, with_greedy: bool
    ) -> list[_Row]:
        """The completions to make, prompt by prompt, each with its own random numbers."""
        rows: list[_Row] = []
        seen: Counter[str] = Counter()
        for index, prompt in enumerate(prompts):
            ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
            if not ids:
                raise ValueError(f"prompt {index} is empty")
            limit = max(0, min(max_tokens, self.context - len(ids)))
            # The same prompt twice in the list is two draws, not one draw twice.
            seen[prompt] += 1
            for sample in range(-1 if with_greedy else 0, samples):
                uniform = None
                if temperature > 0 and sample >= 0 and limit:
                    key = f"{seed}\0{seen[prompt]}\0{sample}\0{prompt}".encode("utf-8", "surrogatepass")
                    entropy = int.from_bytes(hashlib.sha256(key).digest())
                    uniform = np.random.Generator(np.random.Philox(entropy)).random(limit)
                rows.append(_Row(index, sample, ids, limit, uniform, finish="length" if limit else "no_room"))
        return rows

    def _batches(self, rows: list[_Row], batch_size: int) -> Iterator[list[_Row]]:
        """Cuts rows, longest prompt first, into batches whose keys and values fit the memory set aside."""
        memory = CACHE_BYTES if self.device.type == "cpu" else torch.cuda.mem_get_info()[0] // 2
        start = 0
        while start < len(rows):
            positions = len(rows[start].ids) + max(row.limit for row in rows[start : start + batch_size])
            # The share that packs a batch anew is a copy beside it, hence 1 + PACK_BELOW.
            fitting = int(memory / (self.bytes_per_token * positions * (1 + PACK_BELOW)))
            size = max(1, min(batch_size, fitting))
            yield rows[start : start + size]
            start += size

    def _text(self, ids: list[int]) -> str:
        hidden = {*self.end_ids, self.tokenizer.pad_token_id}
        kept = [token for token in ids if token not in hidden]
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @torch.inference_mode()
    def _prefill(self, rows: list[_Row], capacity: int) -> Cache:
        """Keys and values of every row's prompt but its last token, aligned to the right of the longest.

        A prompt is computed once, whatever the number of its samples. Pieces are padded on the right, which under
        a causal mask no real token sees, so they need no mask of their own.
        """
        length = len(rows[0].ids) - 1
        copies = Counter(row.prompt for row in rows)
        first = {row.prompt: index for index, row in reversed(list(enumerate(rows)))}
        unique = [rows[first[prompt]] for prompt in copies]
        buffers: list[tuple[Tensor, Tensor]] = []
        start = 0
        while start < len(unique):
            width = max(1, len(unique[start].ids) - 1)
            piece = unique[start : start + max(1, PREFILL_TOKENS[self.device.type] // width)]
            start += len(piece)
            ids = torch.tensor(
                [row.ids[:-1] + row.ids[-1:] * (width - len(row.ids) + 1) for row in piece], device=self.device
            )
            output = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, cache=growing_cache())
            for number, layer in enumerate(output.cache.layers):
                if number == len(buffers):
                    shape = (len(rows), layer.keys.shape[1], capacity, layer.keys.shape[3])
                    buffers.append((layer.keys.new_zeros(shape), layer.values.new_zeros(shape)))
                for inside, row in enumerate(piece):
                    known, at = len(row.ids) - 1, first[row.prompt]
                    target = slice(at, at + copies[row.prompt])
                    for buffer, values in zip(buffers[number], (layer.keys, layer.values), strict=True):
                        buffer[target, :, length - known : length] = values[inside, :, :known]
        return Cache(layers=[BufferLayer(keys, values, length) for keys, values in buffers])

    @torch.inference_mode()
    def _run(self, rows: list[_Row], temperature: float) -> Iterator[int]:
        """Generates one batch; yields the number of rows ended each time the batch is packed anew, and at its end."""
        longest, limit = len(rows[0].ids), max(row.limit for row in rows)
        cache = self._prefill(rows, longest - 1 + limit)
        lengths = torch.tensor([len(row.ids) for row in rows], device=self.device)
        columns = torch.arange(longest + limit, device=self.device)
        mask = (columns >= longest - lengths[:, None]).long()
        positions = (lengths - 1)[:, None]
        tokens = torch.tensor([row.ids[-1:] for row in rows], device=self.device)
        draws = torch.zeros(len(rows), limit, dtype=torch.float64)
        for index, row in enumerate(rows):
            if row.uniform is not None:
                draws[index, : row.limit] = torch.from_numpy(row.uniform)
        sampled = torch.tensor([row.uniform is not None for row in rows], device=self.device)
        draws, running, alive = draws.to(self.device), list(rows), [True] * len(rows)
        end_ids = set(self.end_ids)
        for step in range(limit):
            output = self.model(
                input_ids=tokens,
                attention_mask=mask[:, : longest + step],
                position_ids=positions,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            tokens = choose(output.logits[:, -1], draws[:, step : step + 1], sampled, temperature)
            positions = positions + 1
            for index, token in enumerate(tokens[:, 0].tolist()):
                if alive[index]:
                    row = running[index]
                    row.output.append(token)
                    if token in end_ids:
                        row.finish = "stop"
                    alive[index] = token not in end_ids and len(row.output) < row.limit
            left = sum(alive)
            if left <= PACK_BELOW * len(running):
                yield len(running) - left
                if not left:
                    return
                keep = torch.tensor([index for index, going in enumerate(alive) if going], device=self.device)
                cache.batch_select_indices(keep)
                mask, positions, tokens = mask[keep], positions[keep], tokens[keep]
                draws, sampled = draws[keep], sampled[keep]
                running = [row for row, going in zip(running, alive, strict=True) if going]
                alive = [True] * left
        yield len(running)
