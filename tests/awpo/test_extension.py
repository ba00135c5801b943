"""DeepSpeed's extension is compiled before it is used, and a mark that a killed process left stops nobody."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from awpo.extension import FOLDER
from tests.awpo.test_processes import wait_until

pytest.importorskip("deepspeed", reason="no DeepSpeed; make install-deepspeed")
NAME = "deepspeed_shm_comm"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of its own with the extension as it was compiled once, and torch's mark of one who compiles it."""
    compiled = Path(os.environ.get(FOLDER, Path(sys.prefix) / "torch_extensions")) / NAME
    if not (compiled / f"{NAME}.so").exists():
        pytest.skip("DeepSpeed's extension is not compiled; make install-deepspeed")
    folder = tmp_path / "extensions"
    shutil.copytree(compiled, folder / NAME)
    (folder / NAME / "lock").touch()
    return folder


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "awpo.extension"],
        env={**os.environ, FOLDER: str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_mark_that_was_left_is_removed_once_nobody_compiles(folder: Path) -> None:
    mark = folder / NAME / "lock"
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as who compiles it holds it
    process = start(folder)
    try:
        assert wait_until(
            lambda: any(
                "->" in line and f" {process.pid} " in line for line in Path("/proc/locks").read_text().splitlines()
            )
        )
        assert mark.exists()
        os.close(descriptor)
        _, told = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0
    assert not mark.exists()
    assert f"{mark} was left by a process that was killed; removed" in told
