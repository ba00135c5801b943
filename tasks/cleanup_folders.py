"""Looks at the runs folder and at MLflow for what nobody refers to, and removes it (`awpo gc`)."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from mlflow.exceptions import MlflowException

from awpo.artifacts import IN_PROGRESS, MANIFEST, read_manifest
from awpo.endpoint_cache import NAME as ANSWERS
from awpo.endpoint_cache import WAIT_SECONDS
from awpo.errors import UserError
from awpo.files import file_hash
from awpo.folder_lock import alone_in
from awpo.training.identity import RESUME
from awpo.types import content_hash
from awpo.unfinished import Mark
from tasks.cleanup import Decision, Item, References, RunState
from tasks.layout import checkpoint_of
from tasks.patience import is_away
from tasks.tracking import RunFile
from tasks.tracking_store import Tracking

DAY = 86400.0
# As write_atomically and others name what they write before it is whole: the process that writes stands in the name.
_TEMPORARY = re.compile(r"\..+\.(\d+)\.tmp(\..+)?")
_STORES = ("prefect", "mlartifacts", "logs")
"""Folders of the runs folder that are Prefect's, MLflow's and the servers': they have clean-ups of their own."""


def find(root: Path, older_than_days: float) -> list[Item]:
    """What might go in `root`; links are not followed. Answers count where they are older than that many days."""
    items: list[Item] = []
    for place, folders, files in os.walk(root):
        folder = Path(place)
        if folder == root:
            folders[:] = [name for name in folders if name not in _STORES]
        items += _left_over(folder, [*folders, *files])
        folders[:] = [name for name in folders if not (_TEMPORARY.fullmatch(name) or name == RESUME)]
        if MANIFEST in files or IN_PROGRESS in files:
            items += _result(folder)
        if ANSWERS in files:
            items += _answers(folder / ANSWERS, older_than_days)
    return items


def _result(folder: Path) -> Iterator[Item]:
    """A stage's folder, and the checkpoints that it would have resumed from, where it has ended."""
    try:
        manifest = read_manifest(folder)
    except UserError:  # not ours, or of a newer version: nothing of it is touched
        return
    mark = Mark.read(folder / IN_PROGRESS)
    work = manifest or mark
    if work is None:
        return
    file, busy = RunFile.read(folder), _busy(folder)
    run_id = file.run_id if file else None
    yield Item("result", folder, _size(folder), run_id=run_id, inputs=frozenset(_texts(work.inputs)), busy=busy)
    if manifest and mark is None and (folder / RESUME).is_dir():
        yield Item("checkpoints", folder / RESUME, _size(folder / RESUME), "the training is finished", busy=busy)


def _left_over(folder: Path, names: Iterable[str]) -> Iterator[Item]:
    """What processes that are gone did not write to its end. On a shared disk theirs may be another machine: a day old."""
    for name in names:
        match, path = _TEMPORARY.fullmatch(name), folder / name
        if match and not _lives(int(match[1])) and time.time() - path.lstat().st_mtime > DAY:
            yield Item("temporary", path, _size(path), "half written by a process that is gone", busy=_busy(folder))


def _answers(path: Path, days: float) -> Iterator[Item]:
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=WAIT_SECONDS)) as connection:
            count, size = connection.execute(
                "SELECT count(*), coalesce(sum(length(text) + length(key) + length(model)), 0) FROM answers WHERE created < ?",
                (time.time() - days * DAY,),
            ).fetchone()
    except sqlite3.Error:  # of another kind, or damaged: its owner will be told when it is used
        return
    if count:
        yield Item("answers", path, int(size), f"{count} answers of endpoints are older than {days:g} days")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value


def _size(path: Path) -> int:
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum((Path(place) / name).lstat().st_size for place, _, files in os.walk(path) for name in files)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _busy(folder: Path) -> bool:
    try:
        with alone_in(folder):
            return False
    except UserError:
        return True


def identified(items: Iterable[Item], known: References) -> list[Item]:
    """The items with their identities, where these matter: to hash a checkpoint takes its time."""
    return [
        replace(item, identities=_identities(item.path))
        if item.kind == "result" and known.runs.get(item.run_id or "") == "deleted"
        else item
        for item in items
    ]


