"""`awpo serve` as a person starts it: a run started by `prefect deployment run` is picked up by the worker and completes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from mlflow import MlflowClient

pytestmark = [pytest.mark.slow, pytest.mark.servers]

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 420

SMALL_TRAINING: dict[str, Any] = {
    "method": "awpo",
    "corpus": {"train_dialogues": 20, "validation_dialogues": 3, "test_dialogues": 3},
    "sft": {"steps": 2, "batch_size": 4, "save_every": 2},
    "policy": {
        "steps": 2,
        "prompts_per_rollout": 2,
        "group_size": 2,
        "steps_per_rollout": 2,
        "micro_batch_size": 2,
        "max_completion_length": 16,
        "save_every": 2,
    },
    "evaluation": {
        "benchmarks": ["held_out"],
        "instances_per_split": 2,
        "samples": 1,
        "max_completion_length": 16,
    },
}


def test_all_deployments_are_registered(serving: Any) -> None:
    """prefect#16459: zombie runs after a kill."""
    found = serving.ask("deployments/filter", {})
    assert len(found) == 9
    [nightly] = [deployment for deployment in found if deployment["name"] == "nightly-regression"]
    assert nightly["schedules"][0]["schedule"]["timezone"] == "Europe/Berlin"
    assert {deployment["work_pool_name"] for deployment in found} == {"awpo-local"}
    names = [automation["name"] for automation in serving.ask("automations/filter", {})]
    assert set(names) == {"Crash zombie runs", "Crash lost runs", "Tell of failed runs"}


def test_the_doctor_finds_the_whole_set_up(serving: Any) -> None:
    found = serving.awpo("doctor")
    assert found.returncode == 0, found.stdout
    for what in ("worker", "deployments", "zombie runs", "failure notification"):
        assert re.search(rf"ok\W+{what}", found.stdout), found.stdout


def test_a_failed_run_is_told_and_the_address_is_kept_secret(serving: Any, told: Any) -> None:
    started = serving.start("prepare-data/prepare-data", source="/no/such/source")
    assert "Failed" in started.stdout
    kind, message = told.wait()
    assert kind == "application/json"
    assert "is Failed" in message["text"]
    assert "source = /no/such/source lies outside of the folders" in message["text"]  # a form may not name any path
    assert f"{serving.prefect}/runs/flow-run/" in message["text"]
    everywhere = [path for path in serving.runs.rglob("*") if path.is_file()]
    assert everywhere
    assert not [path for path in everywhere if b"planted-secret" in path.read_bytes()]


def test_setting_up_again_doubles_nothing(serving: Any) -> None:
    again = serving.awpo("setup")
    assert again.returncode == 0, again.stderr
    assert len(serving.ask("automations/filter", {})) == 3
    assert len(serving.ask("deployments/filter", {})) == 9


