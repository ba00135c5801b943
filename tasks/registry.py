"""The model registry of MLflow: versions that point at checkpoints on disk, the aliases, accepted scores.

Weights are never copied: a version bears the checkpoint's folder and the hash of its files, and resolving a name
checks both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from awpo.artifacts import check_outputs
from awpo.errors import UserError
from awpo.files import file_hash
from awpo.models import preset_names
from tasks.layout import checkpoint_of
from tasks.tracking_store import Tracking

MODEL_NAME = "awpo"
CHAMPION, CANDIDATE = "champion", "candidate"
SCHEME = "models:/"
_PATH, _HASH = "awpo.checkpoint", "awpo.hash"


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may become champion, with the logged model that tells of it, where there is one."""

    checkpoint: Path
    model_id: str | None = None
    run_id: str | None = None
    instances: Path | None = None


def resolve_checkpoint(name: str, tracking: Tracking) -> Path | None:
    """The folder of a checkpoint: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, or a folder; None for a preset's name.

    Raises UserError where there is no such model, or its files are gone or were changed since.
    """
    if name.startswith(SCHEME):
        return checked_checkpoint(find_version(name, tracking))
    if name in preset_names():
        return None
    folder = checkpoint_of(Path(name))
    if not (folder / "config.json").exists():
        raise UserError(
            f"no checkpoint {name!r}; give the folder of one, models:/NAME@ALIAS, or a preset: {', '.join(preset_names())}"
        )
    return folder


def find_version(uri: str, tracking: Tracking) -> Any:
    """The model version that a `models:/` URI names; UserError where there is none."""
    rest = uri.removeprefix(SCHEME)
    client = tracking.client()
    try:
        if "@" in rest:
            name, _, alias = rest.partition("@")
            return client.get_model_version_by_alias(name, alias)
        name, _, version = rest.partition("/")
        return client.get_model_version(name, version)
    except MlflowException:
        raise UserError(f"the registry of {tracking.store} has no {uri}; the flow `promote` makes a champion") from None


def checked_checkpoint(version: Any) -> Path:
    """The folder that a version points at, its files being those that were registered."""
    folder = Path(version.tags.get(_PATH, ""))
    name = f"{SCHEME}{version.name}/{version.version}"
    if not version.tags.get(_PATH) or not folder.is_dir():
        raise UserError(f"the checkpoint of {name} is gone: {folder}; put it back or promote another")
    if file_hash(folder) != version.tags.get(_HASH):
        raise UserError(f"the files of {name} in {folder} are not those that were registered; promote them anew")
    return folder


def newest_candidate(tracking: Tracking) -> Candidate:
    """The newest checkpoint of policy training whose files are there; UserError where there is none."""
    found = tracking.client().search_logged_models(
        [tracking.experiment_id],
        order_by=[{"field_name": "creation_timestamp", "ascending": False}],
        max_results=100,
    )
    for model in found:
        if model.params.get("method") in (None, "base", "sft"):
            continue
        folder = Path(model.params.get("path", ""))
        if (folder / "config.json").exists():
            instances = model.params.get("instances")
            return Candidate(folder, model.model_id, model.source_run_id, Path(instances) if instances else None)
    raise UserError("no trained checkpoint is known to MLflow; train one first, or give a checkpoint's folder")


def candidate_of(folder: Path, tracking: Tracking) -> Candidate:
    """The candidate in a folder, with what MLflow knows of it."""
    folder = folder.absolute()
    found = tracking.client().search_logged_models(
        [tracking.experiment_id], filter_string=f"params.path = '{folder}'", max_results=1
    )
    if not found:
        return Candidate(folder)
    instances = found[0].params.get("instances")
    return Candidate(folder, found[0].model_id, found[0].source_run_id, Path(instances) if instances else None)


def register(candidate: Candidate, tracking: Tracking, *, name: str = MODEL_NAME) -> Any:
    """A new version for the candidate; returns it. The alias is not moved. Raises UserError for a damaged checkpoint."""
    client = tracking.client()
    _ensure_model(client, name)
    folder = candidate.checkpoint.absolute()
    check_outputs(folder)
    tags = {_PATH: str(folder), _HASH: file_hash(folder)}
    model_id = candidate.model_id
    if model_id is None:  # a checkpoint that no stage of ours made
        model = client.create_logged_model(
            tracking.experiment_id,
            folder.name,
            None,
            {"mlflow.model.isExternal": "true"},
            {"path": str(folder)},
            "checkpoint",
        )
        model_id = client.finalize_logged_model(model.model_id, "READY").model_id
    return client.create_model_version(
        name, f"{SCHEME}{model_id}", run_id=candidate.run_id, tags=tags, model_id=model_id
    )


def _ensure_model(client: MlflowClient, name: str) -> None:
    try:
        client.get_registered_model(name)
    except MlflowException:
        client.create_registered_model(name, description="Checkpoints of this project; `champion` is the accepted one")


def aliased_version(tracking: Tracking, alias: str, *, name: str = MODEL_NAME) -> Any | None:
    """The version that bears the alias, or None."""
    try:
        return tracking.client().get_model_version_by_alias(name, alias)
    except MlflowException:
        return None


def accepted_scores(version: Any, protocol: str) -> dict[str, float] | None:
    """The scores accepted for a version under one protocol (a hash of what is evaluated and how), or None."""
    text = version.tags.get(f"awpo.accepted.{protocol}")
    return dict(json.loads(text)) if text else None


def accept_scores(version: Any, protocol: str, scores: dict[str, float], tracking: Tracking) -> None:
    """Records the scores that later evaluations of this version are held against."""
    tracking.client().set_model_version_tag(
        version.name, version.version, f"awpo.accepted.{protocol}", json.dumps(scores)
    )
