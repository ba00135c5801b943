"""One process at a time in a stage's folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from awpo.artifacts import open_stage, read_manifest
from awpo.errors import UserError

HOLDER = """
import sys
from pathlib import Path
from awpo.artifacts import open_stage
with open_stage(Path(sys.argv[1]), "example", {}, {"by": sys.argv[2]}) as stage:
    (stage.folder / "text.txt").write_text(sys.argv[2])
    print("in", flush=True)
    sys.stdin.read()
    stage.finish()
"""


@contextmanager
def holder(folder: Path, by: str) -> Iterator[subprocess.Popen[str]]:
    """Another process at work in a folder; it finishes where its input is closed."""
    command = [sys.executable, "-c", HOLDER, str(folder), by]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        try:
            yield process
        finally:
            process.kill()


def begin(folder: Path, by: str) -> None:
    with open_stage(folder, "example", {}, {"by": by}) as stage:
        if not stage.finished:
            (stage.folder / "text.txt").write_text(by)
            stage.finish()


@pytest.mark.parametrize("by", ["first", "second"])
def test_a_second_process_is_refused_and_leaves_the_first_alone(tmp_path: Path, by: str) -> None:
    out = tmp_path / "out"
    with holder(out, "first") as process:
        with pytest.raises(UserError, match="another process is at work in"):
            begin(out, by)
        process.communicate()
    manifest = read_manifest(out)
    assert manifest is not None
    assert (manifest.config, (out / "text.txt").read_text()) == ({"by": "first"}, "first")
    begin(out, "second")
    assert (out / "text.txt").read_text() == "second"


def test_what_a_killed_process_held_is_free_at_once(tmp_path: Path) -> None:
    with holder(tmp_path / "out", "first") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        begin(tmp_path / "out", "second")
    assert (tmp_path / "out" / "text.txt").read_text() == "second"


def test_a_forked_child_does_not_hold_what_its_parent_held(tmp_path: Path) -> None:
    out, (reading, writing) = tmp_path / "out", os.pipe()
    with suppress(KeyError), open_stage(out, "example", {}, {"by": "first"}):
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)  # until the parent closes its end
            os._exit(0)
        raise KeyError  # the attempt fails, the child lives on
    try:
        begin(out, "first")
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
    assert (out / "text.txt").read_text() == "first"


def test_a_stage_is_not_opened_twice_in_one_process(tmp_path: Path) -> None:
    with open_stage(tmp_path / "out", "example", {}, {}), pytest.raises(UserError, match="another process"):
        begin(tmp_path / "out", "second")
