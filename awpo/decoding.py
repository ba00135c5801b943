"""Sampling completions from a causal language model: rollouts of the policy trainer and evaluation alike.

The loop takes the place of `model.generate` for reasons that were measured on one core: the samples of a prompt share
one prefill and its keys and values (`awpo.prompt_memory`); what is remembered goes into buffers made once, where the
library's cache copies all of it at every token; and rows that have ended leave the batch instead of being computed to
its end.

What a completion is does not depend on its neighbours: greedy rows take the largest logit, and a sampled row
inverts the distribution function with uniform numbers of its own. Another batch size or order changes results only
where floating point breaks a tie differently.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from awpo.errors import UserError
from awpo.prompt_memory import arrangement

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
    `seconds` is the time from the start of its batch to its last token; `logprobs` are those of the sampled tokens, in
    nats, of the distribution they were drawn from.
    """

    prompt: int
    ids: list[int]
    limit: int
    uniform: np.ndarray | None
    ended: Callable[[Sequence[int]], bool] | None = None
    output: list[int] = field(default_factory=list)
    finish: Literal["stop", "length", "no_room"] = "length"
    seconds: float = 0.0
    logprobs: list[float] = field(default_factory=list)


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
        waiting = sorted((row for row in rows if row.limit > 0), key=lambda row: (-len(row.ids), row.prompt))
        for batch in self._batches(waiting, batch_size):
            yield from self._run(batch, temperature)

    def _batches(self, rows: list[Row], batch_size: int) -> Iterator[list[Row]]:
        """Cuts rows, longest prompt first, into batches whose keys and values fit the memory set aside."""
        memory = CACHE_BYTES if self.device.type == "cpu" else torch.cuda.mem_get_info()[0] // 2
        start = 0
        while start < len(rows):
            size = min(batch_size, len(rows) - start)
            while size > 1 and self._bytes(rows[start : start + size]) > memory:
                size -= 1
            yield rows[start : start + size]
            start += size

    def _bytes(self, rows: Sequence[Row]) -> int:
        # The share that packs a batch anew is a copy beside it.
        return int(self.bytes_per_token * arrangement(self.model).positions(rows) * (1 + PACK_BELOW))

    @torch.inference_mode()
    def _run(self, rows: list[Row], temperature: float) -> Iterator[int]:
        """Generates one batch; yields the number of rows ended each time the batch is packed anew, and at its end."""
        start = time.monotonic()
        limit = max(row.limit for row in rows)
        memory = arrangement(self.model)(self.model, rows, limit)
        positions = torch.tensor([[len(row.ids) - 1] for row in rows], device=self.device)
        tokens = torch.tensor([row.ids[-1:] for row in rows], device=self.device)
        draws = torch.zeros(len(rows), limit, dtype=torch.float64)
        for index, row in enumerate(rows):
            if row.uniform is not None:
                draws[index, : row.limit] = torch.from_numpy(row.uniform)
        sampled = torch.tensor([row.uniform is not None for row in rows], device=self.device)
        draws, running, alive = draws.to(self.device), list(rows), [True] * len(rows)
        end_ids = self.end_ids
        for step in range(limit):
            output = self.model(**memory.arguments(tokens, positions), logits_to_keep=1)
            tokens, logprobs = choose(output.logits[:, -1], draws[:, step : step + 1], sampled, temperature)
            positions = positions + 1
            drawn = None if logprobs is None else logprobs[:, 0].tolist()
            for index, token in enumerate(tokens[:, 0].tolist()):
                if alive[index]:
                    row = running[index]
                    row.output.append(token)
                    if drawn is not None and row.uniform is not None:
                        row.logprobs.append(drawn[index])
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
                keep = torch.tensor([index for index, going in enumerate(alive) if going])
                memory.keep(keep)
                keep = keep.to(self.device)
                positions, tokens, draws, sampled = positions[keep], tokens[keep], draws[keep], sampled[keep]
                running = [row for row, going in zip(running, alive, strict=True) if going]
                alive = [True] * left
        yield len(running)


def choose(logits: Tensor, uniform: Tensor, sampled: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
    """The next tokens (rows, 1) for logits (rows, vocabulary) and uniform numbers in [0, 1) (rows, 1).

    Inversion: the first token at which the distribution function passes the uniform number. In double
    precision, since the sum over a large vocabulary would round away the rarest tokens. Also the log-probabilities
    (rows, 1) of the tokens at that temperature; None where no row is `sampled`.
    """
    best = logits.argmax(-1, keepdim=True)
    if temperature <= 0 or not bool(sampled.any()):
        return best, None
    shares = (logits.double() / temperature).softmax(-1)
    function = shares.cumsum(-1)
    drawn = torch.searchsorted(function, uniform * function[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(sampled[:, None], drawn, best)
    return tokens, shares.gather(-1, tokens).log()
