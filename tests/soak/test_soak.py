"""What the soak measures and looks at, on processes of its own; `make soak` is the long run."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
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
