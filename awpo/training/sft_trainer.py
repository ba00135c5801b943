"""TRL's SFTTrainer with the loss on the target's columns and an order of rows that resuming finds again.

Axes: B rows of a batch, P columns of prompts, T columns of targets, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices
from trl import SFTTrainer

from awpo.training.finite_steps import FiniteSteps

IGNORED = -100


class PadAroundTarget:
    """Pads prompts on the left and targets on the right, so that all targets start in the same column.

    Gives input_ids, attention_mask and labels, each (B, P + T), and `logits_to_keep` = T + 1: the head then works
    on the target's columns alone, which are a third of a batch of tool-use prompts or less. `instance` (B,) where the
    rows have one.
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
            **({"instance": torch.tensor([row["instance"] for row in rows])} if "instance" in rows[0] else {}),
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


class OrderedByLength(Sampler[int]):
    """Rows in random order, but those of similar length together, which saves padding.

    The order depends on seed and epoch alone, so a run that resumes within an epoch finds it again. (The sampler of
    transformers takes it from the global state of random numbers as it stood when the epoch began, which a checkpoint
    from the middle of the epoch no longer has.)
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed = list(lengths), batch_size, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        order: list[int] = []
        for _ in range(self.epoch + 1):
            # A DataLoader draws a number before each epoch; drawn here too, it keeps the order of transformers' sampler.
            torch.empty((), dtype=torch.int64).random_(generator=generator)
            order = get_length_grouped_indices(self.lengths, self.batch_size, generator=generator)
        return iter(order)


class TargetTrainer(FiniteSteps, SFTTrainer):
    """Rows of the dataset: `input_ids`, `labels`, `length`, and `instance`, a place in `instance_ids`; collated by
    `PadAroundTarget`.

    On a CPU the loss is `target_loss`: the trainer's own runs the head on every column there, and most of a step on
    long tool prompts would be the head's work on columns that have no loss. On a GPU the trainer's own leaves those
    columns out by itself, and never holds the logits of all the others at once.
    """

    # Both losses are divided by the target tokens of the whole optimiser step.
    loss_is_scaled_for_ga = True
    instance_ids: Sequence[str] = ()

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        columns, places = inputs.pop("logits_to_keep"), inputs.pop("instance", None)
        if self.instance_ids and places is not None:
            self._made_of([self.instance_ids[place] for place in places.tolist()])
        if self.accelerator.device.type != "cpu":
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            self._refuse_loss(found[0] if return_outputs else found)
            return found
        labels = inputs.pop("labels")
        outputs = model(**inputs, logits_to_keep=columns, use_cache=False)
        loss = target_loss(outputs, labels, num_items_in_batch)
        # DDP averages the gradients of processes, where the tokens of all of them have been divided by.
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        self._refuse_loss(loss)
        return (loss, outputs) if return_outputs else loss

    def _get_train_sampler(self, train_dataset: Any = None) -> OrderedByLength:
        rows = train_dataset if train_dataset is not None else self.train_dataset
        # All rows of an optimiser step, so that they are the same however they are cut into micro-batches.
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.accelerator.num_processes
        return OrderedByLength(rows["length"], batch, self.args.seed)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """The method card that is saved with the finished checkpoint takes the place of TRL's."""
