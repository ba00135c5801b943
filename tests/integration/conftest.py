"""Servers as a person starts them, and a browser to look at their pages."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


SCREENSHOTS = ROOT / ".screenshots"
# As root there is no sandbox; without the rest, Chromium asks the network for things at every start.
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Eyes:
    """A page of a browser, and what a person does on it. Waits up to `PATIENCE`; the machine may be busy."""

    def __init__(self, page: Any) -> None:
        self.page = page
        page.set_default_timeout(PATIENCE * 1000)

    def property(self, *path: str) -> Any:
        """The part of a deployment's form for a parameter, by its label and those of the parameters around it."""
        place = self.page.locator("form")
        for name in path:
            label = f'.schema-form-property__label:text-matches("^{name}( \\\\(Optional\\\\))?$")'
            place = place.locator(f".schema-form-property:has(> .p-label__header {label})").first
        return place

    def fill(self, value: str, *path: str) -> None:
        """Types `value` into the field of a parameter."""
        self.property(*path).locator("input, textarea").first.fill(value)

    def open_form(self, serving: Serving, deployment: str) -> None:
        """From the list of deployments to the form of one."""
        self.page.goto(f"{serving.prefect}/deployments")
        self.page.get_by_role("link", name=deployment, exact=True).first.click()
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_text("Custom run").click()
        self.property("out").wait_for()

    def submit(self) -> None:
        """Submits the form, and goes on to the run's page."""
        self.page.get_by_role("button", name="Submit").click()
        self.page.locator('a[href*="/runs/flow-run/"]').first.click()
        self.page.wait_for_url("**/runs/flow-run/**")

    def wait_for_the_end(self, serving: Serving) -> str:
        """Waits on a run's page until the run has ended; returns its state as the page shows it.

        Meanwhile the page is left: its moving graph, drawn without a graphics card, takes half of a core from the run.
        """
        page = self.page.url
        self.page.goto("about:blank")
        run = page.rstrip("/").rpartition("/")[2].partition("?")[0]
        end = time.monotonic() + 2 * PATIENCE
        while serving.ask(f"flow_runs/{run}")["state_type"] in ("SCHEDULED", "PENDING", "RUNNING"):
            assert time.monotonic() < end, f"{page} has not ended"
            time.sleep(1)
        self.page.goto(page)
        badge = self.page.locator(".page-heading-flow-run__meta .state-badge")
        badge.filter(has_text=re.compile("Completed|Failed|Crashed|Cancelled|TimedOut")).wait_for()
        return str(badge.inner_text())

    def see(self, name: str) -> None:
        """Keeps a picture of what is to be seen, in a folder that git ignores."""
        SCREENSHOTS.mkdir(exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")


@pytest.fixture
def eyes() -> Iterator[Eyes]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: make install")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine; on Debian: apt-get install chromium")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield Eyes(browser.new_page(viewport={"width": 1400, "height": 900}))
        browser.close()
