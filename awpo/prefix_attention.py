"""Attention of completions that share a prompt: the prompt's keys and values are computed once and read once a group.

A softmax over two sets of keys is the two softmaxes put together by their normalisers: with out_i the attention over
set i and lse_i the logarithm of its normaliser (sum of exp of the scores),

    lse = log(exp(lse_1) + exp(lse_2)),    out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

as in Hydragen (arXiv 2402.05099) and cascade attention. So a completion's queries attend to the prefix of their group,
all of the group in one product of matrices, and to their own tokens apart, without a mask of T x T and without G copies.

The backward pass of flash attention (arXiv 2205.14135, algorithm 4) needs of a set of keys only the scores, the whole
output and the whole normaliser: P = exp(S - lse), dS = P (dP - rowsum(dO O)). Called on each set with the output and
normaliser of both together, as ring attention does (arXiv 2310.01889), it gives exact gradients.

Shapes: T packed tokens, N completions, C tokens of the longest one, H query heads, K heads of keys and values (H is a
multiple of K), D head size. Queries are (H, T, D), keys and values (K, T, D).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


# A normaliser against which every score vanishes: queries that are padding get no weight.
FAR = 1e30


@dataclass(frozen=True)
class Layout:
    """Where things are in a packed row of T tokens: the prefixes of all groups, then the completions of all groups.

    `prefixes` and `groups` say for each group which tokens are its prefix (it may be empty) and which are of its
    completions; `own` (N C) has the tokens of each completion, its last one repeated up to the width C; `place` has,
    for every completion token in packed order, where it first stands in `own`. `completions` is N. `owner` (T,) numbers
    the prefix or completion of each token, `parent` (T,) the prefix that it sees as well (its own, for a prefix).
    """

    prefixes: tuple[slice, ...]
    groups: tuple[slice, ...]
    own: Tensor
    place: Tensor
    completions: int
    owner: Tensor
    parent: Tensor

    @classmethod
    def of(cls, prefixes: Sequence[int], completions: Sequence[Sequence[int]], device: torch.device) -> Layout:
        """The layout for lengths: one prefix and one or more completions (none empty) a group."""
        starts = _starts(prefixes)
        lengths = torch.tensor([length for group in completions for length in group])
        widest = int(lengths.max())
        first = starts[-1] + lengths.cumsum(0) - lengths
        steps = torch.arange(widest)
        own = first[:, None] + torch.minimum(steps, lengths[:, None] - 1)
        places = (steps < lengths[:, None]).flatten().nonzero()[:, 0]
        ends = _starts([sum(group) for group in completions])
        groups = torch.arange(len(prefixes))
        ancestors = groups.repeat_interleave(torch.tensor([len(group) for group in completions]))
        counts = torch.cat([torch.tensor(prefixes), lengths])
        return cls(
            tuple(slice(a, b) for a, b in pairwise(starts)),
            tuple(slice(starts[-1] + a, starts[-1] + b) for a, b in pairwise(ends)),
            own.flatten().to(device),
            places.to(device),
            len(lengths),
            torch.arange(len(counts)).repeat_interleave(counts).to(device),
            torch.cat([groups, ancestors]).repeat_interleave(counts).to(device),
        )

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """For `awpo.model_attention`: (1, H, T, D)."""
        if queries.device.type != "cpu":
            return tree_attention(queries, keys, values, self, scale)
        out: Tensor = SharedPrefixAttention.apply(queries[0], keys[0], values[0], self, scale)
        return out[None]

    @cached_property
    def mask(self) -> Tensor:
        """Which token sees which, (T, T) bool, queries first."""
        place = torch.arange(len(self.owner), device=self.owner.device)
        seen = (self.owner[:, None] == self.owner) | (self.parent[:, None] == self.owner)
        return seen & (place[:, None] >= place)


def _starts(lengths: Sequence[int]) -> list[int]:
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found


def merge(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over both sets of keys: outputs (..., D) and normalisers (...) of each give those of both."""
    lse = torch.logaddexp(lse_1, lse_2)
    return out_1 * (lse_1 - lse).exp()[..., None] + out_2 * (lse_2 - lse).exp()[..., None], lse


