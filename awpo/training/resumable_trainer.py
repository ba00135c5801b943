"""TRL's GRPOTrainer whose checkpoints hold its rollouts and the position in them, which TRL's leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.utils import send_to_device
from trl import GRPOTrainer

from awpo.training.rollout_buffer import EpochOrder, RolloutState
from awpo.training.rollout_watch import RolloutWatch


class ResumableTrainer(GRPOTrainer):
    """Resumes at any optimiser step. `_watch` is set by who trains: its memory is kept, too."""

    _watch: RolloutWatch

    def _get_train_sampler(self, dataset: Any = None) -> EpochOrder:
        rollouts, arguments = self.args.generation_batch_size, self.args
        prompts = rollouts // self.num_generations
        order = EpochOrder(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=prompts,
            repeat_count=self.num_iterations * arguments.steps_per_generation,
            seed=arguments.seed,
            epoch=lambda: self.state.global_step // steps_per_epoch,
        )
        steps_per_rollout = (
            arguments.steps_per_generation * self.num_iterations // arguments.gradient_accumulation_steps
        )
        steps_per_epoch = order.num_samples // prompts * steps_per_rollout
        return order

    def _save_rng_state(self, output_dir: str) -> None:
        """Each process writes its rollouts beside its random numbers."""
        super()._save_rng_state(output_dir)
        in_use = self._step % (self.args.steps_per_generation * self.num_iterations) > 0
        RolloutState(
            micro_batches=self._step,
            buffer=list(self._buffered_inputs or []) if in_use else [],
            metrics=dict(self._metrics["train"]),
            memory=self._watch.memory,
            processes=self.accelerator.num_processes,
        ).write(Path(output_dir), self.accelerator.process_index)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # every process has written its part before it is marked as whole

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        accelerator = self.accelerator
        state = RolloutState.read(Path(checkpoint), accelerator.process_index, accelerator.num_processes)
        self._step = state.micro_batches
        self._buffered_inputs = [send_to_device(part, accelerator.device) for part in state.buffer] or None
        self._metrics["train"].update(state.metrics)
        self._watch.memory = state.memory
