"""DAPO's dynamic sampling: groups without variance teach nothing, so prompts are drawn anew in their place.

DAPO (arXiv 2503.14476) keeps a group where some answers are right and some are wrong: its penalty for length does not
count. Here the outcome is graded, so a group is kept where a reward varies that the method reads, the outcome taken
without its penalty, and an advantage comes of it.

Rounds are bounded (DAPO#22, AReaL#450): what no round could fill stays as it is, and is counted.
Shapes: a rollout batch is a dict of tensors, B rows that stand in groups of G; `prompt_*` are padded on the left,
everything else of two axes on the right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from awpo.advantages import Estimate
from awpo.groups import normalise
from awpo.methods import Method

RolloutBatch = dict[str, Any]


def teaching_groups(method: Method, rewards: dict[str, Tensor], result: Estimate) -> Tensor:
    """Which groups teach something, (P,) bool; see above.

    `rewards` are (P, G) by name, `outcome` without its penalty, NaN where a judgement failed; `result` is what the
    method makes of them, the penalty included.
    """
    varies = torch.zeros(result.advantages.shape[0], dtype=torch.bool, device=result.advantages.device)
    for name in method.rewards:
        known = ~rewards[name].isnan()
        varies |= normalise(rewards[name].double().where(known, 0), known, method).varies_P
    return varies & result.advantages.ne(0).any(dim=1)


def varying_groups(batch: RolloutBatch, group_size: int) -> Tensor:
    """Which groups of a batch teach something, by its column `teaches`: (B / G,) bool."""
    return batch["teaches"].view(-1, group_size).any(dim=1)


def replace_groups(batch: RolloutBatch, drawn: RolloutBatch, group_size: int, pad_id: int) -> RolloutBatch:
    """`batch` with its groups without variance replaced, in order, by those of `drawn` that have some.

    Both hold B rows. Padding is widened where the two differ; entries that are not tensors of B rows are kept.
    """
    groups = torch.arange(batch["teaches"].shape[0] // group_size)
    empty = groups[~varying_groups(batch, group_size).cpu()]
    useful = groups[varying_groups(drawn, group_size).cpu()][: len(empty)]
    chosen = groups.clone()
    chosen[empty[: len(useful)]] = useful + len(groups)
    rows = (chosen[:, None] * group_size + torch.arange(group_size)).reshape(-1)
    count = batch["teaches"].shape[0]
    merged = dict(batch)
    for key, value in batch.items():
        if isinstance(value, Tensor) and value.dim() >= 1 and value.shape[0] == count:
            merged[key] = _stacked(value, drawn[key], key, pad_id)[rows.to(value.device)]
    return merged


def _stacked(first: Tensor, second: Tensor, key: str, pad_id: int) -> Tensor:
    """The rows of both, padded to the wider one."""
    if first.dim() == 2 and first.shape[1] != second.shape[1]:
        fill = pad_id if key.endswith("_ids") else 0
        width = max(first.shape[1], second.shape[1])
        first, second = (_widened(tensor, width, fill, left=key.startswith("prompt_")) for tensor in (first, second))
    return torch.cat([first, second])


def _widened(tensor: Tensor, width: int, fill: int, *, left: bool) -> Tensor:
    gap = width - tensor.shape[1]
    return torch.nn.functional.pad(tensor, (gap, 0) if left else (0, gap), value=fill)
