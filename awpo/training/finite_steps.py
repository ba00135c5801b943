"""A loss or gradient that is not finite ends the run before it can spoil the weights, and the batch is named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Trainer

from awpo.errors import UserError
from awpo.events import RunLog

NAMED = 3
"""Instances that the message names; all of them are in the event."""


class FiniteSteps(Trainer):  # type: ignore[misc]  # transformers is untyped here
    """Before a trainer: who trains calls `watch_steps` once, `_made_of` before each loss and `_refuse_loss` after it.

    An event `not_finite` in events.jsonl holds step, value and the ids of the instances that this process had in the
    step.
    """

    _stage, _step_log = "policy", None
    _batch: tuple[int, list[str]] = (-1, [])

    def watch_steps(self, stage: str, log: RunLog | None) -> None:
        """`stage` is the section of the settings that holds the learning rate."""
        self._stage, self._step_log = stage, log

    def _made_of(self, ids: Sequence[str]) -> None:
        """Notes the instances of a micro-batch; those of the same optimiser step are kept together."""
        step = self.state.global_step
        self._batch = (step, [*(self._batch[1] if self._batch[0] == step else []), *ids])

    def _refuse_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, where it is finite."""
        if not bool(loss.isfinite().all()):
            self._refuse("loss", float(loss.detach().float().mean()))
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """DeepSpeed has made the step by then, of which nothing is kept."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and not math.isfinite(norm):
            self._refuse("gradient", float(norm))
        return norm

    def _refuse(self, what: str, value: float) -> None:
        step, ids = self.state.global_step + 1, list(dict.fromkeys(self._batch[1]))
        if self._step_log:
            rank = self.accelerator.process_index
            self._step_log.event("not_finite", what=what, value=str(value), step=step, rank=rank, instances=ids)
        more = f" and {len(ids) - NAMED} more, which events.jsonl names" if len(ids) > NAMED else ""
        made_of = f"; its batch is of the instances {', '.join(ids[:NAMED])}{more}" if ids else ""
        raise UserError(
            f"the {what} of optimiser step {step} is not finite ({value}), and the step is not kept; lower "
            f"{self._stage}.learning_rate, and start again: training goes on from the last checkpoint{made_of}"
        )
