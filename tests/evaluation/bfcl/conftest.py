"""The official package's own functions, in this process; and the checkers' process."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evaluation.bfcl.process import CheckerProcess


@pytest.fixture(scope="session")
def official_script() -> Any:
    """The module tests/peer/official_bfcl.py."""
    path = Path(__file__).resolve().parents[2] / "peer" / "official_bfcl.py"
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
