"""Names of models: what a person may write where a model is asked for."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from awpo.errors import UserError
from awpo.settings import read_yaml

PRESETS = Path(__file__).resolve().parents[1] / "infra" / "presets" / "models"
HARMLESS: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False}
"""With these, transformers executes nothing of what it loads: weights from safetensors alone (other files of weights
are pickles), and no code that lies beside them (asked about it, it would ask the terminal)."""


@dataclass(frozen=True)
class ModelChoice:
    """A model by name: `embedded` and `smollm2` ones are built on this machine, `hub` ones are loaded by id and
    revision, a `folder` is a checkpoint in the Hugging Face layout. `launch` is the launch preset that its preset asks
    for, where it does."""

    name: str
    kind: Literal["embedded", "smollm2", "hub", "folder"]
    location: str
    revision: str | None = None
    thinking: bool = True
    settings: dict[str, Any] | None = None
    launch: str | None = None

    @property
    def address(self) -> str:
        """What the loaders take: a folder, or a hub id with its revision behind an "@"."""
        return f"{self.location}@{self.revision}" if self.revision else self.location


def no_weights(folder: Path) -> str:
    """Why a folder has no weights that are loaded, where it has others; else empty."""
    pickles = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
    if not pickles or any(folder.glob("*.safetensors")):
        return ""
    return f"its weights ({pickles[0]}) are a pickle, which could run anything; convert them to safetensors first"


def preset_names() -> list[str]:
    """The model presets of infra/presets/models, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def resolve_model(name: str) -> ModelChoice:
    """A preset's name or the folder of a checkpoint; UserError names the nearest preset otherwise."""
    preset = PRESETS / f"{name}.yaml"
    if name in preset_names():
        values = read_yaml(preset)
        return ModelChoice(
            name=name,
            kind=values["kind"],
            location=values.get("hub_id", name),
            revision=values.get("revision"),
            thinking=values.get("thinking", True),
            settings={key: values[key] for key in ("sft", "policy", "evaluation") if key in values},
            launch=values.get("launch"),
        )
    folder = Path(name)
    if os.path.exists(folder / "config.json"):  # unlike Path.exists, also where a name is too long to be one
        return ModelChoice(name=folder.resolve().name, kind="folder", location=str(folder))
    if os.path.isdir(folder):
        raise UserError(f"{folder} holds no config.json; give the folder of a checkpoint in the Hugging Face layout")
    near = difflib.get_close_matches(name, preset_names(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(preset_names())}, or a checkpoint's folder"
    raise UserError(f"unknown model {name!r}; {hint}")
