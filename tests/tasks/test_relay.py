"""Metrics go from the file to the store: all of them, each once, whatever happens between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from awpo.events import METRICS, RunLog
from awpo.training.checkpoints import drop_metrics_after
from tasks.relay import MetricsRelay
from tasks.tracking import RunFile, TrackedRun, open_run
from tasks.tracking_store import Tracking


@pytest.fixture
def run(tracking: Tracking, tmp_path: Path) -> TrackedRun:
    (tmp_path / "stage").mkdir()
    return open_run(tracking, "stage", tmp_path / "stage", "w", {}, begun=True)


def history(run: TrackedRun, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in run.client.get_metric_history(run.run_id, name)]


def again(run: TrackedRun) -> TrackedRun:
    """The run as the next process finds it."""
    return open_run(run.tracking, "stage", run.folder, "w", {}, begun=True)


def test_each_line_once_over_several_readings(run: TrackedRun) -> None:
    log, relay = RunLog(run.folder), MetricsRelay(run, run.folder)
    log.metrics(1, {"loss": 3.0, "reward/total": 1.0})
    assert relay.pump() == 2
    assert relay.pump() == 0
    log.metrics(2, {"loss": 2.0})
    assert relay.pump() == 1
    assert history(run, "loss") == [(1, 3.0), (2, 2.0)]
    assert history(run, "reward/total") == [(1, 1.0)]


def test_more_than_a_batch(run: TrackedRun) -> None:
    log = RunLog(run.folder)
    for step in range(700):
        log.metrics(step, {"a": step, "b": -step, "c": 1.0})
    assert MetricsRelay(run, run.folder).pump() == 2100
    assert len(history(run, "b")) == 700


def test_half_a_line_waits_for_its_rest(run: TrackedRun) -> None:
    relay = MetricsRelay(run, run.folder)
    line = json.dumps({"time": 1.0, "step": 1, "metrics": {"loss": 3.0}})
    (run.folder / METRICS).write_text(line[:20])
    assert relay.pump() == 0
    (run.folder / METRICS).write_text(line + "\n")
    assert relay.pump() == 1


def test_lines_of_no_use_do_not_stop_the_rest(run: TrackedRun) -> None:
    good = json.dumps({"time": 1.0, "step": 1, "metrics": {"loss": 3.0}})
    (run.folder / METRICS).write_text('nonsense\n{"step": 1}\n{"metrics": [1]}\n' + good + "\n")
    MetricsRelay(run, run.folder).pump()
    assert history(run, "loss") == [(1, 3.0)]


def test_what_a_store_that_is_away_missed_is_sent_later(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(run.folder)
    log.metrics(1, {"loss": 3.0})
    MetricsRelay(run, run.folder).pump()

    def away(*_: object, **__: object) -> None:
        raise MlflowException("the store is away")

    monkeypatch.setattr(run.client, "log_batch", away)
    log.metrics(2, {"loss": 2.0})
    relay = MetricsRelay(run, run.folder)
    assert relay.pump() == 0
    assert relay.problem
    assert "away" in relay.problem
    later = again(run)
    assert MetricsRelay(later, run.folder).pump() == 1
    assert history(later, "loss") == [(1, 3.0), (2, 2.0)]


def resume_at(run: TrackedRun, step: int) -> None:
    """A trainer resumes at `step`: it replaces the file by one without the later steps, which it will do again."""
    drop_metrics_after(run.folder, step)


def test_sent_but_not_written_down_is_not_doubled(run: TrackedRun) -> None:
    before = RunFile.path_for(run.folder).read_text()
    RunLog(run.folder).metrics(1, {"loss": 3.0})
    MetricsRelay(run, run.folder).pump()
    RunFile.path_for(run.folder).write_text(before)  # as if the process had died between the two
    later = again(run)
    assert MetricsRelay(later, run.folder).pump() == 0
    assert history(later, "loss") == [(1, 3.0)]


def test_sent_but_not_written_down_and_trained_again_is_not_doubled(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer died with the relay, and writes the steps after its checkpoint again, at another time."""
    log = RunLog(run.folder)
    log.metrics(1, {"loss": 1.0})
    MetricsRelay(run, run.folder).pump()
    monkeypatch.setattr(TrackedRun, "save", lambda self: None)
    log.metrics(2, {"loss": 2.0})
    log.metrics(3, {"loss": 3.0})
    assert MetricsRelay(run, run.folder).pump() == 2
    monkeypatch.undo()
    resume_at(run, 1)
    with monkeypatch.context() as patch:
        patch.setattr("awpo.events.time.time", lambda: 4e9)
        for step in (2, 3, 4):
            log.metrics(step, {"loss": float(step)})
    later = again(run)
    assert MetricsRelay(later, run.folder).pump() == 1
    assert history(later, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_a_file_replaced_twice_between_two_readings_has_no_gap(run: TrackedRun) -> None:
    """The second replacement may have the first file's inode and be longer than what was read of it."""
    log = RunLog(run.folder)
    for step in (1, 2):
        log.metrics(step, {"loss": float(step)})
    MetricsRelay(run, run.folder).pump()
    file = run.folder / METRICS
    again_written = "".join(
        json.dumps({"step": s, "time": 4e9 + s, "metrics": {"loss": float(s)}}) + "\n" for s in range(1, 7)
    )
    file.write_text(again_written)  # in place: the same inode, and lines of another length
    later = again(run)
    assert MetricsRelay(later, run.folder).pump() == 4
    assert history(later, "loss") == [(step, float(step)) for step in range(1, 7)]


def test_steps_that_a_resumed_trainer_writes_again_stand_once(run: TrackedRun) -> None:
    log = RunLog(run.folder)
    for step in range(1, 6):
        log.metrics(step, {"loss": float(step)})
    MetricsRelay(run, run.folder).pump()
    # The trainer resumes at step 3: it replaces the file, then trains 4 and 5 again, and 6.
    resume_at(run, 3)
    for step in range(4, 7):
        log.metrics(step, {"loss": float(step), "new": 1.0})
    later = again(run)
    MetricsRelay(later, run.folder).pump()
    assert history(later, "loss") == [(step, float(step)) for step in range(1, 7)]
    assert history(later, "new") == [(4, 1.0), (5, 1.0), (6, 1.0)]


def test_the_rest_is_sent_on_leaving_whatever_happened(run: TrackedRun) -> None:
    def work_that_dies() -> None:
        RunLog(run.folder).metrics(1, {"loss": 3.0})
        raise RuntimeError("the worker died")

    with pytest.raises(RuntimeError), MetricsRelay(run, run.folder, every=60):
        work_that_dies()
    assert history(run, "loss") == [(1, 3.0)]


def test_not_finite_values_are_counted_once(run: TrackedRun) -> None:
    log, relay = RunLog(run.folder), MetricsRelay(run, run.folder)
    log.metrics(1, {"loss": float("nan"), "other": 1.0})
    relay.pump()
    relay.pump()
    assert run.client.get_run(run.run_id).data.tags["awpo.metrics_skipped"] == "1"
    assert history(run, "loss") == []
