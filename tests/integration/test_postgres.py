"""Prefect and MLflow on a real Postgres with artifacts in S3, by environment alone; and a store that moves there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric

pytestmark = [pytest.mark.slow, pytest.mark.servers]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def on_postgres(postgres: Any, bucket: Any, serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    environment = {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": postgres.address("prefect", "postgresql+asyncpg"),
        "MLFLOW_TRACKING_URI": postgres.address("mlflow"),
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": "s3://awpo/artifacts",
        **bucket.environment,
    }
    with serve(tmp_path_factory.mktemp("postgres"), environment) as found:
        yield found


def test_the_doctor_is_content_with_what_serve_has_set_up(on_postgres: Any) -> None:
    found = on_postgres.awpo("doctor")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "postgresql://mlflow@127.0.0.1" in found.stdout
    assert not (on_postgres.runs / "mlflow.db").exists()
    assert not (on_postgres.runs / "prefect" / "prefect.db").exists()


def test_a_run_is_in_the_databases_and_its_artifacts_in_s3(on_postgres: Any, postgres: Any, bucket: Any) -> None:
    import psycopg

    small = {"train_dialogues": 12, "validation_dialogues": 2, "test_dialogues": 2}
    run = on_postgres.run("prepare-data/prepare-data", out=str(on_postgres.runs / "data"), corpus=small)
    with psycopg.connect(postgres.address("prefect")) as connection:
        [state] = connection.execute("select state_type from flow_run where id = %s", [run["id"]]).fetchone() or [None]
        assert state == "COMPLETED"
    client = MlflowClient(on_postgres.mlflow)
    experiment = client.get_experiment_by_name("awpo")
    assert experiment
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) >= 3
    assert {one.info.status for one in runs} == {"FINISHED"}
    for one in runs:
        assert one.info.artifact_uri == f"s3://awpo/artifacts/{one.info.run_id}/artifacts"
    kept = [key for key in bucket.keys() if key.endswith("/config.json")]  # noqa: SIM118 - a method of ours
    assert len(kept) >= 3


def test_no_password_is_written_down_or_among_the_arguments(on_postgres: Any) -> None:
    files = [path for path in on_postgres.runs.rglob("*") if path.is_file()]
    assert [path for path in files if path.name.endswith(".mlflow.json") or path.suffix == ".log"]
    assert not [path for path in files if b"planted-secret" in path.read_bytes()]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert b"planted-secret" not in path.read_bytes()
        except OSError:
            continue


@pytest.fixture(scope="module")
def present(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder with a store of SQLite as this project fills it: runs, metrics, models, a registry, artifacts."""
    runs = tmp_path_factory.mktemp("present")
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    experiment = client.create_experiment("awpo", artifact_location=(runs / "mlartifacts").as_uri())
    for number in range(3):
        run = client.create_run(experiment, run_name=f"train · seed {number}", tags={"awpo.group": "x" * number})
        identifier = run.info.run_id
        metrics = [Metric("reward/total", float(step) / 7, 1000 + step, step) for step in range(1500)]
        metrics += [Metric("bad", float("nan"), 1, 0), Metric("far", float("inf"), 1, 0)]
        for start in range(0, len(metrics), 1000):
            client.log_batch(identifier, metrics=metrics[start : start + 1000])
        client.log_param(identifier, "seed", number)
        client.log_param(identifier, "text", "ä" * 6000)
        client.log_dict(identifier, {"number": number}, "config.json")
        client.log_text(identifier, "line\n" * number, "logs/log file.txt")
        model = client.create_logged_model(experiment, f"checkpoint-{number}", identifier, {"a": "b"}, {"c": "d"})
        client.finalize_logged_model(model.model_id, "READY")
        client.set_terminated(identifier, "FINISHED" if number else "KILLED")
    client.create_registered_model("awpo", tags={"k": "v"})
    version = client.create_model_version("awpo", "file:///checkpoint", identifier)
    client.set_registered_model_alias("awpo", "champion", version.version)
    client.delete_run(client.create_run(experiment, run_name="deleted").info.run_id)
    return runs


