"""TRL's GRPOTrainer with this project's rewards, advantages and clip radius.

TRL keeps generation, weight sync, the loss, checkpoints, ZeRO and FSDP. Three of its hooks are overridden, all
private, so TRL is pinned exactly and a test fails when one of them moves:
`_calculate_rewards` (scores the rollouts and keeps what advantages need), `_generate_and_score_completions`
(replaces the advantages and adds the clip radius of each row), `_compute_loss` (a radius per row).

Axes: N rollouts of all processes, P prompts, G rollouts of a prompt, B rows of a micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather, gather_object
from trl import GRPOTrainer

from awpo.advantages import Estimate, estimate
from awpo.events import RunLog
from awpo.methods import Method
from awpo.training.scoring import Scorer, Scores
from awpo.types import Instance

REWARDS = ("format", "correct", "overlong", "reasoning")


def scored_elsewhere(completions: Sequence[Any], **_: Any) -> list[float]:
    """TRL wants at least one reward function; the rewards come from `PolicyTrainer._calculate_rewards`."""
    raise RuntimeError("rewards are computed in PolicyTrainer._calculate_rewards")


class PolicyTrainer(GRPOTrainer):
    """Trains by `method`. Rows of the dataset: `prompt` (text, already rendered with its tools) and `index`, which
    points into `instances`."""

    def __init__(
        self, *arguments: Any, method: Method, scorer: Scorer, instances: Sequence[Instance], log: RunLog, **named: Any
    ) -> None:
        super().__init__(*arguments, reward_funcs=[scored_elsewhere], **named)
        self.method, self.scorer, self.instances, self.run_log = method, scorer, instances, log
        self._scored: tuple[list[Instance], list[str], Scores] | None = None
        self._unvarying_rollouts = dict.fromkeys(REWARDS, 0)

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: Any, completions: Any, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        # The texts are decoded here and not taken from TRL, which strips every special token: a tag may be one.
        texts = [self._decode(ids) for ids in completion_ids_list]
        instances = [self.instances[row["index"]] for row in inputs]
        scores = self.scorer.score(instances, texts, [len(ids) for ids in completion_ids_list])
        self._scored = (instances, texts, scores)
        device = self.accelerator.device
        outcome = torch.tensor(scores.format, device=device) + torch.tensor(scores.correct, device=device)
        return gather(outcome.unsqueeze(1))

    def _decode(self, ids: list[int]) -> str:
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        return str(self._tokenizer.decode([i for i in ids if i not in ends], skip_special_tokens=False))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        start = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        assert self._scored is not None
        instances, texts, scores = self._scored
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        rewards_N = {name: self._gathered(getattr(scores, name)) for name in REWARDS}
        rewards_N["outcome"] = rewards_N["format"] + rewards_N["correct"] + rewards_N["overlong"]
        # Every prompt's rows stand together, in the order of the processes, so groups are whole here.
        result = estimate(
            self.method,
            {name: rewards_N[name].view(-1, group_size) for name in self.method.rewards},
            r_min=self._gathered(scores.r_min).view(-1, group_size)[:, 0],
            r_max=self._gathered(scores.r_max).view(-1, group_size)[:, 0],
        )
        rows = slice(self.accelerator.process_index * len(inputs), (self.accelerator.process_index + 1) * len(inputs))
        output["advantages"] = result.advantages.reshape(-1)[rows].to(output["advantages"].dtype)
        output["clip_low"] = result.clip_low.repeat_interleave(group_size)[rows]
        output["clip_high"] = result.clip_high.repeat_interleave(group_size)[rows]
        self._report(rewards_N, result, scores, group_size, time.perf_counter() - start)
        if self.accelerator.is_main_process:
            self.scorer.write_samples(
                self.state.global_step, instances, texts, scores, advantage=output["advantages"].tolist()
            )
        return output

    def _gathered(self, values: Sequence[float]) -> torch.Tensor:
        return gather(torch.tensor(list(values), dtype=torch.float32, device=self.accelerator.device))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        low, high = self.epsilon_low, self.epsilon_high
        self.epsilon_low, self.epsilon_high = inputs["clip_low"].unsqueeze(1), inputs["clip_high"].unsqueeze(1)
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.epsilon_low, self.epsilon_high = low, high

    def _report(
        self, rewards_N: dict[str, torch.Tensor], result: Estimate, scores: Scores, group_size: int, seconds: float
    ) -> None:
        """Hands the rollout's metrics to TRL's store (method.md section 6), which averages them until it logs."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        judged = ~rewards_N["reasoning"].isnan()
        values: dict[str, float] = {
            "reward/format": rewards_N["format"].mean().item(),
            "reward/correct": rewards_N["correct"].mean().item(),
            "reward/outcome": rewards_N["outcome"].mean().item(),
            "judge/failure_rate": 1.0 - judged.float().mean().item() if self.scorer.judge else 0.0,
            "judge/seconds": max(gather_object([scores.judge_seconds])),
            "seconds/rollout": seconds,
        }
        total = rewards_N["outcome"].mean().item()
        if judged.any():
            values["reward/reasoning"] = rewards_N["reasoning"][judged].mean().item()
            if "reasoning" in self.method.rewards:
                total += self.method.mix * values["reward/reasoning"]
        values["reward/total"] = total
        for name, stat in result.stats.items():
            tensor = torch.as_tensor(stat, dtype=torch.float32)
            finite = tensor[tensor.isfinite()]
            if not finite.numel():
                continue
            if name in ("ratio", "correlation"):
                for quantile in (10, 50, 90):
                    values[f"gate/{name}_p{quantile}"] = finite.quantile(quantile / 100).item()
            else:
                values[METRIC_NAMES.get(name, name)] = finite.mean().item()
        for name, value in values.items():
            metrics[name].append(value)
        self._warn_of_constant_rewards(rewards_N)

    def _warn_of_constant_rewards(self, rewards_N: dict[str, torch.Tensor]) -> None:
        """A reward that is constant by a bug must not go unnoticed (ms-swift#10148)."""
        for name in set(self.method.rewards) & set(rewards_N):
            finite = rewards_N[name][rewards_N[name].isfinite()]
            constant = not finite.numel() or bool(finite.max() == finite.min())
            self._unvarying_rollouts[name] = self._unvarying_rollouts.get(name, 0) + 1 if constant else 0
            if self._unvarying_rollouts[name] == 5 and self.accelerator.is_main_process:
                self.run_log.warning(f"reward {name!r} has had no variance at all for 5 rollout batches")

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """The method card that is saved with the finished checkpoint takes the place of TRL's."""


METRIC_NAMES = {
    "gate": "gate/open_share",
    "saturated": "saturated_share",
    "difficulty": "difficulty/mean",
    "radius": "clip/radius_mean",
    "closed_by_failure": "gate/closed_by_failure_share",
}
