"""What every stage's task does around the stage's plain function: a run in MLflow, progress, an artifact in Prefect."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from httpx import HTTPError
from mlflow.exceptions import MlflowException
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.schemas import State
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger
from prefect.runtime import flow_run, task_run
from prefect.settings import get_current_settings
from prefect.utilities.urls import url_for

from awpo.artifacts import MANIFEST, Manifest, finished_result, input_identity, read_manifest, stage_fingerprint
from awpo.errors import UserError
from awpo.full_disk import full_disk
from awpo.launch import LaunchSettings
from awpo.processes import run_worker
from awpo.settings import Settings
from tasks.cancellation import cancelled, check_cancelled
from tasks.devices import check_machine, own_devices
from tasks.log_stream import LogStream
from tasks.progress import Line, open_line
from tasks.relay import MetricsRelay
from tasks.slots import GPU, slots
from tasks.system_metrics import system_metrics
from tasks.tracking import TrackedRun, ended_truly, open_run
from tasks.tracking_store import Tracking

ARTIFACT_SECONDS = 5.0
LOG_BYTES = 1_000_000  # of the end of each process's log that are kept with its run
# One row per kind of count in an artifact's table; the rest is in the manifest.
SHOWN_VALUE = 200


@dataclass(frozen=True)
class Work:
    """One piece of work: what it is, where its result goes, what it is made from.

    `labels` (model, method, seed, init) are the parameters that runs are compared by; `config` are the settings. A
    stage that says itself what its result depends on (inputs, config) gives that as `identity`, which then counts
    alone; `former` is the fingerprint that earlier versions gave to the same work, where it was another.
    """

    stage: str
    title: str
    folder: Path
    inputs: Mapping[str, Path]
    config: Settings | None = None
    labels: Mapping[str, Any] = field(default_factory=dict)
    identity: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
    former: str = ""

    def fingerprint(self) -> str:
        """The fingerprint that the stage itself writes into its manifest for this work."""
        if self.identity is not None:
            return stage_fingerprint(self.stage, *self.identity)
        inputs = {name: input_identity(path) if path.exists() else str(path) for name, path in self.inputs.items()}
        config = self.config.identity() if self.config else {}
        return stage_fingerprint(self.stage, inputs, config)

    def settings(self) -> dict[str, Any]:
        """The labels, and the config under the stage's name; the method is a label and stands there alone."""
        config = self.config.model_dump(mode="json") if self.config else {}
        if config.get("method") == self.labels.get("method"):
            config.pop("method", None)
        return {**self.labels, "stage": self.stage, **({self.stage: config} if config else {})}


