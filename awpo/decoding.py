"""Sampling completions from a causal language model: rollouts of the policy trainer and evaluation alike.

The loop takes the place of `model.generate` for three reasons that were measured on one core with a model of a
million parameters: the samples of a prompt share one prefill; keys and values go into buffers made once, where the
library's cache copies all of them at every token; and rows that have ended leave the batch instead of being computed
to its end.

What a completion is does not depend on its neighbours: greedy rows take the largest logit, and a sampled row
inverts the distribution function with uniform numbers of its own. Another batch size or order changes results only
where floating point breaks a tie differently.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from awpo.errors import UserError

# Tokens of one prefill. On a CPU small pieces stay in the processor's cache (17,000 tokens/s in one piece of
# 64 x 400, 26,000 in pieces of 8 x 400); a GPU wants large ones.
PREFILL_TOKENS = {"cpu": 4096, "cuda": 65536}
# Bytes of keys and values held at once on a CPU; on a GPU it is half of what is free.
CACHE_BYTES = 1 << 30
# The batch is packed anew when no more than this share of its rows is still running.
PACK_BELOW = 0.75


@dataclass(slots=True)
class Row:
    """One completion in the making.

    `prompt` numbers its prompt: rows of the same number have the same `ids` and share a prefill. `limit` is the most
    tokens to generate; `uniform` holds as many random numbers in [0, 1), or is None where the row is greedy.
    `ended` looks at the tokens so far and says whether a stop text is among them; it is asked after every token.
    `seconds` is the time from the start of its batch to its last token.
    """

    prompt: int
    ids: list[int]
    limit: int
    uniform: np.ndarray | None
    ended: Callable[[Sequence[int]], bool] | None = None
    output: list[int] = field(default_factory=list)
    finish: Literal["stop", "length", "no_room"] = "length"
    seconds: float = 0.0


def uniform_numbers(key: str, count: int) -> np.ndarray:
    """`count` numbers in [0, 1) that depend on `key` alone, whatever else is drawn and on whatever machine."""
    entropy = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest())
    return np.random.Generator(np.random.Philox(entropy)).random(count)


def ends_at(stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], bool] | None:
    """The `ended` of rows that end at the first of some texts; None where there are none. `decode` is the tokenizer's."""
    if not stops:
        return None

    def ended(output: Sequence[int]) -> bool:
        text = decode(output)
        return any(stop in text for stop in stops)

    return ended


class Decoder:
    """Completes rows with a model in eval mode, on its device.

    `context` is the most tokens of prompt and completion together. Raises UserError where the model keeps a state
    other than keys and values.
    """

    def __init__(self, model: Any, end_ids: Sequence[int]) -> None:
        self.model, self.end_ids = model, set(end_ids)
        self.device: torch.device = model.device
        config = model.config.get_text_config(decoder=True)
        other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if other:
            raise UserError(f"a model with layers of type {', '.join(sorted(other))} cannot be sampled from here")
        self.context = int(getattr(config, "max_position_embeddings", 0) or 1 << 30)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.bytes_per_token = 2 * config.num_hidden_layers * heads * head_size * model.dtype.itemsize

    def complete(self, rows: Sequence[Row], temperature: float, batch_size: int) -> Iterator[int]:
        """Fills `output` and `finish` of every row, at most `batch_size` at once; yields how many ended, now and then.

        A row whose `limit` is 0 is left as it is.
        """
        waiting = sorted((row for row in rows if row.limit > 0), key=lambda row: -len(row.ids))
        for batch in self._batches(waiting, batch_size):
            yield from self._run(batch, temperature)

    def _batches(self, rows: list[Row], batch_size: int) -> Iterator[list[Row]]:
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

    @torch.inference_mode()
    def _prefill(self, rows: list[Row], capacity: int) -> Cache:
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
            piece = unique[
                start : start + max(1, PREFILL_TOKENS.get(self.device.type, PREFILL_TOKENS["cuda"]) // width)
            ]
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
    def _run(self, rows: list[Row], temperature: float) -> Iterator[int]:
        """Generates one batch; yields the number of rows ended each time the batch is packed anew, and at its end."""
        start = time.monotonic()
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
        end_ids = self.end_ids
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
                    if token in end_ids or (row.ended is not None and row.ended(row.output)):
                        row.finish = "stop"
                    alive[index] = row.finish != "stop" and len(row.output) < row.limit
                    if not alive[index]:
                        row.seconds = time.monotonic() - start
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


class BufferLayer(DynamicLayer):
    """Keys and values of one attention layer in buffers made once, (rows, heads, capacity, head size).

    `length` positions of them are filled. A library layer concatenates at every step, which copies everything.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().__init__()
        self.buffers, self.length, self.is_initialized = (keys, values), length, True
        self._show()

    def _show(self) -> None:
        self.keys, self.values = (buffer[:, :, : self.length] for buffer in self.buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[2]
        self.buffers[0][:, :, self.length : end] = key_states
        self.buffers[1][:, :, self.length : end] = value_states
        self.length = end
        self._show()
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def batch_select_indices(self, indices: Tensor) -> None:
        self.buffers = (self.buffers[0].index_select(0, indices), self.buffers[1].index_select(0, indices))
        self._show()


def growing_cache() -> Cache:
    """A cache of the library's own layers, for a prefill."""
    return Cache(layer_class_to_replicate=DynamicLayer)


def choose(logits: Tensor, uniform: Tensor, sampled: Tensor, temperature: float) -> Tensor:
    """The next tokens (rows, 1) for logits (rows, vocabulary) and uniform numbers in [0, 1) (rows, 1).

    Inversion: the first token at which the distribution function passes the uniform number. In double
    precision, since the sum over a large vocabulary would round away the rarest tokens.
    """
    best = logits.argmax(-1, keepdim=True)
    if temperature <= 0 or not bool(sampled.any()):
        return best
    function = (logits.double() / temperature).softmax(-1).cumsum(-1)
    drawn = torch.searchsorted(function, uniform * function[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    return torch.where(sampled[:, None], drawn, best)