def _identities(folder: Path) -> frozenset[str]:
    """As what `input_identity` would name the folder, or the checkpoint in it, in a manifest."""
    manifest, checkpoint = read_manifest(folder), checkpoint_of(folder)
    found = {content_hash(manifest.outputs)} if manifest else set()
    if checkpoint != folder or (folder / "config.json").exists():
        found.add(file_hash(checkpoint))
    return frozenset(found)


def references(tracking: Tracking, items: Iterable[Item]) -> References:
    """What the store knows. Raises MlflowException where it is away."""
    client = tracking.client()
    folders: dict[Path, str] = {}
    inputs: set[str] = set()
    for version in _pages(client.search_model_versions):
        name = f"models:/{version.name}/{version.version}"
        told = [version.tags.get("awpo.checkpoint", "")]
        if version.model_id:
            with suppress(MlflowException):
                parameters = client.get_logged_model(version.model_id).params
                told += [parameters.get("path", ""), parameters.get("instances", "")]
        folders |= {Path(path): name for path in told if path}
    for run in _runs(client):
        who = f"run {run.info.run_name or run.info.run_id}"
        if folder := run.data.tags.get("awpo.folder"):
            folders.setdefault(Path(folder), who)
            inputs |= _inputs_of(Path(folder))
        for path in _read_by(run):
            folders.setdefault(path, who)
    wanted = {item.run_id for item in items if item.run_id}
    return References(folders, {run_id: _state(client, run_id) for run_id in wanted}, frozenset(inputs))


def _runs(client: MlflowClient) -> Iterator[Run]:
    experiments = [one.experiment_id for one in _pages(client.search_experiments)]
    yield from _pages(lambda **page: client.search_runs(experiments, run_view_type=ViewType.ACTIVE_ONLY, **page))


def _pages(search: Any) -> Iterator[Any]:
    token = None
    while True:
        page = search(max_results=1000, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _read_by(run: Run) -> Iterator[Path]:
    """The folders and files that a run was given as data."""
    for one in run.inputs.dataset_inputs if run.inputs else []:
        with suppress(ValueError, TypeError, KeyError):
            address = urlsplit(json.loads(one.dataset.source)["uri"])
            if address.scheme == "file":
                yield Path(unquote(address.path))


def _inputs_of(folder: Path) -> set[str]:
    try:
        work = read_manifest(folder) or Mark.read(folder / IN_PROGRESS)
    except (UserError, OSError):
        return set()
    return set(_texts(work.inputs)) if work else set()


def _state(client: MlflowClient, run_id: str) -> RunState:
    try:
        return "active" if client.get_run(run_id).info.lifecycle_stage == "active" else "deleted"
    except MlflowException as error:
        if is_away(error):
            raise
        return "unknown"


def remove(decision: Decision, older_than_days: float) -> None:
    """Removes what was decided to go. Raises UserError where a process began to work there meanwhile, or it cannot be."""
    item = decision.item
    try:
        if item.kind == "answers":
            _forget(item.path, older_than_days)
        elif item.kind == "result":
            _remove_result(item)
        else:
            with alone_in(item.path.parent):
                _delete(item.path)
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"{item.path} was not removed: {getattr(error, 'strerror', None) or error}") from None


def _remove_result(item: Item) -> None:
    with alone_in(item.path):
        file = RunFile.read(item.path)
        if (file.run_id if file else None) != item.run_id:
            raise UserError(f"{item.path} was made anew meanwhile; it stays")
        # Renamed first: a half-removed folder is never read as a result, and `awpo gc` knows its name.
        gone = item.path.with_name(f".{item.path.name}.{os.getpid()}.tmp")
        item.path.rename(gone)
        RunFile.path_for(item.path).unlink(missing_ok=True)
        _delete(gone)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _forget(path: Path, days: float) -> None:
    with closing(sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None)) as connection:
        connection.execute("DELETE FROM answers WHERE created < ?", (time.time() - days * DAY,))
        connection.execute("VACUUM")
