"""What the result of training depends on: one answer for the stage itself, and for who asks whether it is there.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from awpo.artifacts import IN_PROGRESS, input_identity, stage_fingerprint
from awpo.config_training import PolicyConfig, SftConfig, TrainingConfig
from awpo.errors import UserError
from awpo.methods import get_method
from awpo.unfinished import Mark

# In a training's folder: the checkpoints that it resumes from, and in each the mark that it is wholly on disk.
RESUME, WHOLE = ".resume", "whole"
LAUNCH = ("processes", "accelerate")
GROWING = ("steps",)
"""Settings of policy training of which more is the same work gone on with: the learning rate doesn't depend on them."""


@dataclass(frozen=True)
class TrainingIdentity:
    """Inputs and settings as the stage's manifest holds them; `former`, the fingerprint by earlier versions.

    Those counted `save_every` among the settings, and held the method as the text of a Python dict.
    """

    inputs: dict[str, Any]
    settings: dict[str, Any]
    former: str


def sft_identity(
    model: str, instances: Path, config: SftConfig, launch: Mapping[str, Any] | None = None
) -> TrainingIdentity:
    """Of fine-tuning `model`, a folder or hub id; `launch` is `LaunchSettings.effect`, none of one process.

    Raises UserError where the instances are not there.
    """
    inputs = _inputs(model, instances)
    former = "" if launch else _former("sft", inputs, config)
    return TrainingIdentity(inputs, {**config.identity(), **(launch or {})}, former)


def policy_identity(
    model: str, instances: Path, config: PolicyConfig, launch: Mapping[str, Any] | None = None
) -> TrainingIdentity:
    """Of policy training from `model`, a folder or hub id; `launch` as for `sft_identity`.

    Raises UserError where the instances are not there.
    """
    inputs, method = _inputs(model, instances), get_method(config.method)
    former = "" if launch else _former("policy", {**inputs, "method": str(method.to_json())}, config)
    settings = {**config.identity(), **(launch or {})}
    return TrainingIdentity({**inputs, "method": method.in_force()}, settings, former)


def refuse_other_launch(out: Path, work: TrainingIdentity, growing: Sequence[str] = ()) -> None:
    """Raises UserError where `out` holds a checkpoint of the same work by other processes, which would be removed.

    A checkpoint is taken up by as many processes as wrote it: each has its own rollouts and random numbers in it.
    `growing` are the keys of the config of which another value is the same work gone on with.
    """
    mark = Mark.read(out / IN_PROGRESS)
    if mark is None or not any((out / RESUME).glob(f"checkpoint-*/{WHOLE}")):
        return
    before, now = ({key: one.get(key) for key in LAUNCH} for one in (mark.config, work.settings))
    rest = [
        {key: value for key, value in one.items() if key not in (*LAUNCH, *growing)}
        for one in (mark.config, work.settings)
    ]
    if before != now and mark.inputs == work.inputs and rest[0] == rest[1]:
        raise UserError(
            f"{out} holds an unfinished training by {_processes(before)}, which {_processes(now)} cannot go on with; "
            f"launch it as before, train into another folder, or delete {out / RESUME} to start anew"
        )


def _processes(launch: Mapping[str, Any]) -> str:
    count, config = launch["processes"] or 1, launch["accelerate"]
    text = f"{count} process{'es' if count > 1 else ''}"
    return f"{text} of {config.get('distributed_type', 'accelerate')}" if config else text


def _inputs(model: str, instances: Path) -> dict[str, str]:
    folder = Path(model)
    return {
        "model": input_identity(folder) if folder.exists() else model,
        "instances": input_identity(instances),
    }


def _former(stage: str, inputs: dict[str, str], config: TrainingConfig) -> str:
    return stage_fingerprint(
        stage, inputs, config.model_dump(mode="json", exclude={"threads"} | config.added_as_before())
    )
