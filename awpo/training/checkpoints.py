"""Checkpoints: which are whole, which is the last, and how a finished one is saved and looked at again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from awpo.artifacts import Stage, open_stage
from awpo.errors import UserError
from awpo.events import METRICS, RunLog
from awpo.files import flush_to_disk, keep_rows, write_atomically
from awpo.models import HARMLESS, no_weights
from awpo.training.identity import RESUME, WHOLE, TrainingIdentity, refuse_other_launch
from awpo.training.sharding import process_state


def check_launch(launch: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the result depends on of how this run was started (`LaunchSettings.effect`).

    `launch` says how it was meant to be started; None where nobody said. Raises UserError where other processes are
    here than were meant.
    """
    there = process_state().num_processes
    if launch is None:
        return {"processes": there} if there > 1 else {}
    if launch.get("processes", 1) != there:
        raise UserError(
            f"{launch.get('processes', 1)} processes were to share the training, and the launcher started {there}; "
            f"choose another launch preset"
        )
    return dict(launch)


def leave_processes() -> None:
    """Takes leave of the other processes, at the end of a training."""
    process_state().destroy_process_group()


@contextmanager
def open_training(out: Path, name: str, work: TrainingIdentity, growing: Sequence[str] = ()) -> Iterator[Stage]:
    """`open_stage` for the processes of a run: the main one makes the folder, the others find it made.

    Raises UserError, too, where other processes left a checkpoint of this work there.
    """
    processes = process_state()
    with ExitStack() as stack:
        with processes.main_process_first():
            leads = processes.is_main_process
            if leads:
                refuse_other_launch(out, work, growing)
            opened = open_stage(out, name, work.inputs, work.settings, growing=growing, former=work.former, leads=leads)
            stage = stack.enter_context(opened)
        yield stage


def where_to_resume(out: Path, stage: Stage, log: RunLog, steps: int) -> Path | None:
    """The checkpoint to go on from; metrics of later steps are removed, so that each step stands once.

    The main process decides, since the choice removes files, and tells the log of it; the others follow.
    """
    resume = None
    if process_state().is_main_process:
        resume = last_whole_checkpoint(out / RESUME) if stage.resumed else None
        drop_metrics_after(out, step_of(resume))
        changed = f" ({stage.changes})" if stage.changes else ""
        if resume:
            log.note(f"goes on after step {step_of(resume)} of {steps}{changed}")
        elif stage.resumed:
            log.note(f"starts at step 1 again: the attempt before left no whole checkpoint{changed}")
        elif stage.changes:
            log.note(f"starts anew, as what was here is of other settings: {stage.changes}")
    found: list[Path | None] = broadcast_object_list([resume])
    return found[0]


def train_from(trainer: Any, resume: Path | None, steps: int) -> None:
    """Trains up to `steps`, from the checkpoint `resume` where there is one.

    A trainer that resumes after its last step would make one more before it looks whether it is done.
    """
    if step_of(resume) >= steps:

        def no_step(**_: Any) -> None:
            trainer.control.should_training_stop = True

        trainer._run_epoch = no_step
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)


def step_of(checkpoint: Path | None) -> int:
    """After which step a checkpoint was saved; 0 without one."""
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


class MarkWholeCheckpoints(TrainerCallback):
    """Marks a checkpoint once all of it is on disk, so that a half-written one is never resumed from."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        state.save_steps = int(args.save_steps)  # transformers goes on with those of the checkpoint's run

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            for path in folder.rglob("*"):  # else a power cut may leave the mark without what it marks
                flush_to_disk(path)
            write_atomically(folder / WHOLE, f"{state.global_step}\n")


def last_whole_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was completely written; half-written ones are removed."""
    found = sorted(folder.glob("checkpoint-*"), key=step_of)
    for path in reversed(found):
        if (path / WHOLE).exists():
            return path
        shutil.rmtree(path)
    return None


def drop_metrics_after(out: Path, last: int) -> None:
    """Removes the metrics of steps after `last`, which will be trained again."""
    keep_rows(out / METRICS, lambda row: int(row["step"]) <= last)


def split_revision(location: str) -> tuple[str, str | None]:
    """A folder, or a hub id and the revision after its "@"."""
    name, at, revision = location.rpartition("@")
    return (location, None) if not at or Path(location).exists() else (name, revision)


def check_positions(location: str, tokens: int, what: str) -> None:
    """Raises UserError where rows of `tokens` tokens, named by `what`, exceed the positions of the model.

    Only its config.json is read. UserError, too, where that can't be had.
    """
    name, revision = split_revision(location)
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False).get_text_config()
    except (OSError, ValueError) as error:
        raise _not_loaded(location, error) from None
    positions = getattr(config, "max_position_embeddings", None)
    if positions and tokens > positions:
        raise UserError(f"{what} = {tokens} tokens, and {location!r} has {positions} positions; lower them")


def load_policy(
    location: str, dtype: torch.dtype | str = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a folder or a hub id, "@" and a revision behind it; UserError where they can't be had.

    Nothing of what is loaded is executed (`awpo.models.HARMLESS`).
    """
    name, revision = split_revision(location)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=dtype, **HARMLESS)
    except (OSError, ValueError) as error:
        raise _not_loaded(location, error) from None
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise UserError(f"the tokenizer of {location!r} needs a padding token of its own, apart from its end token")
    return model, tokenizer


def _not_loaded(location: str, error: Exception) -> UserError:
    reason = no_weights(Path(location)) or str(error).splitlines()[0]
    return UserError(f"cannot load the model {location!r}: {reason}; give a checkpoint's folder or a hub id")


def save_finished(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, card: dict[str, Any]
) -> None:
    """Saves safetensors, tokenizer and `method_card.json`, then loads the weights back and compares them.

    Raises RuntimeError where what was saved isn't what was trained (as ZeRO-3 without its gather, DeepSpeed#3841).
    """
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    write_atomically(folder / "method_card.json", json.dumps(card, indent=2, ensure_ascii=False, default=str) + "\n")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, **HARMLESS).state_dict()
    for name, tensor in model.state_dict().items():
        if name not in loaded or not loaded[name].equal(tensor.detach().cpu()):
            raise RuntimeError(f"{folder}: {name} was not saved as it was trained")
