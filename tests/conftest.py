"""Fixtures for every test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data files that stands beside the project; tests that need it skip where it is absent."""
    named = os.environ.get("AWPO_SHARED_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data files at {folder}; set AWPO_SHARED_DATA to their folder")
    return folder
