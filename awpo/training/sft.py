"""Supervised fine-tuning on TRL's SFTTrainer: rationale + reference action after each prompt, loss on the target step.

    python -m awpo.training.sft JOB.json     {"model", "instances", "out", "config": SftConfig, "launch": ...}

Writes into `out`: checkpoint/, metrics.jsonl, events.jsonl, summary.json, manifest.json, and adapter/ where adapters
were trained. A run that was interrupted resumes at its last whole checkpoint and ends with the same weights, bit for
bit on a CPU. Several processes (torchrun) share each optimiser step's rows and make the same step as one; where an
epoch ends with fewer rows than a step has, they fill it up with rows from the epoch's beginning, which one doesn't.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback, set_seed
from trl import SFTConfig

from awpo.chat import render_prompt, render_target
from awpo.config_training import SftConfig
from awpo.data.store import read_instances
from awpo.errors import UserError
from awpo.events import METRICS, RunLog, Tail
from awpo.files import write_atomically
from awpo.processes import worker_main
from awpo.training.checkpoints import (
    MarkWholeCheckpoints,
    check_launch,
    check_positions,
    leave_processes,
    load_policy,
    open_training,
    train_from,
    where_to_resume,
)
from awpo.training.demonstrations import wrong_decision
from awpo.training.hardware import accumulation_steps, device_arguments, dtype_of_weights
from awpo.training.identity import RESUME, sft_identity
from awpo.training.lora import check_layers, peft_config, save_trained, trained_model
from awpo.training.sft_trainer import IGNORED, PadAroundTarget, TargetTrainer
from awpo.training.sharding import process_state, with_own_optimizer
from awpo.types import Instance


class Demonstrations:
    """Token ids of prompt and target; the labels of the prompt are ignored by the loss.

    Prompt and target are tokenised apart, as they meet at inference. `too_long` counts instances left out because
    they exceed `max_length` tokens; `ids` names those of the rows. Without `rationales` the target is the action alone.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        instances: Sequence[Instance],
        max_length: int,
        *,
        rationales: bool = True,
    ) -> None:
        self.rows: list[dict[str, list[int]]] = []
        self.ids: list[str] = []
        self.too_long = 0
        for instance in instances:
            prompt = tokenizer(render_prompt(tokenizer, instance), add_special_tokens=False)["input_ids"]
            thought = instance.rationale if rationales else None
            target = tokenizer(render_target(instance.target, thought), add_special_tokens=False)
            ids = [*prompt, *target["input_ids"], tokenizer.eos_token_id]
            if len(ids) > max_length:
                self.too_long += 1
                continue
            labels = [IGNORED] * len(prompt) + ids[len(prompt) :]
            self.rows.append({"input_ids": ids, "labels": labels})
            self.ids.append(instance.id)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dataset(self) -> Dataset:
        """The rows in the form that TRL takes, with their `length` in tokens and their place in `ids` (`instance`)."""
        lengths = [len(row["input_ids"]) for row in self.rows]
        return Dataset.from_list(
            [{**row, "length": lengths[place], "instance": place} for place, row in enumerate(self.rows)]
        )


class LogToFiles(TrainerCallback):
    """Relays Trainer's logs to the run folder."""

    def __init__(self, log: RunLog, names: dict[str, str]) -> None:
        self.log, self.names = log, names

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        found = {self.names[key]: value for key, value in (logs or {}).items() if key in self.names}
        if state.is_world_process_zero and found:
            self.log.metrics(state.global_step, found)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero and (state.global_step % 5 == 0 or state.global_step == state.max_steps):
            self.log.progress(state.global_step, state.max_steps, "steps")


def prepare_demonstrations(instances: Sequence[Instance], config: SftConfig) -> tuple[list[Instance], int]:
    """The instances with a seeded share of wrong decisions; returns them and how many were replaced."""
    generator = random.Random(f"demonstrations-{config.seed}")
    replaced, result = 0, []
    for instance in instances:
        wrong = wrong_decision(instance, generator) if generator.random() < config.wrong_decision_share else None
        replaced += wrong is not None
        result.append(wrong or instance)
    return result, replaced


