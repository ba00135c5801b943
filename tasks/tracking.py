"""Everything that is written to MLflow's tracking store.

Runs are addressed by id with a client (MLflow's "active run" is one per thread, and stages run in several). The store
is that of `tasks.tracking_store`. Beside each stage's folder lies `.NAME.mlflow.json`: the run that tells of it, and how
much has been sent. So a stage that is skipped, resumed or tried again speaks of the same run, and what a store that was
away missed is sent the next time. (Beside and not inside: a stage empties its folder when its inputs change.)
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelOutput, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from awpo.artifacts import IN_PROGRESS, MANIFEST, code_version, input_identity, read_manifest
from awpo.files import write_atomically
from awpo.processes import is_gone, process_identity
from awpo.types import content_hash
from tasks.patience import is_away
from tasks.tracking_store import Tracking, store_lock

GROUP = "awpo.group"
"""Tag of a run with the id of the outermost run that it belongs to."""
MAX_PARAMETER = 6000  # characters; MLflow's limit
PARAMETERS_PER_BATCH = 100
METRICS_PER_BATCH = 1000
FIRST_PARAMETERS = ("model", "method", "seed", "init")


@dataclass
class RunFile:
    """`.NAME.mlflow.json`: which run tells of a folder, for which work, and what has been sent.

    The store's address says where that was, for people: a store may move (`tasks.migration`), and its runs keep their ids.
    `sent` is the last step sent per metric: after a resume the trainer writes some steps again, and they stand already.
    """

    uri: str
    run_id: str
    work: str
    complete: bool = False
    offset: int = 0
    inode: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    skipped: int = 0

    @staticmethod
    def path_for(folder: Path) -> Path:
        return folder.parent / f".{folder.name}.mlflow.json"

    @staticmethod
    def read(folder: Path) -> RunFile | None:
        """None where there is none, or none that can be understood: then a new run is begun."""
        try:
            file = RunFile(**json.loads(RunFile.path_for(folder).read_text("utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        texts = all(isinstance(part, str) for part in (file.uri, file.run_id, file.work))
        steps = isinstance(file.sent, dict) and all(isinstance(step, int) for step in file.sent.values())
        return file if texts and steps else None

    def write(self, folder: Path) -> None:
        write_atomically(self.path_for(folder), json.dumps(asdict(self), indent=2) + "\n")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def shorten(value: Any) -> str:
    """A parameter's text within MLflow's limit; a longer one ends with its hash. config.json has it whole."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= MAX_PARAMETER:
        return text
    return f"{text[: MAX_PARAMETER - 80]}... (cut; {len(text)} characters, hash {content_hash(text)})"


def metric_name(name: str) -> str:
    """A name that MLflow takes: letters, digits, and . _ - space / :"""
    return re.sub(r"[^\w.\- /:]", "_", name)[:250]


