"""Supervised fine-tuning: rationale + reference action after each prompt, loss on the target step's tokens alone.

    python -m awpo.training.sft JOB.json     {"model", "instances", "out", "config": SftConfig}

Writes into `out`: checkpoint/, metrics.jsonl, events.jsonl, summary.json, manifest.json.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments, set_seed

from awpo.artifacts import input_identity, open_stage, write_atomically
from awpo.chat import render_prompt, render_target
from awpo.config import SftConfig
from awpo.data.store import read_instances
from awpo.errors import UserError
from awpo.events import RunLog
from awpo.processes import worker_main
from awpo.training.checkpoints import RESUME, MarkWholeCheckpoints, last_whole_checkpoint, load_policy, save_finished
from awpo.training.demonstrations import wrong_decision
from awpo.types import Instance

IGNORED = -100


class Demonstrations(Dataset[dict[str, list[int]]]):
    """Token ids of prompt and target; the labels of the prompt are ignored by the loss.

    Prompt and target are tokenised apart, as they meet at inference. `too_long` counts instances left out because
    they exceed `max_length` tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, instances: Sequence[Instance], max_length: int) -> None:
        self.rows: list[dict[str, list[int]]] = []
        self.too_long = 0
        for instance in instances:
            prompt = tokenizer(render_prompt(tokenizer, instance), add_special_tokens=False)["input_ids"]
            target = tokenizer(render_target(instance.target, instance.rationale), add_special_tokens=False)
            ids = [*prompt, *target["input_ids"], tokenizer.eos_token_id]
            if len(ids) > max_length:
                self.too_long += 1
                continue
            labels = [IGNORED] * len(prompt) + ids[len(prompt) :]
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.rows[index]


class PadAroundTarget:
    """Pads prompts on the left and targets on the right, so that all targets start in the same column.

    Gives input_ids, attention_mask and labels, each (B, P + T), and `logits_to_keep` = T + 1: the head then works
    on the target's columns alone, which are a third of a batch of tool-use prompts or less.
    """

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def __call__(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
        prompts = [row["labels"].count(IGNORED) for row in rows]
        longest_prompt = max(prompts)
        longest_target = max(len(row["labels"]) - prompt for row, prompt in zip(rows, prompts, strict=True))
        width = longest_prompt + longest_target
        input_ids = torch.full((len(rows), width), self.pad_id)
        attention_mask = torch.zeros((len(rows), width), dtype=torch.long)
        labels = torch.full((len(rows), width), IGNORED)
        for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            columns = slice(longest_prompt - prompt, longest_prompt - prompt + len(row["input_ids"]))
            input_ids[index, columns] = torch.tensor(row["input_ids"])
            attention_mask[index, columns] = 1
            labels[index, columns] = torch.tensor(row["labels"])
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "labels": labels,
            "logits_to_keep": longest_target + 1,
        }


def target_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """Cross-entropy, mean over the target tokens of the whole optimiser step.

    `outputs.logits` (B, T + 1, V) are those of the last T + 1 columns of `labels` (B, P + T); see
    `PadAroundTarget`. A column's logits predict the next one, so the last column's are of no use.
    """
    logits = outputs.logits[:, :-1].float()
    targets = labels[:, -logits.shape[1] :]
    total = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )
    return total / (num_items_in_batch if num_items_in_batch is not None else (targets != IGNORED).sum())


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


def train_sft(model: str, instances: Path, out: Path, config: SftConfig) -> dict[str, Any]:
    """Trains `model` on the train split of `instances`; returns the summary that is written to `out`.

    Raises UserError where no instance can be trained on.
    """
    folder = Path(model)
    inputs = {
        "model": input_identity(folder) if folder.exists() else model,
        "instances": input_identity(instances),
    }
    with open_stage(out, "sft", inputs, config.model_dump(exclude={"threads"})) as stage:
        if stage.finished:
            return dict(stage.manifest.counts)
        log = RunLog(out)
        if config.threads:
            torch.set_num_threads(config.threads)
        set_seed(config.seed)
        policy, tokenizer = load_policy(model)
        chosen, replaced = prepare_demonstrations(read_instances(instances, {"train"}), config)
        dataset = Demonstrations(tokenizer, chosen, config.max_length)
        if not len(dataset):
            raise UserError(f"{instances} holds no training instance of at most {config.max_length} tokens")
        if dataset.too_long:
            log.warning(f"{dataset.too_long} of {len(chosen)} instances exceed {config.max_length} tokens; left out")
        resume = last_whole_checkpoint(out / RESUME) if stage.resumed else None
        trainer = Trainer(
            model=policy,
            args=_arguments(config, out),
            train_dataset=dataset,
            compute_loss_func=target_loss,
            data_collator=PadAroundTarget(int(tokenizer.pad_token_id)),
            callbacks=[
                LogToFiles(log, {"loss": "loss", "grad_norm": "gradient_norm", "learning_rate": "learning_rate"}),
                MarkWholeCheckpoints(),
            ],
        )
        result = trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        summary = {
            "steps": config.steps,
            "loss": round(result.training_loss, 6),
            "instances": len(dataset),
            "too_long": dataset.too_long,
            "wrong_decisions": replaced,
        }
        if trainer.is_world_process_zero():
            card = {"method": "sft", "base": model, **stage.manifest.to_json(), **summary}
            save_finished(trainer.accelerator.unwrap_model(trainer.model), tokenizer, out / "checkpoint", card)
            write_atomically(out / "summary.json", json.dumps(summary, indent=2) + "\n")
            stage.finish(summary)
        return summary


def _arguments(config: SftConfig, out: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(out / RESUME),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=config.warmup_share,
        weight_decay=config.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=5,
        save_steps=config.save_every,
        save_total_limit=2,
        train_sampling_strategy="group_by_length",
        length_column_name="length",
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        seed=config.seed,
        data_seed=config.seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def run(job: dict[str, Any]) -> None:
    train_sft(
        job["model"], Path(job["instances"]), Path(job["out"]), SftConfig.read(job.get("config", {}), "the SFT config")
    )


if __name__ == "__main__":
    worker_main(run)
