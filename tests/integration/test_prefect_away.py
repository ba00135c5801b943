"""The Prefect server is killed in the middle of a run, and comes back: the run ends true, and nothing of it is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

pytestmark = [pytest.mark.slow, pytest.mark.servers]

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 420
SHORT_SECONDS, MINUTE_SECONDS = 15.0, 60.0
STEPS = 3
# Two stages with workers of their own, each of which waits until it is told to go on.
WORKER = """
import sys, time
from pathlib import Path
from awpo.artifacts import open_stage
from awpo.events import RunLog
from awpo.processes import worker_main


def run(job):
    out = Path(job["out"])
    with open_stage(out, "sft", {}, job["config"]) as stage:
        log = RunLog(out)
        for step in range(1, job["steps"] + 1):
            log.metrics(step, {"loss": 1.0 / step})
            log.progress(step, job["steps"], "steps")
            while step == 2 and not (out.parent / f"go-{out.name}").exists():
                time.sleep(0.1)
        (out / "result.txt").write_text("done")
        stage.finish({"loss": 0.5})


if __name__ == "__main__":
    worker_main(run)
"""
FLOW = """
import sys

import flows.prefect_home

from pathlib import Path
from prefect import flow, task
from awpo.config_training import SftConfig
from tasks.stage_run import Work, stage_run
from tasks.tracking_store import connect

OUT = Path(sys.argv[1])


@task
def train(name, steps):
    config = SftConfig(steps=steps)
    work = Work("sft", f"train {name}", OUT / name, {}, config, {"model": "tiny"})
    with stage_run(work, connect()) as stage:
        job = {"out": str(work.folder), "steps": steps, "config": config.identity()}
        stage.work_apart("waiting_worker", job, threads=1)


@flow
def two_stages(steps):
    train("first", steps)
    train("second", steps)


if __name__ == "__main__":
    from flows.limits import ensure_limits

    ensure_limits()
    two_stages(int(sys.argv[2]))
"""


@dataclass
class Server:
    folder: Path
    port: int
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                command, env=self.environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
        wait_for(lambda: self.ask("health") is True, "the server answers")

    def kill(self) -> None:
        assert self.process
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        address = f"http://127.0.0.1:{self.port}/api/{path}"
        with suppress(OSError):
            request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as response:
                return json.loads(response.read())
        return None


def wait_for(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not seen within {PATIENCE} s: {what}"
        time.sleep(0.2)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "AWPO_"))}
    (tmp_path / "waiting_worker.py").write_text(WORKER)
    (tmp_path / "two_stages.py").write_text(FLOW)
    environment = {
        **plain,
        "AWPO_RUNS": str(tmp_path / "runs"),
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "DO_NOT_TRACK": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
    }
    found = Server(tmp_path, port, environment)
    found.start()
    yield found
    with suppress(ProcessLookupError):
        found.kill()


def test_a_server_that_is_away_for_a_minute_costs_nothing(server: Server, tmp_path: Path) -> None:
    """First in the moment when one stage ends and the next one begins, then while a stage holds a slot for longer than
    its lease lasts."""
    out = tmp_path / "out"
    out.mkdir()
    with open(tmp_path / "flow.log", "wb") as log:
        flow = subprocess.Popen(
            [sys.executable, str(tmp_path / "two_stages.py"), str(out), str(STEPS)],
            env=server.environment,
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
    try:
        for name, away in (("first", SHORT_SECONDS), ("second", MINUTE_SECONDS)):
            metrics = out / name / "metrics.jsonl"
            wait_for(
                lambda path=metrics: flow.poll() is not None or (path.exists() and path.read_text().count("\n") == 2),
                f"the {name} stage is at work",
            )
            assert flow.poll() is None, (tmp_path / "flow.log").read_text()[-3000:]
            server.kill()
            if name == "first":
                (out / "go-first").touch()
            time.sleep(away)
            server.start()
            (out / f"go-{name}").touch()
        code = flow.wait(PATIENCE)
    finally:
        flow.kill()
        flow.wait()
    told = (tmp_path / "flow.log").read_text()
    assert code == 0, told[-3000:]
    [run] = server.ask("flow_runs/filter", {})
    assert run["state_type"] == "COMPLETED"

    def tasks() -> list[str]:
        return sorted(task["state_type"] for task in server.ask("task_runs/filter", {}))

    wait_for(lambda: tasks() == ["COMPLETED"] * 2, "the states of both stages")
    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("awpo")
    assert experiment
    runs = client.search_runs([experiment.experiment_id])
    assert [found.info.status for found in runs] == ["FINISHED"] * 2
    for found in runs:
        steps = [metric.step for metric in client.get_metric_history(found.info.run_id, "loss")]
        assert steps == list(range(1, STEPS + 1))
    [limit] = [one for one in server.ask("v2/concurrency_limits/filter", {}) if one["name"] == "gpu"]
    wait_for(lambda: server.ask(f"v2/concurrency_limits/{limit['id']}")["active_slots"] == 0, "no slot is held")