class TrackedRun:
    """One run of the store. Every method may be called again: what stands already is left alone."""

    def __init__(self, tracking: Tracking, folder: Path, file: RunFile) -> None:
        self.tracking, self.folder, self.file = tracking, folder, file
        self.client, self.run_id = tracking.client(), file.run_id

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Logs the parameters that are new; MLflow refuses to change one."""
        with store_lock:
            known = self.client.get_run(self.run_id).data.params
            ordered = sorted(values, key=lambda k: FIRST_PARAMETERS.index(k) if k in FIRST_PARAMETERS else 99)
            new = [Param(key[:250], shorten(values[key])) for key in ordered if key not in known]
            for start in range(0, len(new), PARAMETERS_PER_BATCH):
                self.client.log_batch(self.run_id, params=new[start : start + PARAMETERS_PER_BATCH])

    def config(self, values: Mapping[str, Any], prefix: str = "") -> None:
        """The whole config as the artifact config.json, and flattened as parameters."""
        with store_lock:
            self.client.log_dict(self.run_id, json.loads(json.dumps(values, default=str)), "config.json")
        self.parameters(flatten(values, prefix))

    def metrics(self, values: Mapping[str, Any], step: int = 0, at: float | None = None) -> None:
        """Logs the finite numbers among `values`; others are counted in the tag awpo.metrics_skipped."""
        stamp = int((at or time.time()) * 1000)
        self.send([(metric_name(name), value, stamp, step) for name, value in values.items()])

    def send(self, rows: list[tuple[str, Any, int, int]]) -> None:
        """Sends (name, value, milliseconds, step) rows in batches; the values that are not finite are skipped."""
        good = [
            Metric(name, float(value), stamp, step)
            for name, value, stamp, step in rows
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        ]
        with store_lock:
            for start in range(0, len(good), METRICS_PER_BATCH):
                self.client.log_batch(self.run_id, metrics=good[start : start + METRICS_PER_BATCH])
            if len(good) < len(rows):
                self.file.skipped += len(rows) - len(good)
                self.client.set_tag(self.run_id, "awpo.metrics_skipped", str(self.file.skipped))

    def tags(self, values: Mapping[str, Any]) -> None:
        with store_lock:
            self.client.log_batch(self.run_id, tags=[RunTag(key, str(value)[:5000]) for key, value in values.items()])

    def inputs(self, inputs: Mapping[str, Path]) -> None:
        """The data that went in, as dataset inputs with their content hash as digest."""
        datasets = []
        for name, path in inputs.items():
            if not path.exists():
                continue
            manifest = read_manifest(path) if path.is_dir() else None
            profile = json.dumps(manifest.counts, default=str)[:16000] if manifest else None
            source = json.dumps({"uri": path.absolute().as_uri()})
            dataset = Dataset(name, input_identity(path)[:36], source_type="local", source=source, profile=profile)
            datasets.append(DatasetInput(dataset, [InputTag("mlflow.data.context", name)]))
        if datasets:
            with store_lock:
                self.client.log_inputs(self.run_id, datasets=datasets)

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """A copy of a small file, in `folder` of the run's artifacts where one is named."""
        with store_lock:
            self.client.log_artifact(self.run_id, str(path), folder)

    def table(self, data: Any, name: str) -> None:
        """A data frame as a table that MLflow's UI shows and compares. Logged once: MLflow would append."""
        with store_lock:
            if name not in {item.path for item in self.client.list_artifacts(self.run_id)}:
                self.client.log_table(self.run_id, data, name)

    def checkpoint(self, name: str, checkpoint: Path, parameters: Mapping[str, Any], step: int = 0) -> str:
        """A logged model that points at a checkpoint's folder; its weights stay where they are. Returns its id."""
        path = str(checkpoint.absolute())
        with store_lock:
            # The name says which flavour of model: MLflow's own sign of a model whose files it does not keep.
            tags = {"mlflow.model.isExternal": "true", "awpo.checkpoint": path}
            text = {key: shorten(value) for key, value in {**parameters, "path": path}.items()}
            model = self.client.create_logged_model(
                self.tracking.experiment_id, re.sub(r"[^\w-]", "-", name), self.run_id, tags, text, "checkpoint"
            )
            self.client.finalize_logged_model(model.model_id, "READY")
            self.client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step)])
        return str(model.model_id)

    def checkpoint_metrics(self, values: Mapping[str, float]) -> None:
        """Logs numbers of the run's newest checkpoint: on the run, and on its logged model, which is ranked by them."""
        stamp = int(time.time() * 1000)
        with store_lock:
            outputs = self.client.get_run(self.run_id).outputs
            models = outputs.model_outputs if outputs else []
            newest = max(models, key=lambda model: model.step).model_id if models else None
            rows = [Metric(metric_name(name), value, stamp, 0, model_id=newest) for name, value in values.items()]
            self.client.log_batch(self.run_id, metrics=rows)

    def save(self) -> None:
        """Writes down what has been sent."""
        self.file.write(self.folder)

    def end(self, status: str) -> None:
        """FINISHED, FAILED or KILLED: how it ended."""
        self.file.complete = status == "FINISHED"
        self.save()
        with store_lock:
            _terminate(self.client, self.client.get_run(self.run_id), status)


