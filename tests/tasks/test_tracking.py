"""Runs in a real SQLite store of MLflow: what stands in them, that they are found again, how they end."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.exceptions import MlflowException

from awpo.artifacts import open_stage
from awpo.errors import UserError
from tasks.system_metrics import system_metrics
from tasks.tracking import RunFile, TrackedRun, close_abandoned_runs, ended_truly, open_run, shorten
from tasks.tracking_store import Tracking, connect


def begin(tracking: Tracking, folder: Path, work: str = "w", name: str = "stage") -> TrackedRun:
    return open_run(tracking, name, folder, work, {})


def finish_stage(folder: Path, config: dict[str, int]) -> None:
    with open_stage(folder, "sft", {}, config) as stage:
        (folder / "out.txt").write_text("x")
        stage.finish()


def test_store_is_sqlite_under_the_runs_folder(tracking: Tracking, tmp_path: Path) -> None:
    assert tracking.uri == f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}"
    assert connect().experiment_id == tracking.experiment_id
    artifact_location = tracking.client().get_experiment(tracking.experiment_id).artifact_location
    assert artifact_location == (tmp_path / "runs" / "mlartifacts").as_uri()


@pytest.mark.slow
def test_a_store_that_two_processes_make_at_once_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWPO_RUNS", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    code = "import sys, tasks.tracking_store as t; print('ready', flush=True); sys.stdin.readline(); print(t.connect())"
    root = Path(__file__).resolve().parents[2]
    others = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for other in others:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
    said = []
    for other in others:
        assert other.stdin is not None
        other.stdin.write("\n")
        other.stdin.flush()
    for other in others:
        out, problem = other.communicate()
        assert other.returncode == 0, problem
        said.append(out)
    assert said[0] == said[1]


def test_an_unreachable_store_is_for_the_person_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    before = mlflow.get_tracking_uri()
    try:
        with pytest.raises(UserError, match="MLFLOW_TRACKING_URI"):
            connect()
    finally:
        mlflow.set_tracking_uri(before)


def test_an_experiment_that_another_process_makes_meanwhile_is_used(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several runs begin at once on a new server: each asks, and only one makes it."""
    ask, answers = mlflow.MlflowClient.get_experiment_by_name, [None]
    monkeypatch.setattr(
        mlflow.MlflowClient,
        "get_experiment_by_name",
        lambda client, name: answers.pop() if answers else ask(client, name),
    )
    assert connect() == tracking
    assert not answers


