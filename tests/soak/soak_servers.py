"""The servers and the worker of a soak: started, taken away, brought back as a supervisor does, and watched."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak_watch import MARK, Life, held, processes_of, tree

from awpo.processes import end_group
from flows.environment import DEFAULTS
from flows.guard import GRACE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
POOL = "awpo-local"
SERVED = "soak"
"""Name of the model that is served."""
AT_ONCE = 3
"""Trainings that the deployment lets run at a time."""
SLOTS = 4
"""Of the limit `gpu`: a training in two processes takes two, and two others go on beside it."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Service:
    """A server or worker that is started again after it was killed, and watched."""

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    lives: list[Life] = field(default_factory=list)

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started = time.monotonic()
        self.lives.append(Life(self.name, []))

    def send(self, number: signal.Signals, *, alone: bool = False) -> None:
        """A signal to the process, and unless `alone` to those that it started and that are no run's."""
        assert self.process
        with suppress(ProcessLookupError):
            (os.kill if alone else os.killpg)(self.process.pid, number)
            if number == signal.SIGKILL:
                self.process.wait()

    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None


class Servers:
    """Prefect, MLflow, a worker, and later a model; `folder` is theirs, runs may also name `other`. A context manager."""

    def __init__(self, folder: Path, other: Path | None = None) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.runs.mkdir(parents=True)
        prefect, mlflow, self._model_port = free_port(), free_port(), free_port()
        self.prefect, self.mlflow = f"http://127.0.0.1:{prefect}", f"http://127.0.0.1:{mlflow}"
        self.model = f"http://127.0.0.1:{self._model_port}/v1"
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "AWPO_"))}
        common = {
            **plain,
            **DEFAULTS,  # as `awpo serve` starts them
            MARK: str(folder),
            "AWPO_RUNS": str(self.runs),
            "AWPO_ROOTS": os.pathsep.join(str(root) for root in (folder, other) if root),
            "OMP_NUM_THREADS": "1",
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": f"{self.prefect}/api",
            "PYTHONPATH": str(ROOT),
        }
        server = {**common, "PREFECT_SERVER_API_HOST": "127.0.0.1", "PREFECT_SERVER_API_PORT": str(prefect)}
        store = {
            "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{self.runs / 'mlflow.db'}",
            "MLFLOW_DEFAULT_ARTIFACT_ROOT": str(self.runs / "artifacts"),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
        self.environment = {**common, "MLFLOW_TRACKING_URI": self.mlflow}
        python = [sys.executable, "-m"]
        mlflow_command = [*python, "mlflow", "server", "--host", "127.0.0.1", "--port", str(mlflow), "--workers", "1"]
        worker = [*python, "prefect", "worker", "start", "--pool", POOL]
        self.services = {
            "Prefect": Service("Prefect", [*python, "prefect", "server", "start"], server, folder / "prefect.log"),
            "MLflow": Service("MLflow", mlflow_command, {**common, **store}, folder / "mlflow.log"),
            "worker": Service("worker", worker, self.environment, folder / "worker.log"),
        }
        self.away: dict[str, tuple[str, float]] = {}  # how, and until when by the monotonic clock

    def __enter__(self) -> Servers:
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        for name, address in (("Prefect", f"{self.prefect}/api/health"), ("MLflow", f"{self.mlflow}/health")):
            self.services[name].start()
            self.wait(lambda address=address: answers(address), f"{name} answers", 300)  # type: ignore[misc]
        setup = [sys.executable, "-m", "flows.cli", "setup"]
        subprocess.run(setup, env=self.environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        found = self.ask("deployments/filter", {"deployments": {"name": {"any_": ["train", "evaluate"]}}})
        self.deployments = {deployment["name"]: deployment["id"] for deployment in found}
        self.ask(f"deployments/{self.deployments['train']}", {"concurrency_limit": AT_ONCE}, "PATCH")
        self.ask("v2/concurrency_limits/gpu", {"limit": SLOTS}, "PATCH")
        self.services["worker"].start()

    def serve(self, checkpoint: Path) -> None:
        """Serves a model beside the others."""
        command = [sys.executable, "-m", "awpo.serving.server", str(checkpoint), "--name", SERVED]
        command += ["--port", str(self._model_port)]
        self.services["model"] = Service("model", command, self.environment, self.folder / "model.log")
        self.services["model"].start()
        self.wait(lambda: answers(self.model.removesuffix("/v1") + "/health"), "the model answers", 300)

    def __exit__(self, *_: object) -> None:
        for name in ("worker", "model", "MLflow", "Prefect"):
            service = self.services.get(name)
            if service and service.process:
                service.send(signal.SIGCONT)
                end_group(service.process)

    def wait(self, condition: Callable[[], Any], what: str, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while True:
            with suppress(OSError):
                if found := condition():
                    return found
            if time.monotonic() > end:
                raise RuntimeError(f"not seen within {seconds:g} s: {what}; logs are in {self.folder}")
            time.sleep(1.0)

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        """What Prefect's API answers. Raises OSError where it does not."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.prefect}/api/{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=20) as response:
            return json.loads(response.read() or "null")

    def take_away(self, name: str, deed: str, seconds: float) -> None:
        """Kills (SIGKILL), ends (SIGTERM) or stops (SIGSTOP) a service for so long."""
        number = {"kill": signal.SIGKILL, "end": signal.SIGTERM, "stop": signal.SIGSTOP}[deed]
        # The memory killer takes the worker alone: its runs have sessions of their own.
        self.services[name].send(number, alone=name == "worker")
        self.away[name] = deed, time.monotonic() + seconds

    def come_back(self, *, all_of_them: bool = False) -> list[str]:
        """Brings back whoever was away long enough, and starts again whoever ended by itself; returns what is wrong."""
        wrong = []
        for name, service in self.services.items():
            deed, until = self.away.get(name, ("", 0.0))
            late = time.monotonic() - until
            if deed and late < 0 and not all_of_them:
                continue
            if deed == "end" and not service.ended() and late < GRACE_SECONDS:
                continue  # it does not work any more, and has not ended
            if deed == "stop":
                service.send(signal.SIGCONT)
            elif deed or service.ended():
                if not deed:
                    assert service.process
                    wrong.append(f"{name} ended by itself, with code {service.process.returncode}")
                service.send(signal.SIGKILL)  # what it started goes too, as with `flows.guard`
                service.start()
            self.away.pop(name, None)
        return wrong

    def sample(self) -> dict[str, dict[str, float]]:
        """What each service holds now, itself and what it started; those that are away are left out."""
        alive, found = processes_of(self.folder), {}
        for name, service in self.services.items():
            if name in self.away or not service.process:
                continue
            numbers = held(tree(alive, service.process.pid))
            if numbers:
                mib, files, count = numbers
                seconds = time.monotonic() - service.started
                service.lives[-1].samples.append((seconds, mib, files))
                found[name] = {"life": len(service.lives), "mib": round(mib, 1), "files": files, "processes": count}
        return found


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