class StageRun:
    """A stage in progress; hand `progress` to the stage's function, or run its worker with `work_apart`."""

    def __init__(self, work: Work, fingerprint: str, run: TrackedRun, line: Line) -> None:
        self.work, self.fingerprint, self.run, self.line = work, fingerprint, run, line
        self.already_told = run.file.complete
        self._before = _stamp(work.folder)
        self._artifact: Any = None
        self._artifact_at = 0.0

    @property
    def skipped(self) -> bool:
        """Whether the folder held the result already, so that nothing was done."""
        return self._before is not None and self._before == _stamp(self.work.folder)

    def progress(self, done: int, total: int, what: str = "") -> None:
        """Tells the reporter and Prefect how far the stage is. Raises InterruptedError where the flow was stopped."""
        check_cancelled()
        self.line.update(done, total, what)
        now = time.monotonic()
        if total and now - self._artifact_at >= ARTIFACT_SECONDS and TaskRunContext.get():
            self._artifact_at = now
            percent = min(100.0, 100.0 * done / total)
            with suppress(HTTPError):  # a server that is away must not end the work that it would show
                if self._artifact is None:
                    self._artifact = create_progress_artifact(percent, description=f"{self.work.title}: {what}")
                else:
                    update_progress_artifact(
                        self._artifact, percent, description=f"{self.work.title}: {done}/{total} {what}"
                    )

    def warn(self, message: str) -> None:
        """A warning of the stage: on the reporter's line and in Prefect's log."""
        self.line.note(message)
        if TaskRunContext.get():
            get_run_logger().warning(message)

    def on_event(self, row: dict[str, Any]) -> None:
        """Relays one event of a worker."""
        kind = row.get("event")
        if kind == "progress":
            self.progress(int(row.get("done", 0)), int(row.get("total", 0)), str(row.get("what", "")))
        elif kind == "warning":
            self.warn(str(row.get("message", "")))
        elif kind == "memory":
            which = f"memory/rank-{row.get('rank', 0)}"
            names = {"bytes": f"{which}/peak_gib", "gpu_bytes": f"{which}/gpu_peak_gib"}
            self.results({name: row[key] / 2**30 for key, name in names.items() if key in row})
        elif kind == "note":
            self.line.note(str(row.get("message", "")))
            log(f"{self.work.title}: {row.get('message', '')}")

    @contextmanager
    def slots(self, needs: Mapping[str, int]) -> Iterator[None]:
        """Holds so many slots of each limit (`tasks.slots`) while the block runs; none for a finished result."""
        finished = finished_result(self.work.folder, self.fingerprint, self.work.former)
        with slots({} if finished else needs, self.line.note):
            yield

    def work_apart(
        self,
        module: str,
        job: dict[str, Any],
        threads: int,
        needs: Sequence[str] = (GPU,),
        launch: LaunchSettings | None = None,
    ) -> None:
        """Runs a worker module on `job` in processes of its own (`launch`; by default one), relaying its events,
        metrics and, into the run's log, what its first process prints. Their logs are kept as artifacts.

        `threads` are those of a worker of one process; several share out what this process may use. It holds a slot of
        each limit in `needs` (`tasks.slots`). A finished result is left alone without starting a process, which takes
        seconds to import what it needs. Raises what `awpo.processes.run_worker` raises.
        """
        if finished_result(self.work.folder, self.fingerprint, self.work.former):
            with MetricsRelay(self.run, self.work.folder):  # what the store missed the last time
                return
        launch = launch or LaunchSettings()
        check_machine(launch)
        counts = {name: launch.processes if name == GPU else 1 for name in needs}
        with (
            self.slots(counts),
            own_devices(counts.get(GPU, 0) if launch.device == "auto" else 0) as devices,
            MetricsRelay(self.run, self.work.folder) as relay,
            self._logs_kept() as stream,
            system_metrics(self.run),
        ):
            run_worker(
                module,
                job,
                self.work.folder,
                on_event=self.on_event,
                on_output=stream.take,
                threads=launch.threads_of_each(available_threads(), threads),
                launch=launch,
                environment=devices,
                cancelled=cancelled,
            )
        if relay.problem:
            self.warn(f"MLflow did not take all metrics ({relay.problem}); they are sent by the next run of this stage")

    @contextmanager
    def _logs_kept(self) -> Iterator[LogStream]:
        stream = LogStream(log)
        try:
            yield stream
        finally:
            stream.close()
            keep_logs(self.run, self.work.folder)

    def manifest(self) -> Manifest:
        """What the stage left. Raises RuntimeError where it left no manifest: then it did not finish."""
        manifest = read_manifest(self.work.folder)
        if manifest is None:
            raise RuntimeError(f"{self.work.title} left no {MANIFEST} in {self.work.folder}")
        return manifest

    def results(self, metrics: Mapping[str, Any]) -> None:
        """Numbers that sum the stage up; logged once."""
        if not self.already_told:
            self.run.metrics(metrics)


