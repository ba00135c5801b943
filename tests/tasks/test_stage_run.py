"""What a stage's task does around the stage: real workers in processes of their own, a real store."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from prefect.client.schemas import State
from prefect.states import Completed, exception_to_failed_state

from awpo.artifacts import read_manifest
from awpo.config_training import SftConfig
from awpo.endpoint_answers import EndpointError
from awpo.errors import UserError
from awpo.processes import StageFailed
from tasks.cancellation import cancelled, check_cancelled, stops_its_tasks
from tasks.progress import PlainReporter, reporting
from tasks.stage_run import StageRun, Work, artifact_key, stage_run, worth_trying_again
from tasks.tracking import RunFile
from tasks.tracking_store import Tracking

WORKER = """
import json, sys, time
from pathlib import Path
from awpo.artifacts import open_stage
from awpo.errors import UserError
from awpo.events import RunLog
from awpo.processes import worker_main


def run(job):
    out = Path(job["out"])
    with open(out.parent / "started", "a") as file:
        file.write("x")
    with open_stage(out, "sft", {}, job["config"]) as stage:
        if stage.finished:
            return
        log = RunLog(out)
        for step in range(1, job["steps"] + 1):
            log.metrics(step, {"loss": 1.0 / step})
            log.progress(step, job["steps"], "steps")
        log.warning("the data are few")
        if job.get("end") == "user":
            raise UserError("the model is too small; take another")
        if job.get("end") == "crash":
            raise RuntimeError("no memory")
        if job.get("end") == "sleep":
            time.sleep(600)
        (out / "result.txt").write_text("done")
        stage.finish({"loss": 0.5})


if __name__ == "__main__":
    worker_main(run)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "small_worker.py").write_text(WORKER)
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{root}")
    return "small_worker"


def work_in(tmp_path: Path, **config: int) -> Work:
    labels = {"model": "embedded-1m", "method": "sft", "seed": 0}
    return Work("sft", "train sft", tmp_path / "out" / "sft", {}, SftConfig(**config), labels)


def attempt(work: Work, tracking: Tracking, worker: str, end: str = "", threads: int = 1) -> StageRun:
    config = work.config.identity() if work.config else {}
    job = {"out": str(work.folder), "steps": 3, "end": end, "config": config}
    with stage_run(work, tracking) as stage:
        stage.work_apart(worker, job, threads)
        stage.results({"final/loss": 0.5})
    return stage


def starts(work: Work) -> int:
    return len((work.folder.parent / "started").read_text())


def losses(tracking: Tracking, run_id: str) -> list[int]:
    return [metric.step for metric in tracking.client().get_metric_history(run_id, "loss")]


