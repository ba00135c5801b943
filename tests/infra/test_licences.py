"""docs/licences.md lists every direct dependency, with the licence that the installed one states."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def licences() -> Any:
    specification = importlib.util.spec_from_file_location("licences", ROOT / "infra" / "licences.py")
    assert specification
    assert specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_every_direct_dependency_stands_there_with_a_licence(licences: Any) -> None:
    names = [name for name, _ in licences.direct()]
    assert len(names) > 30
    listed = licences.known()
    assert set(listed) == set(names), "run: python infra/licences.py"
    assert not [name for name, told in listed.items() if told in ("not installed", "not stated")]


def test_what_is_installed_states_what_is_listed(licences: Any) -> None:
    installed = {name: licences.licence(name) for name, _ in licences.direct()}
    known = licences.known()
    # The first word: builds of one version (torch for CPUs and for GPUs) bundle other libraries.
    changed = {name: told for name, told in installed.items() if told and known[name].split()[0] != told.split()[0]}
    assert not changed, "run: python infra/licences.py"
