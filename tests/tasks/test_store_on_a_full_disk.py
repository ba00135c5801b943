"""MLflow's SQLite store on a disk that is full: what it could not take is kept, and sent once there is room."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from awpo.artifacts import read_manifest
from awpo.errors import UserError
from awpo.events import RunLog
from tasks import tracking_store
from tasks.patience import patient
from tasks.relay import MetricsRelay
from tasks.stage_run import stage_run
from tasks.tracking import TrackedRun, open_run
from tasks.tracking_store import Tracking, connect
from tests.small_disk import MIB, SmallDisk, small_disk
from tests.tasks.test_stage_run import work_in, worker  # noqa: F401 - a fixture
from tests.tasks.test_store_faults import wait_for

STEPS = 400


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 32 * MIB) as found:
        yield found


@pytest.fixture
def on_disk(disk: SmallDisk, empty_store: Path, tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> Tracking:
    """The store on the small disk; calls wait for a second where they would for two minutes."""
    del tracking
    shutil.copy(empty_store, disk.folder / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{disk.folder / 'mlflow.db'}")
    monkeypatch.setattr(tracking_store, "patient", lambda client, *_: patient(client, seconds=1.0, ask=0.2))
    return connect()


def steps_of(run: TrackedRun, name: str = "loss") -> list[int]:
    return [metric.step for metric in run.client.get_metric_history(run.run_id, name)]


def test_metrics_that_do_not_fit_are_sent_once_there_is_room(
    on_disk: Tracking, disk: SmallDisk, tmp_path: Path
) -> None:
    stage = tmp_path / "stage"
    stage.mkdir()
    run = open_run(on_disk, "stage", stage, "w", {}, begun=True)
    log = RunLog(stage)
    values = {f"metric/{number}": 1.0 for number in range(40)}
    with MetricsRelay(run, stage, every=0.1) as relay:
        log.metrics(1, {"loss": 1.0, **values})
        wait_for(lambda: steps_of(run) == [1])
        disk.fill()
        for step in range(2, STEPS + 1):
            log.metrics(step, {"loss": 1.0, **values})
        wait_for(lambda: relay.problem)
    assert relay.problem == "(sqlite3.OperationalError) database or disk is full"
    sent = steps_of(run)
    assert len(sent) < STEPS
    disk.make_room()
    with MetricsRelay(open_run(on_disk, "stage", stage, "w", {}, begun=True), stage) as relay:
        pass
    assert relay.problem is None
    for name in ("loss", *values):
        assert steps_of(run, name) == list(range(1, STEPS + 1))


def test_a_stage_says_so_in_one_line_and_keeps_its_result(
    on_disk: Tracking,
    disk: SmallDisk,
    worker: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Metrics of a long training, which the store has no room for when it ends."""
    work = work_in(tmp_path, steps=STEPS)
    job = {"out": str(work.folder), "steps": STEPS, "config": work.config.identity() if work.config else {}}
    told = rf"^no space left on the disk of {disk.folder}/mlflow.db; free some and run the same again: it goes on"
    with pytest.raises(UserError, match=told):  # noqa: PT012
        with stage_run(work, on_disk) as stage:
            disk.fill()
            stage.work_apart(worker, job, threads=1)
            stage.results({"final/loss": 0.5})
    assert read_manifest(work.folder) is not None
    disk.make_room()
    with stage_run(work, on_disk) as stage:
        stage.work_apart(worker, job, threads=1)
        stage.results({"final/loss": 0.5})
    assert stage.skipped
    run = stage.run
    assert steps_of(run) == list(range(1, STEPS + 1))
    found = run.client.get_run(run.run_id)
    assert found.info.status == "FINISHED"
    assert found.data.metrics["final/loss"] == 0.5
    assert len(run.client.search_runs([on_disk.experiment_id])) == 1