def test_a_stage_tells_its_run_everything(tracking: Tracking, tmp_path: Path, worker: str) -> None:
    work = work_in(tmp_path, steps=3)
    stage = attempt(work, tracking, worker)
    run = tracking.client().get_run(stage.run.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["method"] == "sft"
    assert run.data.params["sft.steps"] == "3"
    assert run.data.metrics["final/loss"] == 0.5
    assert "seconds" in run.data.metrics
    assert losses(tracking, stage.run.run_id) == [1, 2, 3]
    assert not stage.skipped


def test_finished_work_starts_no_process_and_makes_no_run(tracking: Tracking, tmp_path: Path, worker: str) -> None:
    """prefect#9814: a retry does everything again."""
    work = work_in(tmp_path, steps=3)
    first = attempt(work, tracking, worker)
    again = attempt(work, tracking, worker)
    assert starts(work) == 1
    assert again.skipped
    assert again.run.run_id == first.run.run_id
    assert losses(tracking, first.run.run_id) == [1, 2, 3]
    assert len(tracking.client().get_metric_history(first.run.run_id, "final/loss")) == 1


def test_other_work_in_the_same_folder_is_a_new_run(tracking: Tracking, tmp_path: Path, worker: str) -> None:
    first = attempt(work_in(tmp_path, steps=3), tracking, worker)
    second = attempt(work_in(tmp_path, steps=4), tracking, worker)
    assert second.run.run_id != first.run.run_id
    assert starts(work_in(tmp_path)) == 2
    assert not second.skipped


def test_what_the_person_can_mend_comes_out_as_it_is(tracking: Tracking, tmp_path: Path, worker: str) -> None:
    work = work_in(tmp_path)
    with pytest.raises(UserError, match="take another"):
        attempt(work, tracking, worker, end="user")
    file = RunFile.read(work.folder)
    assert file
    assert tracking.client().get_run(file.run_id).info.status == "FAILED"


def test_a_second_attempt_after_a_crash_is_in_the_same_run(tracking: Tracking, tmp_path: Path, worker: str) -> None:
    work = work_in(tmp_path)
    with pytest.raises(StageFailed, match="no memory"):
        attempt(work, tracking, worker, end="crash")
    file = RunFile.read(work.folder)
    assert file
    assert tracking.client().get_run(file.run_id).info.status == "FAILED"
    assert losses(tracking, file.run_id) == [1, 2, 3]
    stage = attempt(work, tracking, worker)
    assert stage.run.run_id == file.run_id
    assert tracking.client().get_run(file.run_id).info.status == "FINISHED"
    assert losses(tracking, file.run_id) == [1, 2, 3]  # written twice by the worker, there once


def test_stopping_the_flow_ends_the_workers_of_its_threads(tracking: Tracking, tmp_path: Path, worker: str) -> None:
    work = work_in(tmp_path)
    ended: list[BaseException] = []

    def in_a_thread() -> None:
        try:
            attempt(work, tracking, worker, end="sleep")
        except BaseException as error:  # noqa: BLE001 - looked at below
            ended.append(error)

    thread = threading.Thread(target=in_a_thread)

    def flow() -> None:
        with stops_its_tasks():
            thread.start()
            while not (work.folder / "metrics.jsonl").exists():
                time.sleep(0.1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        flow()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert isinstance(ended[0], InterruptedError)
    file = RunFile.read(work.folder)
    assert file
    assert tracking.client().get_run(file.run_id).info.status == "KILLED"


def test_an_ordinary_error_of_a_flow_stops_nobody() -> None:
    def fail() -> None:
        with stops_its_tasks():
            raise ValueError("one piece")

    with pytest.raises(ValueError, match="one piece"):
        fail()
    check_cancelled()

    def stop() -> None:
        with stops_its_tasks():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert cancelled()
    with stops_its_tasks():
        assert not cancelled(), "the next flow of the process starts afresh"


def test_progress_reaches_the_reporter(tracking: Tracking, tmp_path: Path, worker: str) -> None:
    import io

    stream = io.StringIO()
    with reporting(PlainReporter(stream, every=0.0)):
        attempt(work_in(tmp_path), tracking, worker)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "train sft: started"
    assert "train sft: 3/3 steps" in lines
    assert "train sft: the data are few" in lines
    assert lines[-1].startswith("train sft: done")


def test_a_retry_says_why_and_that_it_goes_on(
    tracking: Tracking, tmp_path: Path, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    work, stream = work_in(tmp_path), io.StringIO()
    with reporting(PlainReporter(stream, every=0.0)):
        with pytest.raises(StageFailed, match="no memory"):
            attempt(work, tracking, worker, end="crash")
        # As Prefect tells a task in its second run; a run under Prefect would start a server.
        monkeypatch.setenv("PREFECT__RUNTIME__TASK_RUN__RUN_COUNT", "2")
        attempt(work, tracking, worker)
    lines = stream.getvalue().splitlines()
    [failed] = [line for line in lines if "attempt 1 failed" in line]
    assert "small_worker ended with code 1" in failed
    assert failed.endswith("RuntimeError: no memory")
    assert lines.index(failed) < lines.index("train sft: attempt 2, with what the one before left")
    manifest = read_manifest(work.folder)
    assert manifest is not None
    assert manifest.attempts == 2


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (UserError("mend me"), False),
        (EndpointError("a wrong key", 401), False),
        (EndpointError("away", passes=True), True),
        (InterruptedError("stopped"), False),
        (StageFailed("no memory"), True),
        (OSError("network"), True),
    ],
)
def test_only_accidents_are_tried_again(error: Exception, again: bool) -> None:
    import asyncio

    state: State[object] = asyncio.run(exception_to_failed_state(error))
    assert worth_trying_again(None, None, state) is again
    assert not worth_trying_again(None, None, Completed(data=1))


@pytest.mark.parametrize("title", ["train awpo · embedded-1m · seed 0", "pass@1 and pass@8", "ümlaut / x"])
def test_artifact_keys_are_those_that_prefect_takes(title: str) -> None:
    from prefect.server.schemas.actions import ArtifactCreate

    assert ArtifactCreate(key=artifact_key(title)).key


def test_the_workers_log_is_kept_and_its_lines_are_in_the_runs_log(
    tracking: Tracking, tmp_path: Path, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import stage_run as module

    lines: list[str] = []
    monkeypatch.setattr(module, "log", lambda message, *_: lines.append(message))
    monkeypatch.setattr(module, "LOG_BYTES", 200)
    work = work_in(tmp_path)
    with pytest.raises(StageFailed):
        attempt(work, tracking, worker, end="crash")
    assert "RuntimeError: no memory" in lines
    file = RunFile.read(work.folder)
    assert file
    kept = Path(tracking.client().download_artifacts(file.run_id, "logs/log.txt", str(tmp_path))).read_bytes()
    assert kept == (work.folder / "log.txt").read_bytes()[-200:]