def everything(address: str) -> dict[str, Any]:
    """What the client reads of a store, but for where artifacts are."""
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("awpo")
    assert experiment
    runs = client.search_runs([experiment.experiment_id], run_view_type=3)
    return {
        "experiment": (experiment.experiment_id, experiment.name, experiment.creation_time),
        "runs": {
            run.info.run_id: (
                run.info.run_name,
                run.info.status,
                run.info.lifecycle_stage,
                run.info.start_time,
                run.data.params,
                run.data.tags,
                repr(sorted(run.data.metrics.items())),
            )
            for run in runs
        },
        "histories": {
            run.info.run_id: [
                (one.step, one.value, one.timestamp)
                for one in client.get_metric_history(run.info.run_id, "reward/total")
            ]
            for run in runs
        },
        "models": {
            model.model_id: (model.name, str(model.status), model.tags, model.params)
            for model in client.search_logged_models([experiment.experiment_id])
        },
        "champion": dict(client.get_model_version_by_alias("awpo", "champion"), creation_timestamp=0),
    }


def awpo(runs: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        env={**clean, "AWPO_RUNS": str(runs), "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_store_moves_with_its_artifacts_and_reads_the_same(
    present: Path, postgres: Any, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(f"sqlite:///{present / 'mlflow.db'}")
    environment = {**bucket.environment, "AWPO_MIGRATE_TO": postgres.address("moved")}
    done = awpo(present, environment, "migrate", "--artifacts", "s3://awpo/moved")
    assert done.returncode == 0, done.stderr
    assert "4 runs; 6 files" in done.stdout
    assert "planted-secret" not in done.stdout + done.stderr
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    after = everything(postgres.address("moved"))
    assert after == before
    client = MlflowClient(postgres.address("moved"))
    for identifier, (name, *_) in after["runs"].items():
        if name == "deleted":
            continue
        assert client.get_run(identifier).info.artifact_uri.startswith("s3://awpo/moved/")
        config = json.loads(Path(client.download_artifacts(identifier, "config.json")).read_text())
        assert name == f"train · seed {config['number']}"
        assert [item.path for item in client.list_artifacts(identifier, "logs")] == ["logs/log file.txt"]
    # The database counts on behind what was copied.
    assert int(client.create_experiment("next")) > int(after["experiment"][0])
    again = awpo(present, environment, "migrate")
    assert again.returncode == 2
    assert len(again.stderr.splitlines()) == 1
    assert "is not empty" in again.stderr


def test_what_the_target_does_not_take_leaves_it_empty(postgres: Any, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    run = client.create_run(client.create_experiment("awpo", artifact_location="file:///nowhere"))
    client.set_tag(run.info.run_id, "text", "a\x00b")  # SQLite takes it, Postgres does not
    address = postgres.address("refusing")
    postgres.run("createdb", *postgres.where(), "--owner=mlflow", "refusing")
    done = awpo(runs, {"AWPO_MIGRATE_TO": address}, "migrate")
    assert done.returncode == 2, done.stderr
    assert "a row of tags is not taken" in done.stderr.splitlines()[-1]
    assert MlflowClient(address).get_experiment_by_name("awpo") is None
    client.delete_tag(run.info.run_id, "text")
    assert awpo(runs, {"AWPO_MIGRATE_TO": address}, "migrate").returncode == 0
    found = MlflowClient(address).get_experiment_by_name("awpo")
    assert found
    assert found.artifact_location == "file:///nowhere"


def test_without_a_store_there_is_nothing_to_move(postgres: Any, tmp_path: Path) -> None:
    done = awpo(tmp_path, {"AWPO_MIGRATE_TO": postgres.address("moved")}, "migrate")
    assert done.returncode == 2
    assert "nothing to move" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("http://127.0.0.1:5000", "which is no database"),
        ("mysql://me:planted-secret@127.0.0.1:9/none", "the package MySQLdb; install it, or give postgresql://"),
        ("postgresql://me:planted-secret@127.0.0.1:9/none", "cannot open postgresql://me@127.0.0.1:9/none"),
    ],
)
def test_a_target_that_is_none_is_one_line(present: Path, to: str, said: str) -> None:
    done = awpo(present, {"AWPO_MIGRATE_TO": to}, "migrate")
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
    assert "planted-secret" not in done.stderr
