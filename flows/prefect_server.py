"""The Prefect server that a command works with: one that runs already, or a temporary one of its own.

Prefect would start a temporary server by itself, but as a child that Ctrl-C reaches too: the server is gone at once, and
the command tries for minutes to tell it that it was stopped. Ours runs under `flows.guard`, out of reach of the
terminal's signals, and ends with the command.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from awpo.errors import UserError
from awpo.files import write_atomically
from flows.children import Child
from tasks.layout import runs_root

HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[1]
DRAIN_SECONDS = 10.0
# Set beside PREFECT_API_URL where the server ends with the command: links to its pages would soon be dead.
TEMPORARY = "AWPO_TEMPORARY_SERVER"
# As `tasks.links.MLFLOW_URL`, without importing MLflow.
MLFLOW_URL = "AWPO_MLFLOW_URL"


def port_is_free(port: int) -> bool:
    """Whether a server could listen on that loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A loopback port that nobody uses now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def answers(url: str, seconds: float = 2.0) -> bool:
    """Whether something answers well under `url`."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as response:
            return bool(response.status < 400)
    except (OSError, urllib.error.URLError):
        return False


def listens(url: str, seconds: float = 5.0) -> bool:
    """Whether a server is there at all, whatever it answers."""
    try:
        with urllib.request.urlopen(url, timeout=seconds):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def server_environment(port: int) -> dict[str, str]:
    """The environment of a server of ours, and of its worker and deployments."""
    own = {"PREFECT_SERVER_API_HOST": HOST, "PREFECT_SERVER_API_PORT": str(port)}
    return client_environment(f"http://{HOST}:{port}/api") | own


def client_environment(api_url: str) -> dict[str, str]:
    """The environment of what talks to a server: paths absolute, as its working folder is the project's."""
    return {
        **os.environ,
        "PREFECT_API_URL": api_url,
        "AWPO_RUNS": str(runs_root()),
        "PWD": str(ROOT),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }


def prefect_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "prefect", *arguments]


def _announcement() -> Path:
    return runs_root() / "serve.json"


@contextmanager
def announced(api_url: str, mlflow_url: str | None = None) -> Iterator[None]:
    """Lets commands with the same runs folder find the servers, for as long as the block runs."""
    path = _announcement()
    told = {"prefect_api_url": api_url, "mlflow_url": mlflow_url, "process": os.getpid()}
    write_atomically(path, json.dumps(told) + "\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running_servers() -> dict[str, Any] | None:
    """What a running `awpo serve` of this runs folder announced of itself; None where none answers."""
    try:
        announcement: dict[str, Any] = json.loads(_announcement().read_text("utf-8"))
        url = str(announcement["prefect_api_url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return announcement if answers(f"{url}/health") else None


def join_running_server() -> str | None:
    """Uses the server of a running `awpo serve` of the same runs folder, so that its UI shows this command's runs.

    Without it a second, temporary server would work on the same database. Returns the API's address, or None.
    Raises UserError where the environment names a server that is not there.
    """
    if told := os.environ.get("PREFECT_API_URL"):
        if not listens(f"{told.rstrip('/')}/health"):
            raise UserError(f"no Prefect server answers at {told}; start it, or unset PREFECT_API_URL")
        return told
    announcement = running_servers()
    if announcement is None:
        return None
    url = str(announcement["prefect_api_url"])
    os.environ["PREFECT_API_URL"] = url
    if pages := announcement.get("mlflow_url"):
        os.environ.setdefault(MLFLOW_URL, str(pages))
    return url


@contextmanager
def temporary_server() -> Iterator[str]:
    """A Prefect server on a free port, on the database of Prefect's home, for as long as the block runs.

    Yields its API's address, which stands in the environment too. Raises ServerFailed where it does not come up.
    """
    port = free_port()
    url = f"http://{HOST}:{port}/api"
    environment = {**server_environment(port), "PREFECT_SERVER_LOGGING_LEVEL": "WARNING"}
    command = prefect_command("server", "start", "--no-scheduler", "--no-late-runs")
    server = Child("the Prefect server", command, environment, runs_root() / "logs" / "prefect-temporary.log", ROOT)
    try:
        server.wait_for(lambda: answers(f"{url}/health"))
        os.environ |= {"PREFECT_API_URL": url, TEMPORARY: "1"}
        try:
            yield url
        finally:
            _send_the_rest()
    finally:
        for name in ("PREFECT_API_URL", TEMPORARY):
            os.environ.pop(name, None)
        server.stop()


def _send_the_rest() -> None:
    """Sends the logs and events that Prefect still holds; at exit it would look in vain for the server, for long."""
    if "prefect" in sys.modules:
        from prefect.events.worker import EventsWorker
        from prefect.logging.handlers import APILogWorker

        EventsWorker.drain_all(timeout=DRAIN_SECONDS)
        APILogWorker.drain_all(timeout=DRAIN_SECONDS)
