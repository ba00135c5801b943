"""TRL's GRPOTrainer that computes each prompt once for all rollouts of its group (`awpo.training.packed_forward`).

What can't be packed is computed by TRL's own pass, and who trains is told why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather
from peft import PeftModel
from trl.trainer.utils import split_tensor_dict

from awpo.model_attention import why_not_packed
from awpo.training.group_order import shuffled
from awpo.training.packed_forward import (
    MEAN_DIFFERENCE,
    PASS_TOKENS,
    idle_apart,
    joined,
    log_probabilities,
    padded_rows,
    take_packed_rows,
)
from awpo.training.resumable_trainer import ResumableTrainer
from awpo.training.sharding import in_shards

PLAIN_ARGUMENTS = ("batch_size", "compute_entropy", "compute_aux_loss")
UNPACKED = "prompts are not shared, each is computed again for every rollout of its group: "


def _allowed(accelerator: Accelerator) -> float:
    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return MEAN_DIFFERENCE[names.get(accelerator.mixed_precision, torch.float32)]


class PackedTrainer(ResumableTrainer):
    """Between TRL's trainer and the method. Set before a pass: `_drawn_logps`, log-probabilities that the rollout left
    for the pass over the old policy; `_idle` (B,), the rows of a micro-batch that need no gradient."""

    def _prepare_packing(self, warn: Callable[[str], None]) -> None:
        """Once, when TRL has made its models."""
        self._drawn_logps: list[list[float]] | None = None
        self._idle: torch.Tensor | None = None
        models = [self.accelerator.unwrap_model(one) for one in (self.model, self.ref_model) if one is not None]
        plain = [one.get_base_model() if isinstance(one, PeftModel) else one for one in models]
        reasons = [reason for one in plain if (reason := why_not_packed(one))]
        self._packs, self._say = not reasons, warn
        # On a CPU the tests have compared values and gradients; what a GPU's kernels make of a mask is seen at the start.
        self._compares = self._packs and self.accelerator.device.type != "cpu"
        if self._packs:
            for one in plain:
                take_packed_rows(one)
        else:
            warn(UNPACKED + reasons[0])

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's micro-batch of this step. A rollout batch is shuffled by whole groups, whose rows share a pass over
        their prompt, where TRL shuffles single rows."""
        due = self._step % (self.args.steps_per_generation * self.num_iterations) == 0 or self._buffered_inputs is None
        if not self.model.training or not due:
            return super()._prepare_inputs(generation_batch)
        batch = shuffled(self._generate_and_score_completions(generation_batch), self.num_generations)
        self._buffered_inputs = split_tensor_dict(batch, self.args.steps_per_generation)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *rest: Any,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **named: Any,
    ) -> Any:
        named |= {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
        pictures = any(value is not None for name, value in named.items() if name not in PLAIN_ARGUMENTS)
        if not self._packs or compute_aux_loss or pictures or rest:
            forward = super()._get_per_token_logps_and_entropies
            return forward(model, input_ids, attention_mask, logits_to_keep, *rest, **named)
        if not torch.is_grad_enabled() and self._drawn_logps is not None:
            drawn, self._drawn_logps = self._drawn_logps, None
            return padded_rows(drawn, logits_to_keep, input_ids.device), None, None
        if self._compares:
            self._compare(model, input_ids, attention_mask, logits_to_keep)
            return self._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, **named)
        most = PASS_TOKENS if self._whole_model else None

        def packed(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            return log_probabilities(model, input_ids[rows], attention_mask[rows], logits_to_keep, most)

        with self.accelerator.autocast():
            if self._whole_model:
                logps, entropies = idle_apart(packed, len(input_ids), self._idle)
            else:  # as many passes in every process
                size = named.get("batch_size") or len(input_ids)
                logps, entropies = joined([packed(rows) for rows in torch.arange(len(input_ids)).split(size)])
        return logps, entropies if compute_entropy else None, None

    @torch.no_grad()
    def _compare(self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int) -> None:
        """Once: goes back to TRL's pass, in every process, where packed rows of one group have other values."""
        self._compares = False
        rows = slice(0, self.num_generations)
        ids, mask = input_ids[rows], attention_mask[rows]
        kept = mask[:, -width:].bool()
        try:
            with self.accelerator.autocast():
                packed, _ = log_probabilities(model, ids, mask, width, None)
        except (RuntimeError, NotImplementedError) as error:
            packed, reason = torch.full(kept.shape, torch.nan, device=ids.device), f": {str(error).splitlines()[0]}"
        else:
            reason = ""
        plain, *_ = super()._get_per_token_logps_and_entropies(model, ids, mask, width)
        far = gather(((packed - plain)[kept].abs().mean() / _allowed(self.accelerator)).reshape(1))
        if not bool((far <= 1).all()):  # not a number, too
            self._packs = False
            self._say(f"{UNPACKED}packed rows have other log-probabilities on this device{reason}")

    @property
    def _whole_model(self) -> bool:
        """Whether this process has all weights at hand. Where they are shared out (ZeRO-3, FSDP), every process must
        make the same forward passes."""
        return not in_shards(self.accelerator)
