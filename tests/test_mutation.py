"""The machinery of the mutation check itself: what it changes, and that it can tell killed from survived."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("mutation.py")


@pytest.fixture(scope="module")
def mutation() -> ModuleType:
    specification = importlib.util.spec_from_file_location("mutation", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["mutation"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


SOURCE = '''
LIMIT = 0.5

def share(values, valid, std="sample"):
    """Text 1 + 1."""
    if std == "sample":
        raise ValueError("no 1")
    return torch.where(valid, values - 1, 0).clamp(min=LIMIT).sum(dim=1)
'''
# by hand: function, change
EXPECTED = {
    ("module", "0.5 -> 1.0"),
    ("module", "0.5 -> 0.25"),
    ("share", "std == 'sample' -> std != 'sample'"),
    ("share", "torch.where(valid, values - 1, 0).clamp(min=LIMIT) -> torch.where(valid, values - 1, 0)"),
    ("share", "torch.where(valid, values - 1, 0).clamp(min=LIMIT) -> torch.where(valid, values - 1, 0).clamp(max=LIMIT)"),
    ("share", "torch.where(valid, values - 1, 0) -> torch.where(valid, 0, values - 1)"),
    ("share", "torch.where(valid, values - 1, 0) -> torch.where(valid, values - 1, 1)"),
    ("share", "values - 1 -> values + 1"),
    ("share", "values - 1 -> values - 2"),
    ("share", "values - 1 -> values - 0"),
}  # fmt: skip


def test_one_thing_is_changed_at_a_time(mutation: ModuleType) -> None:
    found = mutation.mutants("clipping", SOURCE)
    assert {(mutant.function, mutant.change) for mutant in found} == EXPECTED
    assert len(found) == len(EXPECTED)
    (clamped,) = [mutant for mutant in found if mutant.change.endswith("clamp(max=LIMIT)")]
    assert clamped.line == 8
    assert "clamp(max=LIMIT)" in clamped.source
    assert "values - 1" in clamped.source  # the change before it is taken back
    assert clamped.key == f"clipping.share: {clamped.change}"


def test_like_changes_in_one_function_are_told_apart(mutation: ModuleType) -> None:
    found = mutation.mutants("clipping", "def f(a):\n    return (a + 1) * (a + 1)\n")
    assert [mutant.number for mutant in found if mutant.change == "a + 1 -> a - 1"] == [1, 2]


def test_every_equivalent_mutant_exists_and_has_a_reason(mutation: ModuleType) -> None:
    """A reason given for code that has changed since would excuse nothing, or something else."""
    root = SCRIPT.parents[1]
    known = {
        mutant.key
        for module in mutation.MODULES
        for mutant in mutation.mutants(module, (root / "awpo" / f"{module}.py").read_text("utf-8"))
    }
    assert mutation.EQUIVALENT.keys() <= known
    assert all(len(reason) > 20 for reason in mutation.EQUIVALENT.values())


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_a_wrong_sign_is_noticed_and_not_tried_again(tmp_path: Path) -> None:
    tests = ("--tests", str(SCRIPT.parent / "awpo" / "test_clipping.py"))
    chosen = ("--only", "clipping", "--match", "1 - kappa * influence_P -> 1 + kappa", "--output", str(tmp_path / "o"))
    before = (SCRIPT.parents[1] / "awpo" / "clipping.py").read_bytes()
    done = run(*chosen, *tests)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("killed     awpo/clipping.py:")
    assert "test_clipping.py::test_radius_shrinks_with_the_gate_and_the_added_variance" in done.stdout
    assert (SCRIPT.parents[1] / "awpo" / "clipping.py").read_bytes() == before
    (row,) = map(json.loads, (tmp_path / "o").read_text().splitlines())
    assert row["killed"]
    assert run(*chosen, *tests).stdout == done.stdout
    assert len((tmp_path / "o").read_text().splitlines()) == 1


def test_a_survivor_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_blind.py").write_text("def test_blind():\n    import awpo.clipping\n")
    chosen = ("--only", "clipping", "--match", "1 - kappa * influence_P -> 1 + kappa")
    done = run(*chosen, "--tests", str(tmp_path / "test_blind.py"))
    assert done.returncode == 1
    assert done.stdout.startswith("SURVIVED")
    (tmp_path / "test_blind.py").write_text("def test_broken():\n    assert False\n")
    done = run(*chosen, "--tests", str(tmp_path / "test_blind.py"))
    assert done.returncode == 1
    assert "fail without a mutant" in done.stderr
