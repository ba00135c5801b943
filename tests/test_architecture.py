"""Imports point one way: flows -> tasks -> (awpo, evaluation) -> awpo.types; the libraries know no server."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What a package may not import, whatever the place in a module.
FORBIDDEN = {
    "awpo": {"evaluation", "tasks", "flows", "prefect", "mlflow", "typer", "tests"},
    "evaluation": {"tasks", "flows", "prefect", "mlflow", "typer", "tests"},
    "tasks": {"flows", "typer", "tests"},
    "flows": {"tests"},
}
# The nouns, errors and settings stand below everything else of awpo.
GROUND = {
    "awpo/types.py": set(),
    "awpo/errors.py": set(),
    "awpo/settings.py": {"awpo.errors"},
    "awpo/config_rollouts.py": {"awpo.settings"},
    "awpo/config.py": {"awpo.config_rollouts", "awpo.errors", "awpo.methods", "awpo.settings", "awpo.types"},
    "awpo/methods.py": {"awpo.errors", "awpo.settings"},
    "awpo/events.py": set(),
    "awpo/files.py": set(),
    "awpo/unfinished.py": set(),
    "awpo/folder_lock.py": {"awpo.errors"},
    "awpo/artifacts.py": {
        "awpo",
        "awpo.errors",
        "awpo.files",
        "awpo.folder_lock",
        "awpo.types",
        "awpo.unfinished",
        "awpo.full_disk",
    },
}
LIGHT = (
    "awpo/methods.py",
    "awpo/models.py",
    "awpo/config.py",
    "awpo/config_rollouts.py",
    "awpo/settings.py",
    "awpo/errors.py",
    "flows/environment.py",
    "flows/parameters.py",
)


def names_in(source: str, package: str) -> Iterator[str]:
    """Every module that a source imports, at its top or within; relative imports made absolute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            up = parts[: len(parts) - node.level + 1] if node.level else []
            yield ".".join([*up, *([node.module] if node.module else [])])


def imported(path: Path) -> list[str]:
    package = path.relative_to(ROOT).parent.as_posix().replace("/", ".")
    return list(names_in(path.read_text("utf-8"), package))


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_directions(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(package)
        for name in imported(path)
        if name.partition(".")[0] in FORBIDDEN[package]
    ]
    assert found == []


@pytest.mark.parametrize("file", sorted(GROUND))
def test_the_ground_stands_on_nothing_of_ours(file: str) -> None:
    ours = {name for name in imported(ROOT / file) if name.partition(".")[0] in FORBIDDEN}
    assert ours <= GROUND[file]


@pytest.mark.parametrize("file", LIGHT)
def test_what_the_command_line_reads_at_once_imports_nothing_heavy(file: str) -> None:
    heavy = {"torch", "transformers", "trl", "prefect", "mlflow", "datasets"}
    assert not {name.partition(".")[0] for name in imported(ROOT / file)} & heavy


def test_every_module_with_a_flow_sets_the_environment_before_anything_else() -> None:
    for path in modules("flows"):
        names = [name for name in imported(path) if name != "__future__"]
        if "prefect" in names:
            assert names[0] == "flows.prefect_home", path


def test_imports_are_seen_wherever_they_stand() -> None:
    source = "import a.b\ndef f():\n    from mlflow.entities import Run\n    from ..x import y\n    from . import z\n"
    assert list(names_in(source, "awpo.data")) == ["a.b", "mlflow.entities", "awpo.x", "awpo.data"]