def _terminate(client: MlflowClient, run: Run, status: str) -> None:
    """Ends a run now, and not before it began, should the system's clock have been set back meanwhile."""
    client.set_terminated(run.info.run_id, status, max(int(time.time() * 1000), run.info.start_time))


def close_abandoned_runs(tracking: Tracking) -> list[str]:
    """Marks runs KILLED that say RUNNING although their process of this host is gone, killed without a word."""
    closed: list[str] = []
    with store_lock:
        client = tracking.client()
        for run in client.search_runs([tracking.experiment_id], "attributes.status = 'RUNNING'", max_results=500):
            if is_gone(run.data.tags.get("awpo.process", "")):
                _terminate(client, run, "KILLED")
                closed.append(run.info.run_id)
    return closed


def open_run(
    tracking: Tracking, name: str, folder: Path, work: str, tags: Mapping[str, str], *, begun: bool | None = None
) -> TrackedRun:
    """The run that tells of `folder`: the one that was begun for the same work, where it still stands, else a new one.

    `begun` says whether the folder holds this work, finished or not; by default, whether a stage has opened it.
    A run that is taken up again moves under the present parent, so that the newest parent shows all that OUT holds.
    """
    file = RunFile.read(folder)
    if begun is None:
        begun = (folder / MANIFEST).exists() or (folder / IN_PROGRESS).exists()
    with store_lock:
        client = tracking.client()
        if file and begun and file.work == work and stands(client, file.run_id):
            if not file.complete:
                client.update_run(file.run_id, status="RUNNING")
        else:
            run = client.create_run(tracking.experiment_id, run_name=name)
            file = RunFile(tracking.store, run.info.run_id, work)
            file.write(folder)
        run_tags = {**_code_tags(), **tags, "awpo.process": process_identity(), "awpo.folder": str(folder.absolute())}
        if tracking.parent_run_id:
            run_tags["mlflow.parentRunId"] = tracking.parent_run_id
        if tracking.group:
            run_tags[GROUP] = tracking.group
        client.log_batch(file.run_id, tags=[RunTag(key, value[:5000]) for key, value in run_tags.items()])
    return TrackedRun(tracking, folder, file)


def stands(client: MlflowClient, run_id: str) -> bool:
    """Whether the store has that run, and nobody deleted it. Raises MlflowException where the store is away."""
    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if is_away(error):
            raise
        return False


def _code_tags() -> dict[str, str]:
    version = code_version()
    commit = version.partition("+")[2].removesuffix(".dirty")
    return {
        "awpo.version": version,
        "mlflow.user": os.environ.get("USER", "unknown"),
        **({"mlflow.source.git.commit": commit} if commit else {}),
    }


@contextmanager
def ended_truly(run: TrackedRun) -> Iterator[TrackedRun]:
    """Ends the run by how the block ends: FINISHED; FAILED on an error; KILLED where it was stopped from outside."""
    try:
        yield run
    except InterruptedError:
        _end_quietly(run, "KILLED")
        raise
    except Exception as error:
        _end_quietly(run, "FAILED", f"{type(error).__name__}: {error}")
        raise
    except BaseException:  # KeyboardInterrupt, Prefect's TerminationSignal
        _end_quietly(run, "KILLED")
        raise
    run.end("FINISHED")


def _end_quietly(run: TrackedRun, status: str, reason: str = "") -> None:
    # The error on its way out says more than a store that cannot be reached.
    try:
        if reason:
            run.tags({"awpo.error": reason})
        run.end(status)
    except (MlflowException, OSError):
        pass