def test_data_are_prepared_by_the_worker(serving: Any, tmp_path: Path) -> None:
    small = {"train_dialogues": 20, "validation_dialogues": 3, "test_dialogues": 3}
    run = serving.run("prepare-data/prepare-data", out=str(tmp_path / "data"), corpus=small)
    manifest = json.loads((tmp_path / "data" / "data" / "instances" / "manifest.json").read_text())
    assert manifest["dialogues"] == 29
    artifacts = serving.ask("artifacts/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
    assert {"write-corpus-seed-0", "decompose-dialogues-jsonl"} <= {artifact["key"] for artifact in artifacts}


def test_a_run_is_started_from_its_form_and_watched(serving: Any, eyes: Any, tmp_path: Path) -> None:
    eyes.open_form(serving, "prepare-data")
    eyes.fill(str(tmp_path / "from-form"), "out")
    eyes.fill("7", "corpus", "Train Dialogues")
    eyes.fill("2", "corpus", "Test Dialogues")
    eyes.submit()
    assert eyes.wait_for_the_end(serving) == "Completed"
    manifest = json.loads((tmp_path / "from-form" / "data" / "instances" / "manifest.json").read_text())
    assert manifest["dialogues"] == 7 + 24 + 2 * 2
    eyes.page.get_by_text("Artifacts", exact=True).first.click()
    eyes.page.get_by_text("Run in MLflow").first.wait_for()


def test_a_model_is_trained_by_the_worker(serving: Any, tmp_path: Path) -> None:
    out = tmp_path / "train"
    run = serving.run("train/train", out=str(out), **SMALL_TRAINING)
    rows = json.loads((out / "summary.json").read_text())["methods"]
    assert [row["method"] for row in rows] == ["base", "sft", "awpo"]
    tasks = serving.ask("task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
    assert {task["state_type"] for task in tasks} == {"COMPLETED"}
    artifacts = serving.ask("artifacts/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
    shown = {artifact["task_run_id"] for artifact in artifacts if artifact["type"] in ("table", "markdown")}
    without = {task["name"] for task in tasks if task["id"] not in shown}
    assert not without, "tasks without a table or markdown artifact"
    with urllib.request.urlopen(f"{serving.mlflow}/health", timeout=30) as response:
        assert response.status == 200


def test_a_training_of_two_processes_is_cancelled_and_taken_up_again(serving: Any, tmp_path: Path) -> None:
    """Cancel ends both ranks within 20 s (Prefect kills after 30); the next run goes on in the same MLflow run."""
    out = tmp_path / "cancelled"
    parameters = {
        **SMALL_TRAINING,
        "out": str(out),
        "launch": "cpu-2",
        "policy": {**SMALL_TRAINING["policy"], "steps": 60, "micro_batch_size": 1, "save_every": 2},
    }
    folder = out / "embedded-1m" / "seed-0" / "awpo"
    [deployment] = serving.ask("deployments/filter", {"deployments": {"name": {"any_": ["train"]}}})
    run = serving.ask(f"deployments/{deployment['id']}/create_flow_run", {"parameters": parameters})
    metrics = folder / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 6, "training has begun")
    at_work = training_processes(folder)
    assert len(at_work) >= 2, "two ranks"
    asked = time.monotonic()
    serving.ask(f"flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    wait_for(lambda: not training_processes(folder), "all processes are gone")
    assert time.monotonic() - asked < 20 + 10  # the worker asks the server every few seconds
    wait_for(lambda: serving.ask(f"flow_runs/{run['id']}")["state_type"] == "CANCELLED", "the state is true")
    client = MlflowClient(serving.mlflow)
    told = json.loads((folder.parent / ".awpo.mlflow.json").read_text())
    wait_for(lambda: client.get_run(told["run_id"]).info.status == "KILLED", "MLflow's, too")
    before = metrics.read_text().count("\n")
    assert before < 60
    again = serving.run("train/train", **parameters)
    assert again["id"] != run["id"]
    assert json.loads((folder.parent / ".awpo.mlflow.json").read_text())["run_id"] == told["run_id"]
    assert client.get_run(told["run_id"]).info.status == "FINISHED"
    steps = [metric.step for metric in client.get_metric_history(told["run_id"], "loss")]
    assert steps == list(range(1, 61)), "each step once, none lost and none doubled"
    logs = {item.path for item in client.list_artifacts(told["run_id"], "logs")}
    assert {"logs/log.txt", "logs/log.rank-1.txt"} <= logs


def test_a_run_whose_process_is_killed_leaves_the_truth_on_both_sides(serving: Any, tmp_path: Path) -> None:
    """prefect#16459: zombie runs after a kill."""
    out = tmp_path / "killed"
    folder = out / "embedded-1m" / "seed-0" / "awpo"
    [deployment] = serving.ask("deployments/filter", {"deployments": {"name": {"any_": ["train"]}}})
    parameters = {**SMALL_TRAINING, "out": str(out), "policy": {**SMALL_TRAINING["policy"], "steps": 200}}
    run = serving.ask(f"deployments/{deployment['id']}/create_flow_run", {"parameters": parameters})
    metrics = folder / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, "training has begun")
    told = [
        json.loads(path.read_text())["run_id"]
        for path in (folder.parent / ".awpo.mlflow.json", out / ".train.mlflow.json")
    ]
    client = MlflowClient(serving.mlflow)
    assert [client.get_run(one).info.status for one in told] == ["RUNNING", "RUNNING"]
    process = int(client.get_run(told[0]).data.tags["awpo.process"].split(":")[1])
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: serving.ask(f"flow_runs/{run['id']}")["state_type"] == "CRASHED", "Prefect knows")
    wait_for(lambda: all(client.get_run(one).info.status == "KILLED" for one in told), "MLflow, too")
    wait_for(lambda: not training_processes(folder), "nobody is left")


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not seen within {seconds:g} s: {what}"
        time.sleep(0.2)


def training_processes(folder: Path) -> list[int]:
    """Processes of this machine that work in `folder`, by their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_a_run_whose_worker_was_killed_before_it_began_becomes_crashed(serving: Any) -> None:
    """Such a run is Pending, and no other worker takes it."""
    code = "from datetime import timedelta\nfrom flows.automations import crash_lost_runs\ncrash_lost_runs({})"
    command = [sys.executable, "-c", code.format("timedelta(seconds=15)")]
    subprocess.run(command, env=serving.environment, cwd=ROOT, check=True, timeout=PATIENCE)
    [train] = serving.ask("deployments/filter", {"deployments": {"name": {"any_": ["train"]}}})
    pending = {"state": {"type": "PENDING", "name": "Pending"}, "idempotency_key": "lost"}
    seen: list[dict[str, Any]] = []

    def crashed() -> bool:
        with suppress(HTTPError):  # the store of SQLite is locked for a moment
            made = serving.ask(f"deployments/{train['id']}/create_flow_run", pending)
            seen.append(serving.ask(f"flow_runs/{made['id']}")["state"])
        return bool(seen) and seen[-1]["type"] == "CRASHED"

    wait_for(crashed, "the run is Crashed", PATIENCE)
    assert {state["type"] for state in seen} == {"PENDING", "CRASHED"}
    assert seen[-1]["message"] == "No process 0.25 min after a worker took it: the worker is gone"
    command = [sys.executable, "-c", code.format("")]
    subprocess.run(command, env=serving.environment, cwd=ROOT, check=True, timeout=PATIENCE)


def test_the_children_end_with_a_killed_parent(serving: Any) -> None:
    serving.process.send_signal(signal.SIGKILL)
    serving.process.wait()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with suppress(OSError):
            for address in (serving.prefect, serving.mlflow):
                port = int(address.rpartition(":")[2])
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
            return
        time.sleep(1)
    pytest.fail("a server outlived `awpo serve`")
