"""`awpo serve` as a person starts it: a run started by `prefect deployment run` is picked up by the worker and completes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.servers]
PATIENCE = 420  # seconds; the machine may be busy with other tests


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


@dataclass
class Serving:
    process: subprocess.Popen[str]
    prefect: str
    mlflow: str
    environment: dict[str, str]
    runs: Path

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.prefect}/api/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def run(self, deployment: str, **parameters: Any) -> dict[str, Any]:
        """Starts a run as a person does, and waits for its success; returns the flow run."""
        started = self.start(deployment, **parameters)
        name = deployment.partition("/")[2]
        newest = {"deployments": {"name": {"any_": [name]}}, "sort": "START_TIME_DESC", "limit": 1}
        [found] = self.ask("flow_runs/filter", newest)
        log = (self.runs / "logs" / "prefect-worker.log").read_text()[-3000:]
        assert found["state_type"] == "COMPLETED", (
            f"{found['state']}\n{started.stdout[-1000:]}{started.stderr[-1000:]}\n{log}"
        )
        return dict(found)

    def start(self, deployment: str, **parameters: Any) -> subprocess.CompletedProcess[str]:
        """Starts a run as a person does, and waits for its end."""
        given = [part for key, value in parameters.items() for part in ("--param", f"{key}={json.dumps(value)}")]
        return subprocess.run(
            [sys.executable, "-m", "prefect", "deployment", "run", deployment, *given, "--watch"],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )

    def awpo(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command in the same environment."""
        return subprocess.run(
            [sys.executable, "-m", "flows.cli", *arguments],
            env={**self.environment, "COLUMNS": "160"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )


@dataclass
class Told:
    """Where failures are told to: a chat system's webhook, as far as the server can tell."""

    port: int
    messages: list[tuple[str, bytes]]

    def wait(self, seconds: float = 60) -> tuple[str, dict[str, Any]]:
        end = time.monotonic() + seconds
        while not self.messages and time.monotonic() < end:
            time.sleep(0.2)
        kind, body = self.messages[0]
        return kind, json.loads(body)


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    messages: list[tuple[str, bytes]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append((self.headers["Content-Type"], self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Told(server.server_port, messages)
        server.shutdown()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, told: Told) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("serve")
    prefect_port, mlflow_port = free_ports()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    environment |= {"AWPO_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "true"}
    environment["PYTHONPATH"] = str(ROOT)
    environment["AWPO_NOTIFY_URL"] = f"http://127.0.0.1:{told.port}/hook?token=planted-secret"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "flows.cli", "serve"),
            *("--prefect-port", str(prefect_port), "--mlflow-port", str(mlflow_port)),
        ],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stderr
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "Ctrl-C" in line:
            break
    else:
        pytest.fail(f"awpo serve ended: {process.stderr.read()}")
    client_environment = {
        **environment,
        "PREFECT_API_URL": f"http://127.0.0.1:{prefect_port}/api",
        "PREFECT_HOME": str(folder / "client"),
    }
    yield Serving(
        process,
        f"http://127.0.0.1:{prefect_port}",
        f"http://127.0.0.1:{mlflow_port}",
        client_environment,
        folder / "runs",
    )
    process.kill()  # not asked: the children must notice by themselves, which the last test looks at
    process.wait()
    for pipe in (process.stdout, process.stderr):
        pipe.close()


def test_all_deployments_are_registered(serving: Serving) -> None:
    found = serving.ask("deployments/filter", {})
    assert len(found) == 9
    [nightly] = [deployment for deployment in found if deployment["name"] == "nightly-regression"]
    assert nightly["schedules"][0]["schedule"]["timezone"] == "Europe/Berlin"
    assert {deployment["work_pool_name"] for deployment in found} == {"awpo-local"}
    names = [automation["name"] for automation in serving.ask("automations/filter", {})]
    assert set(names) == {"Crash zombie runs", "Tell of failed runs"}


def test_the_doctor_finds_the_whole_set_up(serving: Serving) -> None:
    found = serving.awpo("doctor")
    assert found.returncode == 0, found.stdout
    for what in ("worker", "deployments", "zombie runs", "failure notification"):
        assert re.search(rf"ok\W+{what}", found.stdout), found.stdout


def test_a_failed_run_is_told_and_the_address_is_kept_secret(serving: Serving, told: Told) -> None:
    started = serving.start("prepare-data/prepare-data", source="/no/such/source")
    assert "Failed" in started.stdout
    kind, message = told.wait()
    assert kind == "application/json"
    assert "is Failed" in message["text"]
    assert "/no/such/source" in message["text"]
    assert f"{serving.prefect}/runs/flow-run/" in message["text"]
    everywhere = [path for path in serving.runs.rglob("*") if path.is_file()]
    assert everywhere
    assert not [path for path in everywhere if b"planted-secret" in path.read_bytes()]


def test_setting_up_again_doubles_nothing(serving: Serving) -> None:
    again = serving.awpo("setup")
    assert again.returncode == 0, again.stderr
    assert len(serving.ask("automations/filter", {})) == 2
    assert len(serving.ask("deployments/filter", {})) == 9


def test_data_are_prepared_by_the_worker(serving: Serving, tmp_path: Path) -> None:
    small = {"train_dialogues": 20, "validation_dialogues": 3, "test_dialogues": 3}
    run = serving.run("prepare-data/prepare-data", out=str(tmp_path / "data"), corpus=small)
    manifest = json.loads((tmp_path / "data" / "data" / "instances" / "manifest.json").read_text())
    assert manifest["dialogues"] == 29
    artifacts = serving.ask("artifacts/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
    assert {"write-corpus-seed-0", "decompose-dialogues-jsonl"} <= {artifact["key"] for artifact in artifacts}


def test_a_model_is_trained_by_the_worker(serving: Serving, tmp_path: Path) -> None:
    out = tmp_path / "train"
    run = serving.run(
        "train/train",
        out=str(out),
        method="awpo",
        corpus={"train_dialogues": 20, "validation_dialogues": 3, "test_dialogues": 3},
        sft={"steps": 2, "batch_size": 4, "save_every": 2},
        policy={
            "steps": 2,
            "prompts_per_rollout": 2,
            "group_size": 2,
            "steps_per_rollout": 2,
            "micro_batch_size": 2,
            "max_completion_length": 16,
            "save_every": 2,
        },
        evaluation={
            "benchmarks": ["held_out"],
            "instances_per_split": 2,
            "samples": 1,
            "max_completion_length": 16,
        },
    )
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


def test_the_children_end_with_a_killed_parent(serving: Serving) -> None:
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