def tree_attention(queries: Tensor, keys: Tensor, values: Tensor, layout: Layout, scale: float) -> Tensor:
    """The same attention on any device, (1, H, T, D): PyTorch's with a mask (T, T), from which its kernels that keep
    little memory take gradients, too. It computes all T x T scores, so T should be that of few groups."""
    wide_keys, wide_values = (_widened(tensor[0], queries.shape[1])[None] for tensor in (keys, values))
    return scaled_dot_product_attention(queries, wide_keys, wide_values, attn_mask=layout.mask, scale=scale)


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention (1, H, n, D) of tokens among themselves; keys and values are (1, K, n, D). No gradients."""
    wide = (_widened(tensor[0], queries.shape[1])[None] for tensor in (keys, values))
    out: Tensor = _flash(queries, *wide, 0.0, True, scale=scale)[0]
    return out


def attend_to_prefixes(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention and its normaliser, (Q, K, n, D) and (Q, K, n), of n queries to the keys (Q, K, m, D). No gradients.

    `mask` (Q, 1, 1, m) is added to the scores.
    """
    found: tuple[Tensor, Tensor] = _flash(queries, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    return found


class SharedPrefixAttention(torch.autograd.Function):
    """`apply(queries, keys, values, layout, scale)`: attention (H, T, D) of a packed row on a CPU, causal within a
    prefix and within a completion; a completion sees the whole prefix of its group too, and nothing else."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, layout: Layout, scale: float) -> Tensor:
        heads, tokens, size = queries.shape
        out = queries.new_empty(tokens, heads, size).transpose(0, 1)
        lse = queries.new_empty(heads, tokens, dtype=torch.float32)
        wide_keys, wide_values = (_widened(tensor, heads) for tensor in (keys, values))
        for prefix in filter(_holds_tokens, layout.prefixes):
            parts = (tensor[None, :, prefix] for tensor in (queries, wide_keys, wide_values))
            found, norm = _flash(*parts, 0.0, True, scale=scale)
            out[:, prefix], lse[:, prefix] = found[0], norm[0]
        own = (_padded(tensor, layout) for tensor in (queries, wide_keys, wide_values))
        found, norm = _flash(*own, 0.0, True, scale=scale)
        rest = slice(layout.groups[0].start, tokens)
        out[:, rest], lse[:, rest] = _unpadded(found, layout), _unpadded(norm, layout)
        for prefix, group in zip(layout.prefixes, layout.groups, strict=True):
            if not _holds_tokens(prefix):
                continue
            asked = _folded(queries[:, group], len(keys))
            found, norm = _flash(asked, keys[None, :, prefix], values[None, :, prefix], 0.0, False, scale=scale)
            out[:, group], lse[:, group] = merge(
                out[:, group], lse[:, group], found.reshape(out[:, group].shape), norm.reshape(lse[:, group].shape)
            )
        ctx.save_for_backward(queries, keys, values, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        queries, keys, values, out, lse = ctx.saved_tensors
        layout, scale, grad = ctx.layout, ctx.scale, grads[0]
        heads = len(queries)
        wide_keys, wide_values = (_widened(tensor, heads) for tensor in (keys, values))
        d_queries, d_keys, d_values = (torch.zeros_like(tensor) for tensor in (queries, keys, values))
        for prefix in filter(_holds_tokens, layout.prefixes):
            parts = (tensor[None, :, prefix] for tensor in (grad, queries, wide_keys, wide_values, out, lse))
            found = _flash_backward(*parts, 0.0, True, scale=scale)
            d_queries[:, prefix] = found[0][0]
            d_keys[:, prefix] = _narrowed(found[1][0], keys)
            d_values[:, prefix] = _narrowed(found[2][0], keys)
        rest = slice(layout.groups[0].start, queries.shape[1])
        own = (_padded(tensor, layout) for tensor in (queries, wide_keys, wide_values))
        d_out, o = (_scattered(tensor[:, rest], layout, 0.0) for tensor in (grad, out))
        found = _flash_backward(d_out, *own, o, _scattered(lse[:, rest], layout, FAR), 0.0, True, scale=scale)
        d_queries[:, rest] = _unpadded(found[0], layout)
        d_keys[:, rest] = _narrowed(_unpadded(found[1], layout), keys)
        d_values[:, rest] = _narrowed(_unpadded(found[2], layout), keys)
        for prefix, group in zip(layout.prefixes, layout.groups, strict=True):
            if not _holds_tokens(prefix):
                continue
            d_out, a, o, norm = (_folded(tensor[:, group], len(keys)) for tensor in (grad, queries, out, lse))
            found = _flash_backward(
                d_out, a, keys[None, :, prefix], values[None, :, prefix], o, norm, 0.0, False, scale=scale
            )
            d_queries[:, group] += found[0].reshape(d_queries[:, group].shape)
            d_keys[:, prefix] += found[1][0]
            d_values[:, prefix] += found[2][0]
        return d_queries, d_keys, d_values, None, None


def _holds_tokens(part: slice) -> bool:
    return bool(part.stop > part.start)


def _widened(values: Tensor, heads: int) -> Tensor:
    """(K, T, D) as (H, T, D), a copy of keys or values for every query head."""
    return values if len(values) == heads else values.repeat_interleave(heads // len(values), 0)


def _narrowed(wide: Tensor, values: Tensor) -> Tensor:
    """The sum (K, n, D) over the query heads of each head of `values`, from (H, n, D)."""
    return wide if len(wide) == len(values) else wide.unflatten(0, (len(values), -1)).sum(1)


def _folded(values: Tensor, heads: int) -> Tensor:
    """(H, n, ...) as (1, K, H/K n, ...): queries of heads that share keys stand behind one another."""
    return values.reshape(1, heads, -1, *values.shape[2:])


def _padded(values: Tensor, layout: Layout) -> Tensor:
    """The completions of (H, T, D) as (N, H, C, D)."""
    return values[:, layout.own].unflatten(1, (layout.completions, -1)).transpose(0, 1)


def _unpadded(values: Tensor, layout: Layout) -> Tensor:
    """(N, H, C, ...) as (H, completion tokens, ...)."""
    return values.transpose(0, 1).flatten(1, 2)[:, layout.place]


def _scattered(values: Tensor, layout: Layout, fill: float) -> Tensor:
    """(H, completion tokens, ...) as (N, H, C, ...) with `fill` behind each completion."""
    wide = values.new_full((len(values), len(layout.own), *values.shape[2:]), fill)
    wide[:, layout.place] = values
    return wide.unflatten(1, (layout.completions, -1)).transpose(0, 1)
