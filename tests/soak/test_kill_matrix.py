"""Some points of the kill matrix; all of them: `make kill-matrix`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

# The turn decides the signal: SIGKILL, SIGKILL, SIGTERM, SIGINT, SIGKILL.
POINTS = {"decomposition": 0, "checkpoint": 0, "sft": 1, "evaluation": 2, "promotion": 3}


@pytest.fixture(scope="module")
def matrix() -> Any:
    path = Path(__file__).with_name("kill_matrix.py")
    specification = importlib.util.spec_from_file_location("kill_matrix", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["kill_matrix"] = module
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def given(matrix: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = matrix.Given(tmp_path_factory.mktemp("kill-matrix"))
    found.make()
    return found


@pytest.mark.parametrize(("kind", "turn"), POINTS.items())
def test_a_stage_that_is_killed_and_run_again_ends_as_one_that_was_not(
    matrix: Any, given: Any, kind: str, turn: int
) -> None:
    row = matrix.one_point(kind, turn, 1, given, matrix.undisturbed(kind, given))
    assert row["passed"], row.get("problem")


def test_another_result_is_noticed(matrix: Any, given: Any) -> None:
    whole = matrix.undisturbed("rationales", given)
    other = matrix.Undisturbed({**whole.result, "counts": {}}, whole.times)
    row = matrix.one_point("rationales", 0, 1, given, other)
    assert "another result: ['counts']" in row["problem"]


def test_half_a_file_and_an_orphan_are_noticed(matrix: Any, given: Any, tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text('[{"accur')
    with pytest.raises(ValueError, match="Unterminated"):
        matrix.all_whole(tmp_path)
    (tmp_path / "scores.json").unlink()
    (tmp_path / "items.parquet").write_bytes(next(given.instances.glob("*.parquet")).read_bytes()[:-100])
    with pytest.raises(Exception, match="magic bytes"):
        matrix.all_whole(tmp_path)
    process = subprocess.Popen(["sleep", "60"], cwd=tmp_path)
    try:
        assert len(matrix.alive_in(tmp_path)) == 1
    finally:
        process.kill()
        process.wait()
    assert matrix.alive_in(tmp_path) == []