def test_a_store_that_comes_back_is_opened_by_who_waits_for_it(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, away = mlflow.MlflowClient.get_experiment_by_name, ["API request to http://127.0.0.1:9/ failed"] * 2

    def flaky(client: mlflow.MlflowClient, name: str) -> Any:
        if away:
            raise MlflowException(away.pop())
        return ask(client, name)

    monkeypatch.setattr(mlflow.MlflowClient, "get_experiment_by_name", flaky)
    with pytest.raises(UserError, match="cannot open the MLflow store"):
        connect()
    assert connect(patience=60.0) == tracking
    assert not away


def test_a_deleted_experiment_is_taken_up_again(tracking: Tracking) -> None:
    tracking.client().delete_experiment(tracking.experiment_id)
    again = connect()
    assert again.experiment_id == tracking.experiment_id
    assert again.client().get_experiment(again.experiment_id).lifecycle_stage == "active"


def test_parameters_of_any_length_and_number(tracking: Tracking, tmp_path: Path) -> None:
    """mlflow#6183, mlflow#7046: long parameters, changed on resume."""
    run = begin(tracking, tmp_path / "s")
    values = {f"key.{number}": number for number in range(250)} | {"long": "x" * 20_000, "nested": {"a": [1, 2]}}
    run.parameters({**values, "method": "awpo", "seed": 3})
    found = tracking.client().get_run(run.run_id).data.params
    assert len(found) == 254
    assert found["method"] == "awpo"
    assert len(found["long"]) <= 6000
    assert "20000 characters" in found["long"]


def test_shortened_values_stay_different() -> None:
    assert shorten("x" * 7000 + "a") != shorten("x" * 7000 + "b")
    assert shorten("short") == "short"


def test_a_parameter_that_stands_is_not_changed_on_resume(tracking: Tracking, tmp_path: Path) -> None:
    """mlflow#6183, mlflow#7046: long parameters, changed on resume."""
    run = begin(tracking, tmp_path / "s")
    run.parameters({"a": 1})
    run.parameters({"a": 2, "b": 3})  # MLflow itself would raise
    assert tracking.client().get_run(run.run_id).data.params == {"a": "1", "b": "3"}


def test_config_is_an_artifact_and_flat_parameters(tracking: Tracking, tmp_path: Path) -> None:
    """mlflow#6183, mlflow#7046: long parameters, changed on resume."""
    run = begin(tracking, tmp_path / "s")
    config = {"policy": {"steps": 4, "judge": {"kind": "rubric"}}, "path": tmp_path}
    run.config(config)
    assert tracking.client().get_run(run.run_id).data.params["policy.judge.kind"] == "rubric"
    stored = json.loads(Path(tracking.client().download_artifacts(run.run_id, "config.json")).read_text())
    assert stored["policy"] == config["policy"]


def test_values_that_are_not_finite_numbers_are_skipped_and_counted(tracking: Tracking, tmp_path: Path) -> None:
    run = begin(tracking, tmp_path / "s")
    run.metrics({"good": 1.5, "nan": math.nan, "inf": math.inf, "text": "x", "truth": True, "none": None}, step=2)
    stored = tracking.client().get_run(run.run_id)
    assert stored.data.metrics == {"good": 1.5}
    assert stored.data.tags["awpo.metrics_skipped"] == "5"


def test_metric_names_that_mlflow_refuses_are_made_acceptable(tracking: Tracking, tmp_path: Path) -> None:
    run = begin(tracking, tmp_path / "s")
    run.metrics({"bfcl_v3/live_ast (python)/accuracy": 0.5})
    assert tracking.client().get_run(run.run_id).data.metrics == {"bfcl_v3/live_ast _python_/accuracy": 0.5}


def test_inputs_bear_the_content_hash(tracking: Tracking, tmp_path: Path) -> None:
    source = tmp_path / "data.json"
    source.write_text("[1]")
    run = begin(tracking, tmp_path / "s")
    run.inputs({"source": source, "absent": tmp_path / "absent"})
    run.inputs({"source": source})
    [found] = tracking.client().get_run(run.run_id).inputs.dataset_inputs
    first = found.dataset.digest
    source.write_text("[2]")
    other = begin(tracking, tmp_path / "t")
    other.inputs({"source": source})
    [second] = tracking.client().get_run(other.run_id).inputs.dataset_inputs
    assert second.dataset.digest != first
    assert found.dataset.name == "source"


def test_checkpoints_are_models_by_path(tracking: Tracking, tmp_path: Path) -> None:
    run = begin(tracking, tmp_path / "s")
    model_id = run.checkpoint("embedded-1m-awpo", tmp_path / "s" / "checkpoint", {"method": "awpo"}, step=7)
    client = tracking.client()
    model = client.get_logged_model(model_id)
    assert model.status == "READY"
    assert model.params["path"] == str(tmp_path / "s" / "checkpoint")
    assert client.get_run(run.run_id).outputs.model_outputs[0].model_id == model_id


def test_models_are_ranked_by_the_numbers_of_their_checkpoint(tracking: Tracking, tmp_path: Path) -> None:
    for name, accuracy in (("low", 0.2), ("high", 0.7), ("middle", 0.4)):
        run = begin(tracking, tmp_path / name)
        run.checkpoint(name, tmp_path / name / "checkpoint", {"model": name})
        run.checkpoint_metrics({"held_out/accuracy": accuracy})
        assert run.client.get_run(run.run_id).data.metrics == {"held_out/accuracy": accuracy}
    ranked = tracking.client().search_logged_models(
        [tracking.experiment_id], order_by=[{"field_name": "metrics.held_out/accuracy", "ascending": False}]
    )
    assert [model.name for model in ranked] == ["high", "middle", "low"]
    without = begin(tracking, tmp_path / "without")
    without.checkpoint_metrics({"held_out/accuracy": 0.1})  # a run that made no checkpoint
    assert without.client.get_run(without.run_id).data.metrics == {"held_out/accuracy": 0.1}


def test_system_metrics_of_a_retry_go_on_where_the_store_stands(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.system_metrics.EVERY_SECONDS", 0.1)
    run = begin(tracking, tmp_path / "stage")
    name, seen = "system/system_memory_usage_percentage", 0
    with system_metrics(run):
        time.sleep(0.5)
    assert run.client.get_run(run.run_id).data.metrics == {}, "the stage's own metrics come first"
    run.file.sent = {"loss": 1}
    for _ in range(2):
        with system_metrics(run):
            end = time.monotonic() + 60
            while len(found := run.client.get_metric_history(run.run_id, name)) < seen + 2 and time.monotonic() < end:
                time.sleep(0.1)
        seen = len(found)
    steps = [metric.step for metric in run.client.get_metric_history(run.run_id, name)]
    assert len(steps) >= 4
    assert steps == sorted(set(steps))
    assert all(0 < metric.value <= 100 for metric in found)


def test_system_metrics_without_a_store_end_nothing(tracking: Tracking, tmp_path: Path) -> None:
    run = begin(tracking, tmp_path / "stage")
    run.tracking = replace(tracking, uri="http://127.0.0.1:9")
    with system_metrics(run):
        pass


def test_a_table_is_logged_once(tracking: Tracking, tmp_path: Path) -> None:
    import pandas as pd

    run = begin(tracking, tmp_path / "s")
    for _ in range(2):  # MLflow would append the second time
        run.table(pd.DataFrame({"correct": [True, False]}), "items.json")
    stored = json.loads(Path(tracking.client().download_artifacts(run.run_id, "items.json")).read_text())
    assert len(stored["data"]) == 2


class TestTheSameWorkSpeaksOfTheSameRun:
    def test_a_finished_stage_keeps_its_run(self, tracking: Tracking, tmp_path: Path) -> None:
        folder = tmp_path / "sft"
        first = begin(tracking, folder, "work-a")
        finish_stage(folder, {"steps": 1})
        first.end("FINISHED")
        again = begin(tracking, folder, "work-a")
        assert again.run_id == first.run_id
        assert again.file.complete
        assert tracking.client().get_run(again.run_id).info.status == "FINISHED"

    def test_a_store_that_moved_keeps_its_runs(self, tracking: Tracking, tmp_path: Path) -> None:
        folder = tmp_path / "sft"
        first = begin(tracking, folder, "work-a")
        finish_stage(folder, {"steps": 1})
        first.end("FINISHED")
        replace(first.file, uri="sqlite:///before.db").write(folder)
        assert begin(tracking, folder, "work-a").run_id == first.run_id

    def test_an_interrupted_stage_goes_on_in_its_run(self, tracking: Tracking, tmp_path: Path) -> None:
        folder = tmp_path / "sft"
        first = begin(tracking, folder, "work-a")
        with open_stage(folder, "sft", {}, {}):
            pass  # opened, never finished
        first.end("KILLED")
        again = begin(tracking, folder, "work-a")
        assert again.run_id == first.run_id
        assert tracking.client().get_run(again.run_id).info.status == "RUNNING"

    @pytest.mark.parametrize("change", ["other work", "folder gone", "run deleted", "other store", "file broken"])
    def test_anything_else_is_a_new_run(
        self, change: str, tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "sft"
        first = begin(tracking, folder, "work-a")
        finish_stage(folder, {})
        first.end("FINISHED")
        work = "work-a"
        if change == "other work":
            work = "work-b"
        elif change == "folder gone":
            (folder / "manifest.json").unlink()
        elif change == "run deleted":
            tracking.client().delete_run(first.run_id)
        elif change == "other store":
            file = RunFile.read(folder)
            assert file
            replace(file, uri="sqlite:///elsewhere.db", run_id="a" * 32).write(folder)
        else:
            RunFile.path_for(folder).write_text("{")
        assert begin(tracking, folder, work).run_id != first.run_id

    def test_a_run_taken_up_again_moves_under_the_present_parent(self, tracking: Tracking, tmp_path: Path) -> None:
        folder = tmp_path / "sft"
        first = begin(replace(tracking, parent_run_id="a" * 32), folder)
        finish_stage(folder, {})
        first.end("FINISHED")
        again = begin(replace(tracking, parent_run_id="b" * 32), folder)
        assert tracking.client().get_run(again.run_id).data.tags["mlflow.parentRunId"] == "b" * 32


class TestStatusIsTrue:
    @pytest.mark.parametrize(
        ("ending", "status"),
        [
            (None, "FINISHED"),
            (RuntimeError("broken"), "FAILED"),
            (UserError("mend me"), "FAILED"),
            (InterruptedError("stopped"), "KILLED"),
            (KeyboardInterrupt(), "KILLED"),
            (SystemExit(1), "KILLED"),
        ],
    )
    def test_after_every_way_to_end(
        self, ending: BaseException | None, status: str, tracking: Tracking, tmp_path: Path
    ) -> None:
        """SkyRL#1516: a run's status is not true."""
        run = begin(tracking, tmp_path / "s")
        with pytest.raises(type(ending)) if ending else nullcontext() as raised:
            with ended_truly(run):
                if ending:
                    raise ending
        assert ending is None or (raised and raised.value is ending)
        stored = tracking.client().get_run(run.run_id)
        assert stored.info.status == status
        if status == "FAILED":
            assert str(ending) in stored.data.tags["awpo.error"]

    def test_the_error_on_its_way_out_is_not_hidden_by_a_store_that_is_gone(
        self, tracking: Tracking, tmp_path: Path
    ) -> None:
        run = begin(tracking, tmp_path / "s")
        tracking.client().delete_run(run.run_id)
        with pytest.raises(RuntimeError, match="the real reason"):
            with ended_truly(run):
                raise RuntimeError("the real reason")

    def test_after_a_kill_without_a_word(self, tracking: Tracking, tmp_path: Path) -> None:
        """SkyRL#1516: a run's status is not true."""
        script = (
            "import os, signal\n"
            "from pathlib import Path\n"
            "from tasks.tracking import open_run; from tasks.tracking_store import connect\n"
            f"run = open_run(connect(), 'killed', Path({str(tmp_path / 'k')!r}), 'w', {{}})\n"
            "print(run.run_id, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        killed = done.stdout.strip()
        living = begin(tracking, tmp_path / "living")
        assert tracking.client().get_run(killed).info.status == "RUNNING"
        assert close_abandoned_runs(tracking) == [killed]
        assert tracking.client().get_run(killed).info.status == "KILLED"
        assert tracking.client().get_run(living.run_id).info.status == "RUNNING"

    def test_runs_of_other_hosts_are_left_alone(self, tracking: Tracking, tmp_path: Path) -> None:
        run = begin(tracking, tmp_path / "s")
        run.tags({"awpo.process": "another-host:1:1"})
        assert close_abandoned_runs(tracking) == []
