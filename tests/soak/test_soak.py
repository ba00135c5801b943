"""What the soak measures and looks at, on processes of its own; `make soak` is the long run."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def watch() -> Iterator[Any]:
    sys.path.insert(0, str(HERE))
    try:
        yield importlib.import_module("soak_watch")
    finally:
        sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def checks(watch: Any) -> Any:
    return importlib.import_module("soak_checks")


def started(code: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}\nprint('ready', flush=True)\nimport time\ntime.sleep(600)"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def test_each_process_is_known_by_what_it_is_for(watch: Any, tmp_path: Path) -> None:
    """A server's tree holds what it started, and not the run that it started; nobody else's process is looked at."""
    mark = {watch.MARK: str(tmp_path)}
    child = (
        "import os, subprocess, sys\n" + "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']{})"
    )
    run = child.format(f", env={{**os.environ, {watch.FLOW_RUN!r}: 'one'}}")
    other = started("", {watch.MARK: str(tmp_path / "other")})
    server = started(f"{child.format('')}\n{run}\nblock = bytearray(64 * 2**20)", mark)
    try:
        alive = watch.processes_of(tmp_path)
        assert len(alive) == 3
        assert other.pid not in alive
        tree = watch.tree(alive, server.pid)
        assert len(tree) == 2
        assert [process.flow_run for process in alive.values() if process not in tree] == ["one"]
        mib, files, count = watch.held(tree)
        assert mib > 64
        assert files >= 6
        assert count == 2
    finally:
        for number in [*watch.processes_of(tmp_path), other.pid]:
            os.kill(number, 9)
        server.wait()
        other.wait()


def test_growth_is_told_of_long_lives_only(watch: Any) -> None:
    short = watch.Life("MLflow", [(10.0 * n, 100.0, 20) for n in range(40)])
    assert short.growth() is None
    grows = watch.Life("MLflow", [(10.0 * n, 100.0 + (n if n > 30 else 0), 20 + n // 10) for n in range(400)])
    told = grows.growth()
    assert (told["mib_warm"], told["mib_at_end"]) == (134.5, 494.5)
    assert told["mib_per_hour_of_second_half"] == pytest.approx(360)
    assert (told["files_warm"], told["files_at_end"]) == (23, 59)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ((100, 20), (173, 40), []),
        ((100, 20), (174, 40), ["server grew from 100 to 174 MiB"]),
        ((100, 20), (100, 41), ["server holds 41 files, and held 20"]),
    ],
)
def test_the_bound(watch: Any, before: tuple[float, float], after: tuple[float, float], told: list[str]) -> None:
    assert watch.too_much("server", before, after) == told


def test_a_locked_folder_is_found(checks: Any, tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    (tmp_path / "free").mkdir()
    code = f"import fcntl, os\nfcntl.flock(os.open({str(tmp_path / 'held')!r}, os.O_RDONLY), fcntl.LOCK_EX)"
    process = started(code, {})
    try:
        assert checks.locked([tmp_path / "held", tmp_path / "free"]) == [tmp_path / "held"]
    finally:
        process.kill()
        process.wait()
    assert checks.locked([tmp_path / "held"]) == []


@pytest.fixture
def servers(checks: Any, tmp_path: Path) -> Any:
    """Not started: each test says what there is."""
    return importlib.import_module("soak_servers").Servers(tmp_path)


@pytest.mark.parametrize("deed", ["kill", "end", "stop"])
def test_a_service_that_is_taken_away_comes_back(servers: Any, deed: str, tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    service = importlib.import_module("soak_servers").Service("MLflow", sleeper, dict(os.environ), tmp_path / "log")
    servers.services = {"MLflow": service}
    service.start()
    try:
        first = service.process
        assert servers.come_back() == []
        assert service.process is first
        servers.take_away("MLflow", deed, 600.0)
        if deed == "end":
            first.wait(60)
        assert servers.come_back() == []
        assert "MLflow" in servers.away, "it is not time yet"
        while deed == "stop" and Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.1)
        assert servers.come_back(all_of_them=True) == []
        assert servers.away == {}
        assert (service.process is first) == (deed == "stop")
        assert service.process.poll() is None
        assert len(service.lives) == (1 if deed == "stop" else 2)
        service.process.kill()
        service.process.wait()
        assert servers.come_back() == ["MLflow ended by itself, with code -9"]
        assert service.process.poll() is None
    finally:
        service.process.kill()
        service.process.wait()


def test_an_attempt_whose_beginning_was_not_answered_is_begun_once(servers: Any, tmp_path: Path) -> None:
    """Prefect made the run, and was killed before it said so; meanwhile the attempt before is not counted again."""
    made: dict[str, str] = {}
    asked: list[str] = []

    class Prefect(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            key = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["idempotency_key"]
            asked.append(key)
            made.setdefault(key, f"run-{len(made)}")
            self.answer(500 if asked.count(key) == 1 else 200, {"id": made[key]})

        def do_GET(self) -> None:
            self.answer(200, {"id": self.path, "state_type": "CRASHED", "state": {"message": "gone"}})

        def answer(self, status: int, body: dict[str, Any]) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None: ...

    module = importlib.import_module("soak")
    with HTTPServer(("127.0.0.1", 0), Prefect) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.prefect, servers.deployments = f"http://127.0.0.1:{server.server_port}", {"train": "one"}
        soak = module.Soak(servers, tmp_path / "out.jsonl", 0)
        pipeline = module.Pipeline(0, tmp_path / "out")
        for _ in range(4):  # not answered; begun; ended, and not begun again; begun again
            assert soak.go_on([pipeline], {}) == []
        soak.go_on([pipeline], {})
        server.shutdown()
    assert pipeline.flow_runs == ["run-0", "run-1"]
    assert soak.ends == {"CRASHED": 1}


def test_a_fault_that_finds_nobody_waits_and_another_one_strikes(watch: Any, servers: Any, tmp_path: Path) -> None:
    module = importlib.import_module("soak")
    stage = started("import sys; sys.argv[1:] = ['awpo.worker']", {watch.MARK: str(tmp_path), watch.FLOW_RUN: "one"})
    try:
        alive = watch.processes_of(tmp_path)
        soak = module.Soak(servers, tmp_path / "out.jsonl", 0)
        pipelines = [module.Pipeline(0, tmp_path / "0"), module.Pipeline(1, tmp_path / "1", ["one"], under_way=True)]
        soak._bag = ["kill rank", "kill stage", "cancel run"]
        soak.strike(pipelines, alive, servers_die=False)
        assert stage.wait(60) == -9
        assert soak.faults == {"kill stage": 1}
        assert soak._bag == ["kill rank", "cancel run"]
        assert [pipeline.faults for pipeline in pipelines] == [[], ["kill stage"]]
    finally:
        stage.kill()
        stage.wait()
