"""Where things lie: the runs folder, and the folders of one piece of work under its OUT."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


def runs_root() -> Path:
    """The folder of stores and of default outputs: `AWPO_RUNS`, or ./runs. Absolute; may not exist yet."""
    return Path(os.environ.get("AWPO_RUNS", "runs")).absolute()


@dataclass(frozen=True)
class Layout:
    """The folders under OUT. Data are shared by all models and seeds; everything trained has a cell of its own."""

    out: Path

    @property
    def corpus(self) -> Path:
        return self.out / "data" / "corpus"

    @property
    def instances(self) -> Path:
        return self.out / "data" / "instances"

    @property
    def selected(self) -> Path:
        return self.out / "data" / "selected"

    @property
    def rationales(self) -> Path:
        return self.out / "data" / "rationales"

    @property
    def report(self) -> Path:
        return self.out / "report.html"

    @property
    def summary(self) -> Path:
        return self.out / "summary.json"

    def cell(self, model: str, seed: int) -> Cell:
        """The folders of one model and seed; `model` is a plain name, not a path."""
        return Cell(self.out / model / f"seed-{seed}")


@dataclass(frozen=True)
class Cell:
    """The folders of one model and one seed."""

    folder: Path

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def sft(self) -> Path:
        return self.folder / "sft"

    @property
    def before_policy(self) -> Path:
        """pass@k on the validation split, measured before policy training."""
        return self.folder / "before-policy"

    def policy(self, method: str, init: str) -> Path:
        return self.folder / (f"{method}" if init == "sft" else f"{method}-from-{init}")

    def evaluation(self, subject: str) -> Path:
        return self.folder / "evaluation" / subject


def checkpoint_of(folder: Path) -> Path:
    """The checkpoint in a training stage's folder, or the folder itself where it is a checkpoint."""
    return folder / "checkpoint" if (folder / "checkpoint" / "config.json").exists() else folder
