"""A tracking store of its own for each test: SQLite, made once and copied, as making its tables takes seconds."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before anything imports Prefect: it reads its settings once.
os.environ.setdefault("PREFECT_HOME", tempfile.mkdtemp(prefix="awpo-tasks-"))

import flows.environment  # noqa: F401 - before MLflow is imported

# isort: split
import mlflow
import pytest
from mlflow import MlflowClient

from tasks.tracking_store import Tracking, connect


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}").get_experiment("0")
    return folder / "mlflow.db"


@pytest.fixture
def tracking(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracking]:
    runs = tmp_path / "runs"
    runs.mkdir()
    shutil.copy(empty_store, runs / "mlflow.db")
    monkeypatch.setenv("AWPO_RUNS", str(runs))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    before = mlflow.get_tracking_uri()
    yield connect()
    mlflow.set_tracking_uri(before)