def train_sft(
    model: str, instances: Path, out: Path, config: SftConfig, launch: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Trains `model` on the train split of `instances`; returns the summary that is written to `out`.

    `launch` is how this and the other processes were started (`LaunchSettings.effect`), where somebody knows.

    Raises UserError where no instance can be trained on.
    """
    launch, processes = check_launch(launch), process_state()
    # More steps are other work: the learning rate falls over all of them.
    with open_training(out, "sft", sft_identity(model, instances, config, launch)) as stage:
        if stage.finished:
            return dict(stage.manifest.counts)
        log = RunLog(out)
        if config.threads:
            torch.set_num_threads(config.threads)
        arguments = with_own_optimizer(trainer_arguments(config, out, processes.num_processes))
        check_positions(model, config.max_length, "sft.max_length")
        set_seed(config.seed)
        policy, tokenizer = load_policy(model, dtype_of_weights(config))
        check_layers(policy, config.lora)
        chosen, replaced = prepare_demonstrations(read_instances(instances, {"train"}), config)
        dataset = Demonstrations(tokenizer, chosen, config.max_length, rationales=config.rationales)
        if not len(dataset):
            raise UserError(f"{instances} holds no training instance of at most {config.max_length} tokens")
        if dataset.too_long and processes.is_main_process:
            log.warning(f"{dataset.too_long} of {len(chosen)} instances exceed {config.max_length} tokens; left out")
        resume = where_to_resume(out, stage, log, config.steps)
        trainer = TargetTrainer(
            model=policy,
            processing_class=tokenizer,
            args=arguments,
            peft_config=peft_config(config.lora),
            train_dataset=dataset.to_dataset(),
            data_collator=PadAroundTarget(int(tokenizer.pad_token_id)),
            callbacks=[
                LogToFiles(log, {"loss": "loss", "grad_norm": "gradient_norm", "learning_rate": "learning_rate"}),
                MarkWholeCheckpoints(),
            ],
        )
        trainer.instance_ids = dataset.ids
        trainer.watch_steps("sft", log)
        train_from(trainer, resume, config.steps)
        summary = {
            "steps": config.steps,
            "loss": _mean_loss(out),
            "instances": len(dataset),
            "too_long": dataset.too_long,
            "wrong_decisions": replaced,
        }
        with trained_model(trainer, model, config.lora) as trained:
            if trained is not None:
                card = {"method": "sft", "base": model, **stage.manifest.begun(), **summary}
                save_trained(trained, tokenizer, out, card)
                write_atomically(out / "summary.json", json.dumps(summary, indent=2) + "\n")
                stage.finish(summary)
        return summary


def trainer_arguments(config: SftConfig, out: Path, processes: int = 1) -> SFTConfig:
    """TRL's settings, every default that matters set; raises UserError where the batch can't be split."""
    micro_batch = config.micro_batch_on(processes)
    return SFTConfig(
        output_dir=str(out / RESUME),
        max_steps=config.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation_steps(
            config.batch_size, micro_batch, processes, "sft.micro_batch_size"
        ),
        # The rows are tokenised, cut to their length and labelled already.
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        packing=False,
        padding_free=False,
        loss_type="nll",
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=config.warmup_share,
        optim="adamw_torch_fused",
        weight_decay=config.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        # Each step is logged, so that a run that was interrupted has the same metrics as one that was not.
        logging_steps=1,
        save_steps=config.save_every,
        save_total_limit=2,
        remove_unused_columns=False,
        # Every weight has a gradient in every pass, and a model's buffers are constants.
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        report_to="none",
        disable_tqdm=True,
        seed=config.seed,
        data_seed=config.seed,
        **device_arguments(config),
    )


def _mean_loss(out: Path) -> float:
    """The mean over all steps, of those before an interruption too."""
    losses = [row["metrics"]["loss"] for row in Tail(out / METRICS)]
    return round(sum(losses) / len(losses), 6)


def run(job: dict[str, Any]) -> None:
    train_sft(
        job["model"],
        Path(job["instances"]),
        Path(job["out"]),
        SftConfig.read(job.get("config", {}), "the SFT config"),
        job.get("launch"),
    )
    leave_processes()


if __name__ == "__main__":
    worker_main(run)
