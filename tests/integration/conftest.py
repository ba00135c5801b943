"""Servers as a person starts them, and a browser to look at their pages."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.prefect}/api/{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read() or "null")

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


@contextmanager
def started_serving(folder: Path, extra: dict[str, str]) -> Iterator[Serving]:
    """`awpo serve` with a runs folder in `folder` and `extra` in its environment."""
    prefect_port, mlflow_port = free_ports()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    environment |= {"AWPO_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "true"}
    environment["PYTHONPATH"] = str(ROOT)
    environment["AWPO_ROOTS"] = str(folder.parent)  # the folders of tests, which runs from forms write to
    environment |= extra
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
    try:
        yield Serving(
            process,
            f"http://127.0.0.1:{prefect_port}",
            f"http://127.0.0.1:{mlflow_port}",
            client_environment,
            folder / "runs",
        )
    finally:
        process.kill()  # not asked: the children must notice by themselves, which a test looks at
        process.wait()
        for pipe in (process.stdout, process.stderr):
            pipe.close()


@pytest.fixture(scope="session")
def serve() -> Callable[[Path, dict[str, str]], AbstractContextManager[Serving]]:
    """Starts `awpo serve`; see `started_serving`."""
    return started_serving


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, told: Told) -> Iterator[Serving]:
    address = f"http://127.0.0.1:{told.port}/hook?token=planted-secret"
    with started_serving(tmp_path_factory.mktemp("serve"), {"AWPO_NOTIFY_URL": address}) as found:
        yield found


@dataclass
class Postgres:
    """A cluster of Debian's Postgres in a folder of its own, with a database for Prefect and one for MLflow."""

    programs: Path
    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    password: str = "planted-secret"

    @property
    def owner(self) -> dict[str, Any]:
        """Postgres refuses to run as root: then it runs as the user of Debian's package."""
        if os.geteuid() != 0:
            return {}
        user = pwd.getpwnam("postgres")
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}

    def address(self, database: str, scheme: str = "postgresql") -> str:
        user = "prefect" if database == "prefect" else "mlflow"
        return f"{scheme}://{user}:{self.password}@127.0.0.1:{self.port}/{database}"

    def make(self) -> None:
        secret = self.folder / "password"
        secret.write_text(self.password)
        if self.owner:
            for path in (self.folder, secret):
                os.chown(path, self.owner["user"], self.owner["group"])
        self.run("initdb", "--pgdata", str(self.folder / "data"), "--username=awpo", "--auth=scram-sha-256",
                 f"--pwfile={secret}", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync")  # fmt: skip
        self.start()
        # As infra/compose.yaml's Postgres makes its databases, each with a role of its own.
        where = {"PGHOST": "127.0.0.1", "PGPORT": str(self.port), "PGPASSWORD": self.password, "POSTGRES_USER": "awpo"}
        secrets = {"PREFECT_PASSWORD": self.password, "MLFLOW_PASSWORD": self.password}
        path = {"PATH": f"{self.programs}:{os.environ['PATH']}"}
        subprocess.run([ROOT / "infra" / "docker" / "databases.sh"], env={**where, **secrets, **path}, check=True)
        self.run("createdb", *self.where(), "--owner=mlflow", "moved")

    def run(self, program: str, *arguments: str) -> None:
        environment = {**os.environ, "PGPASSWORD": self.password}
        done = subprocess.run(
            [self.programs / program, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            **self.owner,
        )
        assert done.returncode == 0, done.stderr

    def where(self) -> list[str]:
        return ["--host=127.0.0.1", f"--port={self.port}", "--username=awpo"]

    def start(self) -> None:
        """Starts it, and waits until it answers; after a kill it recovers first."""
        options = ["-k", str(self.folder), "-c", "listen_addresses=127.0.0.1"]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [self.programs / "postgres", "-D", self.folder / "data", "-p", str(self.port), *options],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self.owner,
            )
        ready = [str(self.programs / "pg_isready"), "--quiet", *self.where(), "--dbname=postgres"]
        end = time.monotonic() + PATIENCE
        while subprocess.run(ready, check=False).returncode != 0:
            assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
            assert time.monotonic() < end, "Postgres does not answer"
            time.sleep(0.2)

    def kill(self) -> None:
        """As a power cut would: without a word to anybody."""
        assert self.process
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    if not found:
        pytest.skip("no Postgres on this machine; on Debian: apt-get install postgresql")
    pytest.importorskip("psycopg", reason="no psycopg: make install")
    # Not under pytest's folders, which are of root's alone; and short, as sockets' paths are.
    with tempfile.TemporaryDirectory(prefix="awpo-pg-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = Postgres(found[-1].parent, Path(folder), free_ports()[0])
        cluster.make()
        yield cluster
        cluster.kill()


@dataclass
class Bucket:
    """A bucket of an S3 server, and how everything that is started finds it."""

    address: str
    name: str = "awpo"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "MLFLOW_S3_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "planted-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def keys(self) -> list[str]:
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=self.address,
            aws_access_key_id="key",
            aws_secret_access_key="planted-secret",
            region_name="us-east-1",
        )
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return [item["Key"] for page in pages for item in page.get("Contents", [])]


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    """An S3 server (moto's) in a process of its own, with the bucket that infra/docker/bucket.py makes."""
    pytest.importorskip("moto", reason="no moto: make install")
    port = free_ports()[0]
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = Bucket(f"http://127.0.0.1:{port}")
    try:
        end = time.monotonic() + PATIENCE
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            assert process.poll() is None, "moto's server ended"
            assert time.monotonic() < end, "moto's server does not answer"
            time.sleep(0.2)
        for said in ("made", "there"):
            done = subprocess.run(
                [sys.executable, ROOT / "infra" / "docker" / "bucket.py", found.name],
                env={**os.environ, **found.environment},
                capture_output=True,
                text=True,
                check=True,
            )
            assert said in done.stdout
        yield found
    finally:
        process.kill()
        process.wait()


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
