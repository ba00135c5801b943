"""Where a version's release is, and what is told where it is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from awpo.errors import UserError
from evaluation.bfcl import process
from evaluation.bfcl.benchmark import BfclV4
from evaluation.bfcl.data import BfclItem
from evaluation.bfcl.package import VARIABLE, Package, find_package, prompt_texts, read_rows
from evaluation.bfcl.process import CheckerProcess
from evaluation.bfcl.versions import V3, V4


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a program that answers as an interpreter would, and names it as that of version 4."""

    def make(output: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n", "utf-8")
        path.chmod(0o755)
        monkeypatch.setenv(VARIABLE, str(path))
        return path

    return make


def answer(tmp_path: Path, **changed: Any) -> str:
    return json.dumps({"release": V4.release, "folder": str(tmp_path), "missing": []} | changed)


def test_a_missing_environment_is_told_with_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere" / "python"))
    with pytest.raises(UserError, match=r"nowhere/python; .*make install-bfcl-v4, or AWPO_BFCL_V4_PYTHON"):
        BfclV4().identity(None)  # type: ignore[arg-type]


def test_the_release_of_an_environment_is_looked_at(interpreter: Callable[[str], Path], tmp_path: Path) -> None:
    path = interpreter(answer(tmp_path))
    assert find_package(V4) == Package(str(path), tmp_path)


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ({"release": "2025.10.1"}, r"bfcl-eval 2025\.10\.1 is installed in the environment of .*needs 2026\.3\.23"),
        ({"release": None}, "the package bfcl-eval is not installed in the environment of"),
        ({"missing": ["rank_bm25", "filelock"]}, "lacks rank_bm25, filelock; .*make install-bfcl-v4"),
        (None, "cannot be asked for its bfcl-eval .*make install-bfcl-v4"),
    ],
)
def test_an_environment_without_it_is_refused(
    interpreter: Callable[[str], Path], tmp_path: Path, output: dict[str, Any] | None, told: str
) -> None:
    interpreter("no JSON" if output is None else answer(tmp_path, **output))
    with pytest.raises(UserError, match=told):
        find_package(V4)


def test_what_is_no_program_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "python"
    path.write_text("not a program", "utf-8")
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(UserError, match="cannot be asked for its bfcl-eval"):
        find_package(V4)


def test_files_that_are_missing_or_odd_are_told(interpreter: Callable[[str], Path], tmp_path: Path) -> None:
    interpreter(answer(tmp_path))
    with pytest.raises(UserError, match=r"cannot read .*x\.json .*reinstall the package: make install-bfcl-v4"):
        read_rows(V4, "x.json")
    (tmp_path / "constants").mkdir()
    texts = tmp_path / "constants" / "default_prompts.py"
    texts.write_text("raise SystemExit\nHERE = 'a' 'b'\nOTHER = HERE.upper()\n", "utf-8")
    assert prompt_texts(V4, ("HERE",)) == {"HERE": "ab"}  # read, not run
    for name in ("GONE", "OTHER"):
        with pytest.raises(UserError, match=r"cannot read .*default_prompts\.py"):
            prompt_texts(V4, (name,))


def test_a_checker_of_another_release_is_refused(v4: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an interpreter's own packages are hidden by others."""
    monkeypatch.setattr(process, "find_package", lambda version: v4)
    item = BfclItem("x", "irrelevance", ((),), (), None)
    with CheckerProcess(version=V3) as checker, pytest.raises(UserError, match=r"imports bfcl-eval 2026\.3\.23"):
        checker.check([(item, [])])


def test_versions_use_their_own_interpreters(v4: Package) -> None:
    assert find_package(V3).python == sys.executable
    assert v4.python != sys.executable
    assert v4.folder.name == "bfcl_eval"
    assert find_package(V3).folder != v4.folder
