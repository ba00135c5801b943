"""`awpo serve`: a Prefect server, a worker and an MLflow UI on this machine, and how commands find them.

Loopback only. The servers and the worker run under `flows.guard` and end with this process, however it ends.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from awpo.errors import UserError
from flows.children import Child
from flows.prefect_server import (
    HOST,
    MLFLOW_URL,
    ROOT,
    announced,
    answers,
    port_is_free,
    prefect_command,
    running_servers,
    server_environment,
)
from flows.registration import POOL, register
from tasks.layout import artifact_root, runs_root, tracking_uri


@dataclass(frozen=True)
class Addresses:
    """Where the servers listen."""

    prefect_port: int
    mlflow_port: int

    @property
    def prefect(self) -> str:
        return f"http://{HOST}:{self.prefect_port}"

    @property
    def mlflow(self) -> str:
        return f"http://{HOST}:{self.mlflow_port}"


def require_port(port: int, option: str) -> None:
    """Raises UserError where the port is in use; `option` is how to choose another."""
    if not port_is_free(port):
        raise UserError(f"port {port} is in use; stop what listens there, or choose another with {option} PORT")


@contextmanager
def served(addresses: Addresses, say: Callable[[str], None]) -> Iterator[list[Child]]:
    """Starts everything, yields what runs, and ends it in the right order: the worker before its server.

    Raises UserError for a port in use or a runs folder that another `awpo serve` works on, ServerFailed where something
    does not come up.
    """
    if told := running_servers():
        raise UserError(
            f"awpo serve runs already on {runs_root()}, at {told['prefect_api_url']}; use that one or end it, or set "
            "AWPO_RUNS to another folder"
        )
    require_port(addresses.prefect_port, "--prefect-port")
    local_store = not tracking_uri().startswith("http")
    if local_store:
        if addresses.mlflow_port == addresses.prefect_port:
            raise UserError(
                f"both servers were given port {addresses.prefect_port}; choose another with --mlflow-port PORT"
            )
        require_port(addresses.mlflow_port, "--mlflow-port")
    logs = runs_root() / "logs"
    environment = server_environment(addresses.prefect_port)
    if local_store:
        environment[MLFLOW_URL] = addresses.mlflow
    with ExitStack() as stack:
        say("starting the Prefect server ...")
        server = _start(stack, "prefect-server", prefect_command("server", "start"), environment, logs)
        server.wait_for(lambda: answers(f"{addresses.prefect}/api/health"))
        children = [server]
        if local_store:
            say("starting the MLflow UI ...")
            mlflow = _start(stack, "mlflow", mlflow_command(addresses), mlflow_environment(environment), logs)
            mlflow.wait_for(lambda: answers(f"{addresses.mlflow}/health"))
            children.append(mlflow)
        say("registering the deployments of prefect.yaml ...")
        register(environment)
        worker = _start(stack, "prefect-worker", prefect_command("worker", "start", "--pool", POOL), environment, logs)
        children.append(worker)
        stack.enter_context(announced(f"{addresses.prefect}/api", environment.get(MLFLOW_URL)))
        yield children


def _start(stack: ExitStack, name: str, command: list[str], environment: dict[str, str], logs: Path) -> Child:
    child = Child(name, command, environment, logs / f"{name}.log", ROOT)
    stack.callback(child.stop)
    return child


def mlflow_command(addresses: Addresses) -> list[str]:
    """MLflow's server; which store it serves says its environment."""
    return [
        *(sys.executable, "-m", "mlflow", "server"),
        *("--host", HOST, "--port", str(addresses.mlflow_port), "--workers", "1"),
    ]


def mlflow_environment(environment: dict[str, str]) -> dict[str, str]:
    """The environment of MLflow's server. The store stands in it and not among the arguments, which everybody on the
    machine can read: the address of a database holds a password.
    """
    return {
        **environment,
        "MLFLOW_BACKEND_STORE_URI": tracking_uri(),
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": artifact_root(),
        # Its job runner, seven processes for features that are not used here, stays out.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def wait_until_stopped(children: list[Child]) -> Child | None:
    """Waits for Ctrl-C or SIGTERM (returns None), or for a child to end by itself (returns it)."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        while True:
            for child in children:
                if child.process.poll() is not None:
                    return child
            time.sleep(0.5)
    except KeyboardInterrupt:
        return None
    finally:
        signal.signal(signal.SIGTERM, before)
