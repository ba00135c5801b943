"""Metrics go to a server that hangs or is killed in the middle: kept in the file, and sent later, each once."""

from __future__ import annotations

import os
import shutil
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

import pytest

from awpo.events import RunLog
from tasks.relay import MetricsRelay
from tasks.tracking import TrackedRun, open_run
from tasks.tracking_store import Tracking, connect

pytestmark = [pytest.mark.slow, pytest.mark.servers]

PATIENCE = 300


def steps_of(run: TrackedRun) -> list[int]:
    return [metric.step for metric in run.client.get_metric_history(run.run_id, "loss")]


@dataclass
class Server:
    """MLflow's server on a SQLite store."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        store = {
            "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{self.folder / 'mlflow.db'}",
            "MLFLOW_DEFAULT_ARTIFACT_ROOT": str(self.folder / "artifacts"),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*command, "--workers", "1"],
                env={**os.environ, **store},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(self.answers)

    def answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.address}/health", timeout=5) as response:
            return bool(response.status == 200)
        return False

    def send(self, number: signal.Signals) -> None:
        assert self.process
        os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture
def server(empty_store: Path, tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    del tracking
    folder = tmp_path / "server"
    folder.mkdir()
    shutil.copy(empty_store, folder / "mlflow.db")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found = Server(folder, probe.getsockname()[1])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", found.address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    found.start()
    yield found
    found.send(signal.SIGCONT)
    found.send(signal.SIGKILL)


def test_a_server_that_hangs_and_one_that_is_killed_miss_nothing(server: Server, tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    stage.mkdir()
    run = open_run(connect(), "stage", stage, "w", {}, begun=True)
    log = RunLog(stage)
    with MetricsRelay(run, stage, every=0.1) as relay:
        log.metrics(1, {"loss": 1.0})
        wait_for(lambda: steps_of(run) == [1])
        server.send(signal.SIGSTOP)
        log.metrics(2, {"loss": 1.0})
        time.sleep(4)  # longer than a request waits for its answer
        server.send(signal.SIGCONT)
        wait_for(lambda: steps_of(run) == [1, 2])
        server.send(signal.SIGKILL)
        for step in (3, 4):
            log.metrics(step, {"loss": 1.0})
        time.sleep(1)
        server.start()
        log.metrics(5, {"loss": 1.0})
    assert relay.problem is None
    assert sorted(set(steps_of(run))) == [1, 2, 3, 4, 5]
    assert len(steps_of(run)) == 5, "what a hung server took after all must not be sent twice"
