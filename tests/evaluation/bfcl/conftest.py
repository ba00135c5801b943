"""The official package's own functions, in this process; and the checkers' process."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from awpo.errors import UserError
from evaluation.bfcl.package import Package, find_package
from evaluation.bfcl.process import CheckerProcess
from evaluation.bfcl.versions import V4

PEER = Path(__file__).resolve().parents[2] / "peer"
ASKED = """
import importlib, json, sys
sys.path.append({peer!r})
import official_bfcl
official_bfcl.stand_in()
official = lambda name: importlib.import_module("bfcl_eval." + name)
asked = json.load(sys.stdin)
{script}
print("\\n" + json.dumps(answer))
"""


@pytest.fixture(scope="session")
def official_script() -> Any:
    """The module tests/peer/official_bfcl.py."""
    path = PEER / "official_bfcl.py"
    specification = importlib.util.spec_from_file_location("official_bfcl", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def official(official_script: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Imports modules of bfcl_eval by name, with stand-ins for vendors' clients that are not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BFCL_PROJECT_ROOT", str(tmp_path_factory.mktemp("bfcl")))
        official_script.stand_in()
        yield lambda name: importlib.import_module(f"bfcl_eval.{name}")
    for name, loaded in list(sys.modules.items()):  # no other test may meet a stand-in
        if name.startswith("bfcl_eval") or type(loaded).__name__ == "StandIn":
            del sys.modules[name]


@pytest.fixture(scope="module")
def checker() -> Iterator[CheckerProcess]:
    with CheckerProcess() as running:
        yield running


@pytest.fixture(scope="session")
def v4() -> Package:
    """Version 4's release, in its environment; where there is none, what asks for it is skipped."""
    try:
        return find_package(V4)
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def checker_v4(v4: Package) -> Iterator[CheckerProcess]:
    with CheckerProcess(version=V4) as running:
        yield running


@pytest.fixture
def ask_v4(v4: Package, tmp_path: Path) -> Callable[[str, Any], Any]:
    """Runs a script in version 4's environment, with the same stand-ins: from `asked` and `official` to `answer`."""

    def ask(script: str, asked: Any) -> Any:
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "BFCL_PROJECT_ROOT": str(tmp_path)}
        done = subprocess.run(
            [v4.python, "-c", ASKED.format(peer=str(PEER), script=script)],
            input=json.dumps(asked),
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return ask
