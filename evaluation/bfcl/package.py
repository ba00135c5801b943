"""Where a version's release of the package `bfcl-eval` is: the interpreter that has it, and its folder.

Version 3 is installed beside this project. Version 4 stands in an environment of its own, whose interpreter the
environment variable AWPO_BFCL_V4_PYTHON names, or that of the checkout's `.venv-bfcl-v4` (`make install-bfcl-v4`).
The package is never imported here: its data files are found and read.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from awpo.errors import UserError
from evaluation.bfcl.versions import V3, Version

VARIABLE = "AWPO_BFCL_V4_PYTHON"
INSTALL = f"pip install --no-deps bfcl-eval=={V3.release}"
INSTALL_V4 = "make install-bfcl-v4"
LOOK_SECONDS = 60.0
# What the checkers' process imports, beside the package, when it executes calls on version 4's memories.
_LOOK = """
import importlib.metadata as metadata, importlib.util as util, json
found = {"release": None, "folder": None}
if util.find_spec("bfcl_eval"):
    found = {"release": metadata.version("bfcl-eval"), "folder": list(util.find_spec("bfcl_eval").submodule_search_locations)[0]}
found["missing"] = [name for name in ("orjson", "mpmath", "rank_bm25", "overrides", "filelock") if not util.find_spec(name)]
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Package:
    """An installed release: the interpreter that imports it, and its folder."""

    python: str
    folder: Path


def how_to_install(version: Version) -> str:
    return f"{INSTALL_V4}, or {VARIABLE} names the Python of an environment" if version.own_environment else INSTALL


def find_package(version: Version) -> Package:
    """The release of a version. Raises UserError where it is not installed, or another one is."""
    if version.own_environment:
        return _elsewhere(version, _own_python(version))
    try:
        release = importlib.metadata.version("bfcl-eval")
    except importlib.metadata.PackageNotFoundError:
        release = None
    if release != version.release:
        raise UserError(f"{_have(release)}, {_needs(version)}")
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise UserError(f"bfcl-eval is installed without its files; reinstall it: {INSTALL} --force-reinstall")
    return Package(sys.executable, Path(spec.origin).parent)


def _have(release: str | None) -> str:
    return f"bfcl-eval {release} is installed" if release else "the package bfcl-eval is not installed"


def _needs(version: Version) -> str:
    return (
        f"the benchmark {version.name} needs {version.release}: {how_to_install(version)}; "
        "or take it out of 'benchmarks'"
    )


def _own_python(version: Version) -> Path:
    told = os.environ.get(VARIABLE)
    path = Path(told) if told else Path(__file__).resolve().parents[2] / ".venv-bfcl-v4" / "bin" / "python"
    if not path.is_file():
        raise UserError(f"there is no {path}; {_needs(version)}")
    return path


def _elsewhere(version: Version, python: Path) -> Package:
    found = _look(str(python))
    if found["release"] != version.release:
        raise UserError(f"{_have(found['release'])} in the environment of {python}, {_needs(version)}")
    if found["missing"]:
        raise UserError(f"the environment of {python} lacks {', '.join(found['missing'])}; {_needs(version)}")
    return Package(str(python), Path(found["folder"]))


@cache
def _look(python: str) -> dict[str, Any]:
    """What an interpreter says of the package in its environment. Raises UserError where it cannot be run."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [python, "-c", _LOOK], env=environment, capture_output=True, text=True, timeout=LOOK_SECONDS, check=True
        )
        return dict(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UserError(f"{python} cannot be asked for its bfcl-eval ({error}); {INSTALL_V4} makes one anew") from None


def read_rows(version: Version, name: str) -> list[dict[str, Any]]:
    """The rows of one of the package's data files. Raises UserError where there is no such file."""
    path = find_package(version).folder / "data" / name
    try:
        with open(path, "rb") as file:
            return [orjson.loads(line) for line in file if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}); reinstall the package: {how_to_install(version)}") from None


@cache
def prompt_texts(version: Version, names: tuple[str, ...]) -> dict[str, Any]:
    """The constants of these names in the package's `constants/default_prompts.py`, which is read, not run.

    Raises UserError where the file lacks one of them.
    """
    path = find_package(version).folder / "constants" / "default_prompts.py"
    try:
        body = ast.parse(path.read_text("utf-8")).body
        given = {
            target.id: ast.literal_eval(node.value)
            for node in body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and target.id in names
        }
        return {name: given[name] for name in names}
    except (OSError, SyntaxError, ValueError, KeyError) as error:
        raise UserError(f"cannot read {path} ({error!r}); reinstall the package: {how_to_install(version)}") from None
