"""In which order the rollouts of a batch are trained on: shuffled, the rows of a group together."""

from __future__ import annotations

import torch
from torch import Tensor

from awpo.training.dynamic_sampling import RolloutBatch


def shuffled(batch: RolloutBatch, group_size: int) -> RolloutBatch:
    """Rows (B, ...) of a batch in another order, whole groups of `group_size` changing places; what is no tensor of
    rows stays. Where several processes share a group, so that B is no multiple, single rows change places."""
    count = len(batch["advantages"])
    size = group_size if count % group_size == 0 else 1
    order = (torch.randperm(count // size)[:, None] * size + torch.arange(size)).flatten()
    return {
        key: value[order.to(value.device)] if isinstance(value, Tensor) and value.ndim else value
        for key, value in batch.items()
    }
