"""Attention by a layout against the same attention with a mask of T x T, in double precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from awpo.prefix_attention import Layout, SharedPrefixAttention, merge, tree_attention

# Query heads, heads of keys and values, prefixes, completions of each group.
SHAPES = [
    (4, 2, [10, 3], [[3, 1, 4], [2, 6]]),
    (2, 2, [0, 7], [[5], [1, 1]]),
    (6, 2, [33], [[40, 2, 17]]),
    (8, 1, [70, 1, 5], [[1], [9, 9], [2, 65]]),
]


def by_mask(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    wide_keys, wide_values = (one.repeat_interleave(len(queries) // len(one), 0) for one in (keys, values))
    scores = (queries @ wide_keys.transpose(1, 2) * scale).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ wide_values


def mask_of(prefixes: list[int], completions: list[list[int]]) -> Tensor:
    """Token i sees token j, (T, T): written down from what the layout promises, and from lengths alone."""
    owners = [("prompt", group) for group, length in enumerate(prefixes) for _ in range(length)]
    owners += [
        ("completion", group, row)
        for group, lengths in enumerate(completions)
        for row, length in enumerate(lengths)
        for _ in range(length)
    ]
    seen = [
        [j <= i and (owners[j] == owners[i] or owners[j] == ("prompt", owners[i][1])) for j in range(len(owners))]
        for i in range(len(owners))
    ]
    return torch.tensor(seen)


def on_cpus(queries: Tensor, keys: Tensor, values: Tensor, layout: Layout, scale: float) -> Tensor:
    found: Tensor = SharedPrefixAttention.apply(queries, keys, values, layout, scale)
    return found


def by_tree(queries: Tensor, keys: Tensor, values: Tensor, layout: Layout, scale: float) -> Tensor:
    return tree_attention(queries[None], keys[None], values[None], layout, scale)[0]


@pytest.mark.parametrize("attend", [on_cpus, by_tree])
@pytest.mark.parametrize(("heads", "kv_heads", "prefixes", "completions"), SHAPES)
def test_outputs_and_gradients_are_those_of_the_mask(
    heads: int, kv_heads: int, prefixes: list[int], completions: list[list[int]], attend: Callable[..., Tensor]
) -> None:
    torch.manual_seed(0)
    tokens = sum(prefixes) + sum(map(sum, completions))
    exact = [torch.randn(n, tokens, 16, dtype=torch.float64, requires_grad=True) for n in (heads, kv_heads, kv_heads)]
    weights = torch.randn(heads, tokens, 16, dtype=torch.float64)
    expected = by_mask(*exact, mask_of(prefixes, completions), 0.3)
    single = [tensor.detach().float().requires_grad_() for tensor in exact]
    layout = Layout.of(prefixes, completions, torch.device("cpu"))
    found = attend(*single, layout, 0.3)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)
    gradients = torch.autograd.grad((found * weights.float()).sum(), single)
    for gradient, right in zip(gradients, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        torch.testing.assert_close(gradient.double(), right, atol=1e-5, rtol=1e-4)
        assert right.abs().max() > 0.1


def test_a_completion_does_not_see_another_group_or_its_neighbour() -> None:
    torch.manual_seed(1)
    prefixes, completions = [6, 4], [[3, 3], [2, 5]]
    layout = Layout.of(prefixes, completions, torch.device("cpu"))
    queries, keys, values = torch.randn(3, 2, 23, 8).unbind()
    before = SharedPrefixAttention.apply(queries, keys, values, layout, 1.0)
    values = values.clone()
    values[:, :6] += 1  # the first prefix
    values[:, 13:16] += 1  # the second completion of the first group
    changed = (SharedPrefixAttention.apply(queries, keys, values, layout, 1.0) - before).abs().amax((0, 2)) > 0.1
    assert changed.nonzero()[:, 0].tolist() == [*range(6), *range(10, 16)]


def test_two_sets_of_keys_make_one() -> None:
    torch.manual_seed(2)
    scores, values = torch.randn(5, 9) * 3, torch.randn(9, 4)
    parts = [
        (scores[:, part].softmax(-1) @ values[part], scores[:, part].logsumexp(-1)) for part in (slice(4), slice(4, 9))
    ]
    out, lse = merge(*parts[0], *parts[1])
    torch.testing.assert_close(out, scores.softmax(-1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