@contextmanager
def stage_run(work: Work, tracking: Tracking) -> Iterator[StageRun]:
    """Opens the stage's run in MLflow and its line of progress, and ends both by how the block ends."""
    line = open_line(work.title)
    attempt = task_run.run_count or 1
    try:
        check_cancelled()
        if attempt > 1:
            line.note(f"attempt {attempt}, with what the one before left")
            log(f"{work.title}: attempt {attempt}, with what the one before left in {work.folder}")
        fingerprint = work.fingerprint()
        run = open_run(tracking, work.title, work.folder, fingerprint, {**prefect_tags(), "awpo.stage": work.stage})
        with ended_truly(run):
            stage = StageRun(work, fingerprint, run, line)
            if not stage.already_told:
                run.parameters(work.labels)
                run.config(work.settings())
                run.inputs(work.inputs)
            yield stage
            manifest = stage.manifest()
            stage.results({"seconds": manifest.seconds, "attempts": manifest.attempts})
            show_manifest(work.title, manifest)
    except BaseException as error:
        if isinstance(error, MlflowException) and (
            full := full_disk(error, Path(tracking.store.removeprefix("sqlite:///")))
        ):
            line.end("failed")
            raise full from error
        if isinstance(error, Exception) and not isinstance(error, UserError | InterruptedError):
            line.note(f"attempt {attempt} failed: {reason_of(error)}")
            log(f"{work.title}: attempt {attempt} failed: {reason_of(error)}", logging.WARNING)
        line.end("stopped" if isinstance(error, InterruptedError) or not isinstance(error, Exception) else "failed")
        raise
    line.end("nothing to do" if stage.skipped else "done")


def keep_logs(run: TrackedRun, folder: Path) -> None:
    """The end of each process's log as an artifact, under the same name; a store that is away is not waited for."""
    for path in sorted(folder.glob("log*.txt")):
        with tempfile.TemporaryDirectory() as scratch, open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            copy = Path(scratch) / path.name
            copy.write_bytes(file.read())
            try:
                run.artifact(copy, "logs")
            except (MlflowException, OSError) as error:
                log(f"{path} was not kept in MLflow: {reason_of(error)}", logging.WARNING)
                return


def _stamp(folder: Path) -> int | None:
    try:
        return (folder / MANIFEST).stat().st_mtime_ns
    except OSError:
        return None


def available_threads() -> int:
    """How many threads a worker may have: OMP_NUM_THREADS where it is set, else the cores that this process may use."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    if told.isdigit() and int(told) > 0:
        return int(told)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prefect_tags() -> dict[str, str]:
    """The Prefect flow run that this work belongs to, and its page where a lasting server has one."""
    if not flow_run.id:
        return {}
    tags = {"prefect.flow_run_id": str(flow_run.id), "prefect.flow_run_name": str(flow_run.name or "")}
    # A temporary server's address is dead as soon as the command ends.
    if (
        "AWPO_TEMPORARY_SERVER" not in os.environ
        and get_current_settings().api.url
        and (page := url_for("flow-run", obj_id=flow_run.id))
    ):
        tags["prefect.flow_run_url"] = page
    return tags


def worth_trying_again(_task: Any, _run: Any, state: State[Any]) -> bool:
    """Retries are for accidents: not for what a person must mend, nor for what was stopped."""
    try:
        state.result()
    except UserError as error:
        return error.passes
    except InterruptedError:
        return False
    except Exception:  # noqa: BLE001 - whatever else went wrong may be an accident
        return True
    return False


def artifact_key(title: str) -> str:
    """A key that Prefect takes, from a title: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def reason_of(error: BaseException) -> str:
    """Why a stage failed, in a line: of a worker that ended badly, where its log is and the last line in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1]}"


def log(message: str, level: int = logging.INFO) -> None:
    """One line in the log of the flow or task run, where there is one."""
    if TaskRunContext.get() or FlowRunContext.get():
        get_run_logger().log(level, message)


def _inside_run(create: Callable[[], Any]) -> None:
    if TaskRunContext.get() or FlowRunContext.get():  # artifacts outside a run are deprecated
        create()


def show_table(title: str, rows: list[dict[str, Any]], description: str = "") -> None:
    """A table artifact of the task run."""
    _inside_run(lambda: create_table_artifact(rows, key=artifact_key(title), description=description or title))


def show_markdown(title: str, text: str) -> None:
    """A markdown artifact of the task run."""
    _inside_run(lambda: create_markdown_artifact(text, key=artifact_key(title), description=title))


def show_manifest(title: str, manifest: Manifest) -> None:
    """A stage's counts as a table artifact."""
    rows = [{"what": key, "value": str(value)[:SHOWN_VALUE]} for key, value in manifest.counts.items()]
    rows += [{"what": name, "value": str(getattr(manifest, name))} for name in ("seconds", "attempts", "code")]
    show_table(title, rows, f"{title}: counts of {manifest.stage}")
