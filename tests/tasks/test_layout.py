"""Where stores are, and what of their addresses may be shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.layout import artifact_root, tracking_uri, without_password


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://awpo:p%40ss%2Fw@db.example:5432/mlflow", "postgresql://awpo@db.example:5432/mlflow"),
        (
            "postgresql+psycopg://awpo:a@b@db/mlflow?sslmode=require",
            "postgresql+psycopg://awpo@db/mlflow?sslmode=require",
        ),
        ("postgresql://db/mlflow?user=awpo&password=secret", "postgresql://db/mlflow?user=awpo"),
        ("postgresql://:secret@db/mlflow", "postgresql://@db/mlflow"),
        ("postgresql://awpo@db/mlflow", "postgresql://awpo@db/mlflow"),
        ("https://me:secret@mlflow.example/path", "https://me@mlflow.example/path"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("sqlite:////srv/runs/mlflow.db", "sqlite:////srv/runs/mlflow.db"),
        ("sqlite:///C:/runs/mlflow.db", "sqlite:///C:/runs/mlflow.db"),
    ],
)
def test_an_address_is_shown_without_its_password(uri: str, shown: str) -> None:
    assert without_password(uri) == shown


def test_the_environment_says_where_stores_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWPO_RUNS", str(tmp_path))
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_DEFAULT_ARTIFACT_ROOT"):
        monkeypatch.delenv(name, raising=False)
    assert tracking_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    assert artifact_root() == f"file://{tmp_path}/mlartifacts"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://db/mlflow")
    monkeypatch.setenv("MLFLOW_DEFAULT_ARTIFACT_ROOT", "s3://awpo/artifacts")
    assert (tracking_uri(), artifact_root()) == ("postgresql://db/mlflow", "s3://awpo/artifacts")
