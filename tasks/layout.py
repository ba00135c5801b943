"""Where things lie: the stores, the runs folder, and the folders of one piece of work under its OUT."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode, urlsplit


def runs_root() -> Path:
    """The folder of stores and of default outputs: `AWPO_RUNS`, or ./runs. Absolute; may not exist yet."""
    return Path(os.environ.get("AWPO_RUNS", "runs")).absolute()


def tracking_uri() -> str:
    """`MLFLOW_TRACKING_URI`, or the SQLite store under the runs folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{runs_root() / 'mlflow.db'}"


def artifact_root() -> str:
    """Where artifacts of a store go that is a database: `MLFLOW_DEFAULT_ARTIFACT_ROOT` (s3://..., file:///...), or a
    folder under the runs folder. A store that is a server says that itself.
    """
    return os.environ.get("MLFLOW_DEFAULT_ARTIFACT_ROOT") or (runs_root() / "mlartifacts").as_uri()


def without_password(uri: str) -> str:
    """A store's address as it may be shown, logged and written down: its password is left out."""
    parts = urlsplit(uri)
    user, at, host = parts.netloc.rpartition("@")
    query = urlencode([(key, value) for key, value in parse_qsl(parts.query) if key != "password"], quote_via=quote)
    if f"{user}{at}".count(":") == 0 and query == parts.query:
        return uri
    return parts._replace(netloc=f"{user.partition(':')[0]}{at}{host}", query=query).geturl()


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
