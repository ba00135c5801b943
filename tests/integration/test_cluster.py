"""Whole pipelines on a real Postgres: its server killed in mid-run, and a sweep of parallel cells. `make test-cluster`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from mlflow import MlflowClient

pytestmark = [pytest.mark.cluster, pytest.mark.servers]

AWAY_SECONDS = 15.0
STEPS = 40
TINY: dict[str, Any] = {
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
        "splits": ["test_phrasings"],
        "instances_per_split": 2,
        "samples": 1,
        "max_completion_length": 16,
    },
}


@pytest.fixture(scope="module")
def direct(postgres: Any, serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Servers whose runs write to MLflow's database themselves, as `awpo serve` on one machine does."""
    environment = {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": postgres.address("prefect", "postgresql+asyncpg"),
        "MLFLOW_TRACKING_URI": postgres.address("mlflow"),
    }
    with serve(tmp_path_factory.mktemp("direct"), environment) as found:
        yield found


@pytest.fixture(scope="module")
def behind_a_server(
    postgres: Any, bucket: Any, serve: Any, direct: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """As infra/compose.yaml: runs know MLflow's server alone, which hands artifacts on to S3."""
    del direct  # ends before this one's databases do
    folder = tmp_path_factory.mktemp("behind")
    port = int(subprocess.check_output([sys.executable, "-c", FREE_PORT]))
    store = {
        "MLFLOW_BACKEND_STORE_URI": postgres.address("moved"),
        "MLFLOW_ARTIFACTS_DESTINATION": "s3://awpo/artifacts",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with open(folder / "mlflow.log", "wb") as log:
        server = subprocess.Popen(command, env={**os.environ, **bucket.environment, **store}, stdout=log, stderr=log)
    try:
        environment = {
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": postgres.address("prefect", "postgresql+asyncpg"),
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}",
        }
        with serve(folder, environment) as found:
            found.mlflow = environment["MLFLOW_TRACKING_URI"]
            yield found
    finally:
        server.terminate()
        server.wait()


FREE_PORT = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])"


def begin(serving: Any, deployment: str, **parameters: Any) -> str:
    [found] = serving.ask("deployments/filter", {"deployments": {"name": {"any_": [deployment]}}})
    return str(serving.ask(f"deployments/{found['id']}/create_flow_run", {"parameters": parameters})["id"])


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 900) -> Any:
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError):  # a server without its database answers 500
            if found := condition():
                return found
        assert time.monotonic() < end, f"not seen within {seconds:g} s: {what}"
        time.sleep(0.5)


def ended(serving: Any, run: str) -> dict[str, Any] | None:
    found = dict(serving.ask(f"flow_runs/{run}"))
    return None if found["state_type"] in ("SCHEDULED", "PENDING", "RUNNING") else found


@pytest.mark.parametrize("place", ["direct", "behind_a_server"])
def test_a_database_that_is_killed_in_mid_run_costs_nothing(
    place: str, postgres: Any, request: pytest.FixtureRequest
) -> None:
    serving = request.getfixturevalue(place)
    out = serving.runs / "out"
    policy = {**TINY["policy"], "steps": STEPS, "save_every": STEPS}
    run = begin(serving, "train", **{**TINY, "policy": policy, "method": "awpo", "out": str(out)})
    metrics = out / "embedded-1m" / "seed-0" / "awpo" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, "training has begun")
    postgres.kill()
    time.sleep(AWAY_SECONDS)
    postgres.start()
    found = wait_for(lambda: ended(serving, run), "the run ends")
    log = (serving.runs / "logs" / "prefect-worker.log").read_text()[-3000:]
    assert found["state_type"] == "COMPLETED", f"{found['state']}\n{log}"

    def states() -> list[str]:
        tasks = serving.ask("task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return [task["state_type"] for task in tasks]

    # Prefect's server writes states of tasks down as it hears of them, a little later.
    wait_for(lambda: set(states()) == {"COMPLETED"}, "all tasks are Completed", 60)
    assert len(states()) >= 10
    client = MlflowClient(serving.mlflow)
    experiment = client.get_experiment_by_name("awpo")
    assert experiment
    runs = client.search_runs([experiment.experiment_id], max_results=500)
    assert {one.info.run_name: one.info.status for one in runs if one.info.status != "FINISHED"} == {}
    told = json.loads((metrics.parent.parent / ".awpo.mlflow.json").read_text())
    history = client.get_metric_history(told["run_id"], "loss")
    assert sorted(one.step for one in history) == list(range(1, STEPS + 1))
    assert {item.path for item in client.list_artifacts(told["run_id"])} >= {"config.json", "logs"}


def test_a_sweep_of_four_cells_at_once(direct: Any) -> None:
    direct.ask("v2/concurrency_limits/gpu", {"limit": 4}, "PATCH")
    out = direct.runs / "sweep"
    parameters = {**TINY, "models": ["embedded-1m"], "methods": ["grpo", "awpo"], "seeds": [0, 1], "init": "base"}
    run = begin(direct, "sweep", **parameters, out=str(out))
    found = wait_for(lambda: ended(direct, run), "it ends")
    assert found["state_type"] == "COMPLETED", found["state"]
    children = direct.ask("flow_runs/filter", {"flow_runs": {"parent_flow_run_id": {"any_": [found["id"]]}}})
    assert {child["state_type"] for child in children} == {"COMPLETED"}
    cells = {f"{method} · embedded-1m · seed {seed}" for method in ("grpo", "awpo") for seed in (0, 1)}
    assert {child["name"] for child in children} >= cells
    client = MlflowClient(direct.mlflow)
    experiment = client.get_experiment_by_name("awpo")
    assert experiment
    runs = client.search_runs([experiment.experiment_id], max_results=500)
    statuses = {run.info.run_name: run.info.status for run in runs}
    assert {statuses[name] for name in cells} == {"FINISHED"}
    assert len(json.loads((out / "summary.json").read_text())["methods"]) >= 4
    assert direct.ask("v2/concurrency_limits/gpu")["active_slots"] == 0
