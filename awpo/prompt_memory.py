"""What a batch of completions in the making remembers of its tokens: keys and values, by one of two arrangements.

`SharedPrompts`: a prompt's keys and values are kept once, and all of its completions read them in one product of
matrices; each has room for its own tokens only. Where the model can't attend so (`awpo.model_attention`), `CopiedPrompts`:
each completion has room for the prompt and its own tokens, as the library's caches have.

Either is made from rows, longest prompt first, the rows of one prompt together; it computes each prompt once, all tokens
but the last, which is the first input of each of its completions. Shapes: R rows, Q prompts, H query heads, K heads of
keys and values, D head size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from awpo.model_attention import arguments, attend_by_layout, why_not_packed
from awpo.prefix_attention import FAR, attend_to_prefixes, causal_attention, merge

if TYPE_CHECKING:
    from awpo.decoding import Row

# Tokens of one prefill. On a CPU small pieces stay in the processor's cache (17,000 tokens/s in one piece of
# 64 x 400, 26,000 in pieces of 8 x 400); a GPU wants large ones.
PREFILL_TOKENS = {"cpu": 4096, "cuda": 65536}


def arrangement(model: Any) -> type[SharedPrompts] | type[CopiedPrompts]:
    """What remembers for `model`, in eval mode: to be called with model, rows and the room for own tokens."""
    shares = model.device.type == "cpu" and why_not_packed(model) is None  # written for CPUs
    return SharedPrompts if shares else CopiedPrompts


def _by_prompt(rows: Sequence[Row]) -> list[Row]:
    """The first row of each prompt."""
    return list({row.prompt: row for row in reversed(rows)}.values())[::-1]


class _Prefill:
    """Causal attention of whole prompts packed into one row, whose keys and values are kept."""

    def __init__(self, memory: SharedPrompts, prompts: slice, lengths: Sequence[int]) -> None:
        self.memory, self.prompts, self.lengths = memory, prompts, lengths

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        out = torch.empty_like(queries)
        kept_keys, kept_values = self.memory.prompt_buffers(layer, keys)
        start = 0
        for prompt, length in zip(range(self.prompts.start, self.prompts.stop), self.lengths, strict=True):
            part = slice(start, start + length)
            start += length
            if not length:  # a prompt of one token
                continue
            out[:, :, part] = causal_attention(queries[:, :, part], keys[:, :, part], values[:, :, part], scale)
            kept_keys[prompt, :, :length] = keys[0, :, part]
            kept_values[prompt, :, :length] = values[0, :, part]
        return out


class SharedPrompts:
    """Prompts once, (Q, K, tokens, D) for each layer, and each row's own tokens, (R, K, limit, D)."""

    @torch.inference_mode()
    def __init__(self, model: Any, rows: Sequence[Row], limit: int) -> None:
        attend_by_layout(model)
        self.device, self.limit = model.device, limit
        firsts = _by_prompt(rows)
        numbers = {row.prompt: number for number, row in enumerate(firsts)}
        self._lengths = [len(row.ids) - 1 for row in firsts]
        self._prompts: list[tuple[Tensor, Tensor]] = []
        self._own: list[tuple[Tensor, Tensor]] = []
        self._filled = 0
        self._prompt_of = torch.tensor([numbers[row.prompt] for row in rows])
        self._arrange()
        budget, start = PREFILL_TOKENS[self.device.type], 0
        while start < len(firsts):
            stop, tokens = start + 1, self._lengths[start]
            while stop < len(firsts) and tokens + self._lengths[stop] <= budget:
                tokens += self._lengths[stop]
                stop += 1
            if tokens:
                ids = [token for row in firsts[start:stop] for token in row.ids[:-1]]
                positions = torch.cat([torch.arange(length) for length in self._lengths[start:stop]])
                packed = _Prefill(self, slice(start, stop), self._lengths[start:stop])
                named = arguments(packed, torch.tensor([ids], device=self.device), positions.to(self.device)[None])
                model(**named, use_cache=False, logits_to_keep=1)
            start = stop

    @staticmethod
    def positions(rows: Sequence[Row]) -> int:
        """For how many tokens there must be room, of rows with the longest prompt first."""
        prompts = len({row.prompt for row in rows})
        return prompts * len(rows[0].ids) + len(rows) * max(row.limit for row in rows)

    def prompt_buffers(self, layer: int, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (Q, K, tokens, D) of all prompts in a layer; made at the first call, like `keys`."""
        if layer == len(self._prompts):
            shape = (len(self._lengths), keys.shape[1], max(self._lengths), keys.shape[3])
            self._prompts.append((keys.new_zeros(shape), keys.new_zeros(shape)))
        return self._prompts[layer]

    def _arrange(self) -> None:
        """Where the rows of each prompt stand: `_slots` (Q, most rows of a prompt) are rows, `_back` (R,) are slots."""
        counts = torch.bincount(self._prompt_of, minlength=len(self._lengths))
        most = int(counts.max())
        within = torch.cat([torch.arange(int(count)) for count in counts])
        order = torch.argsort(self._prompt_of, stable=True)
        slots = torch.zeros(len(self._lengths) * most, dtype=torch.long)
        place = self._prompt_of[order] * most + within
        slots[place] = order
        self._back = torch.empty_like(order)
        self._back[order] = place
        self._slots = slots.view(-1, most)
        columns = torch.arange(max(self._lengths))
        beyond = columns >= torch.tensor(self._lengths)[:, None]
        self._mask = torch.zeros(beyond.shape).masked_fill(beyond, -FAR)[:, None, None].to(self.device)

    def arguments(self, tokens: Tensor, positions: Tensor) -> dict[str, Any]:
        """Of the forward pass of the next token of every row, (R, 1) both."""
        self._filled += 1
        return {**arguments(self, tokens, positions), "use_cache": False}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if layer == len(self._own):
            shape = (*keys.shape[:2], self.limit, keys.shape[3])
            self._own.append((keys.new_zeros(shape), keys.new_zeros(shape)))
        own_keys, own_values = self._own[layer]
        own_keys[:, :, self._filled - 1] = keys[:, :, 0]
        own_values[:, :, self._filled - 1] = values[:, :, 0]
        rows, heads, _, size = queries.shape
        # A query head beside those that share its keys: one product reads them once.
        folded = queries.view(rows, keys.shape[1], -1, size)
        known = slice(0, self._filled)
        out, lse = attend_to_prefixes(folded, own_keys[:, :, known], own_values[:, :, known], None, scale)
        if layer < len(self._prompts):
            asked = folded[self._slots].permute(0, 2, 1, 3, 4).flatten(2, 3)
            found, norm = attend_to_prefixes(asked, *self._prompts[layer], self._mask, scale)
            shape = (*self._slots.shape, keys.shape[1], -1)
            found = found.unflatten(2, (self._slots.shape[1], -1)).transpose(1, 2).flatten(0, 1)[self._back]
            norm = norm.unflatten(2, (self._slots.shape[1], -1)).transpose(1, 2).flatten(0, 1)[self._back]
            out, _ = merge(out, lse, found, norm)
        return out.reshape(rows, heads, 1, size)

    def keep(self, rows: Tensor) -> None:
        """Goes on with these rows alone, and with the prompts that they have."""
        self._own = [(keys[rows], values[rows]) for keys, values in self._own]
        left, self._prompt_of = torch.unique(self._prompt_of[rows], return_inverse=True)
        if len(left) < len(self._lengths):
            self._lengths = [self._lengths[prompt] for prompt in left.tolist()]
            longest = max(self._lengths)
            self._prompts = [(keys[left, :, :longest], values[left, :, :longest]) for keys, values in self._prompts]
            if not longest:
                self._prompts = []
        self._arrange()


class CopiedPrompts:
    """Prompt and own tokens of each row in one buffer, (R, K, tokens, D) for each layer, prompts aligned to the right."""

    @torch.inference_mode()
    def __init__(self, model: Any, rows: Sequence[Row], limit: int) -> None:
        self.device = model.device
        longest = len(rows[0].ids)
        lengths = torch.tensor([len(row.ids) for row in rows], device=self.device)
        self._mask = (torch.arange(longest + limit, device=self.device) >= longest - lengths[:, None]).long()
        self._length = longest - 1
        self._cache = self._prefill(model, rows, longest - 1 + limit)

    @staticmethod
    def positions(rows: Sequence[Row]) -> int:
        """For how many tokens there must be room, of rows with the longest prompt first."""
        return len(rows) * (len(rows[0].ids) + max(row.limit for row in rows))

    def _prefill(self, model: Any, rows: Sequence[Row], capacity: int) -> Cache:
        """Pieces are padded on the right, which under a causal mask no real token sees, so they need no mask."""
        length = len(rows[0].ids) - 1
        copies = Counter(row.prompt for row in rows)
        first = {row.prompt: index for index, row in reversed(list(enumerate(rows)))}
        unique = [rows[first[prompt]] for prompt in copies]
        buffers: list[tuple[Tensor, Tensor]] = []
        budget, start = PREFILL_TOKENS.get(self.device.type, PREFILL_TOKENS["cuda"]), 0
        while start < len(unique):
            width = max(1, len(unique[start].ids) - 1)
            piece = unique[start : start + max(1, budget // width)]
            start += len(piece)
            ids = torch.tensor(
                [row.ids[:-1] + row.ids[-1:] * (width - len(row.ids) + 1) for row in piece], device=self.device
            )
            output = model(input_ids=ids, use_cache=True, logits_to_keep=1, cache=growing_cache())
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

    def arguments(self, tokens: Tensor, positions: Tensor) -> dict[str, Any]:
        """Of the forward pass of the next token of every row, (R, 1) both."""
        self._length += 1
        return {
            "input_ids": tokens,
            "attention_mask": self._mask[:, : self._length],
            "position_ids": positions,
            "cache": self._cache,
            "use_cache": True,
        }

    def keep(self, rows: Tensor) -> None:
        """Goes on with these rows alone."""
        rows = rows.to(self.device)
        self._cache.batch_select_indices(rows)
        self._mask = self._mask[rows]


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
