"""What the result of training depends on: one answer for the stage itself, and for who asks whether it is there.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from awpo.artifacts import input_identity, stage_fingerprint
from awpo.config import PolicyConfig, SftConfig, TrainingConfig
from awpo.methods import get_method


@dataclass(frozen=True)
class TrainingIdentity:
    """Inputs and settings as the stage's manifest holds them; `former`, the fingerprint by earlier versions.

    Those counted `save_every` among the settings, and held the method as the text of a Python dict.
    """

    inputs: dict[str, Any]
    settings: dict[str, Any]
    former: str


def sft_identity(model: str, instances: Path, config: SftConfig) -> TrainingIdentity:
    """Of fine-tuning `model`, a folder or hub id. Raises UserError where the instances are not there."""
    inputs = _inputs(model, instances)
    return TrainingIdentity(inputs, config.identity(), _former("sft", inputs, config))


def policy_identity(model: str, instances: Path, config: PolicyConfig) -> TrainingIdentity:
    """Of policy training from `model`, a folder or hub id. Raises UserError where the instances are not there."""
    inputs, method = _inputs(model, instances), get_method(config.method)
    former = _former("policy", {**inputs, "method": str(method.to_json())}, config)
    return TrainingIdentity({**inputs, "method": method.in_force()}, config.identity(), former)


def _inputs(model: str, instances: Path) -> dict[str, str]:
    folder = Path(model)
    return {
        "model": input_identity(folder) if folder.exists() else model,
        "instances": input_identity(instances),
    }


def _former(stage: str, inputs: dict[str, str], config: TrainingConfig) -> str:
    return stage_fingerprint(stage, inputs, config.model_dump(mode="json", exclude={"threads"}))
