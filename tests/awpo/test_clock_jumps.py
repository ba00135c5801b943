"""The system's clock jumps by an hour while a stage works, as when a machine's time is set: durations stay true.

A small library that is loaded before all others adds an offset, which a file holds, to the clock's time; clocks that
cannot be set stay as they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from awpo.artifacts import read_manifest

HOUR = 3600
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset(void) {
    char text[32] = {0};
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
    if (file < 0) return 0;
    ssize_t got = read(file, text, sizeof text - 1);
    close(file);
    return got > 0 ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, found);
    if (code == 0 && clock == CLOCK_REALTIME) found->tv_sec += offset();
    return code;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a C compiler makes the library that moves the clock")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    made = folder / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, folder / "clock.c", "-ldl"], check=True)
    return made


def run(library: Path, folder: Path, code: str, *, kill: bool = False) -> str:
    """Runs lines of Python, which may call `jump(seconds)`, from a clock that is right; returns what they print."""
    opening = (
        "import os, sys, time; from pathlib import Path\n"
        f"folder = Path({str(folder)!r})\n"
        "def jump(seconds): Path(os.environ['CLOCK_OFFSET']).write_text(str(seconds))\n"
    )
    (folder / "offset").write_text("0")
    moved = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(folder / "offset")}
    found = subprocess.run(
        [sys.executable, "-c", opening + code],
        env={**os.environ, **moved, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == (-9 if kill else 0), found.stderr[-2000:]
    return found.stdout


STAGE = """
from awpo.artifacts import open_stage
with open_stage(folder / "stage", "example", {}, {}) as stage:
    (folder / "stage" / "first.txt").write_text("x")
    jump(%d)
    (folder / "stage" / "second.txt").write_text("x")
    %s
    stage.finish()
"""


def test_the_clock_of_these_tests_jumps(library: Path, tmp_path: Path) -> None:
    code = "a, m = time.time(), time.monotonic(); jump(-3600); print(time.time() - a < -3000, 0 <= time.monotonic() - m < 600)"
    assert run(library, tmp_path, code) == "True True\n"


@pytest.mark.parametrize("seconds", [-HOUR, HOUR])
def test_a_stage_took_as_long_as_it_did(seconds: int, library: Path, tmp_path: Path) -> None:
    run(library, tmp_path, STAGE % (seconds, ""))
    manifest = read_manifest(tmp_path / "stage")
    assert manifest is not None
    assert 0 <= manifest.seconds < HOUR / 2


def test_an_attempt_that_was_killed_counts_no_negative_time(library: Path, tmp_path: Path) -> None:
    """How long it took is read from times of files, which the library leaves alone: its mark is of an hour later."""
    run(library, tmp_path, f"jump({HOUR})" + STAGE % (0, "os.kill(os.getpid(), 9)"), kill=True)
    run(library, tmp_path, STAGE % (0, ""))
    manifest = read_manifest(tmp_path / "stage")
    assert manifest is not None
    assert manifest.attempts == 2
    assert 0 <= manifest.seconds < HOUR / 2


@pytest.mark.parametrize("seconds", [-HOUR, HOUR])
def test_a_folder_that_is_held_stays_held(seconds: int, library: Path, tmp_path: Path) -> None:
    code = (
        "import subprocess; from awpo.artifacts import open_stage\n"
        "with open_stage(folder / 'stage', 'example', {}, {}):\n"
        f"    jump({seconds})\n"
        "    second = 'import sys; from pathlib import Path; from awpo.artifacts import open_stage\\n' \\\n"
        "        'with open_stage(Path(sys.argv[1]), \"example\", {}, {}): pass'\n"
        "    found = subprocess.run([sys.executable, '-c', second, str(folder / 'stage')], capture_output=True, text=True)\n"
        "    print(found.stderr.strip().splitlines()[-1])\n"
    )
    assert "another process is at work in" in run(library, tmp_path, code)


TRACKED = """
import flows.environment
from tasks.tracking import open_run
from tasks.tracking_store import connect
stage = folder / "stage"
stage.mkdir()
run = open_run(connect(), "stage", stage, "w", {}, begun=True)
run.metrics({"loss": 1.0}, step=1)
jump(%d)
run.metrics({"loss": 2.0}, step=2)
run.end("FINISHED")
found = run.client.get_run(run.run_id)
print(found.info.end_time - found.info.start_time)
print(sorted(metric.step for metric in run.client.get_metric_history(run.run_id, "loss")), found.data.metrics)
"""


@pytest.mark.slow
def test_a_run_of_mlflow_does_not_end_before_it_began(library: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWPO_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    took, metrics = run(library, tmp_path, TRACKED % -HOUR).splitlines()[-2:]
    assert int(took) >= 0
    assert metrics == "[1, 2] {'loss': 2.0}"
