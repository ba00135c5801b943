"""The flow that evaluates an endpoint, against a real server that fails now and then: real Prefect and MLflow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flows.prefect_home  # noqa: F401 - before Prefect is imported

# isort: split
import mlflow
import pytest
from mlflow import MlflowClient
from prefect.testing.utilities import prefect_test_harness

from awpo.artifacts import MANIFEST, read_manifest
from awpo.config import CorpusConfig, EndpointConfig, EvaluationConfig
from tests.fault_server import FaultServer

pytestmark = [pytest.mark.slow, pytest.mark.servers]

EVALUATION = EvaluationConfig(
    benchmarks=("held_out",), splits=("test_tools",), instances_per_split=4, samples=1, max_completion_length=16
)
CORPUS = CorpusConfig(train_dialogues=4, validation_dialogues=2, test_dialogues=4)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("evaluate")
    patch = pytest.MonkeyPatch()
    patch.setenv("AWPO_RUNS", str(folder / "runs"))
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    patch.setenv("OMP_NUM_THREADS", "1")
    before = mlflow.get_tracking_uri()
    with prefect_test_harness(server_startup_timeout=180):
        yield folder
    mlflow.set_tracking_uri(before)
    patch.undo()


def test_an_endpoint_is_evaluated_and_what_failed_is_asked_for_by_the_same_call(place: Path) -> None:
    from flows.evaluate import evaluate
    from tasks.layout import tracking_uri

    with FaultServer() as server:
        endpoint = EndpointConfig(base_url=server.url, model="lab/closed", attempts=1)

        def call() -> dict[str, Any]:
            return evaluate(
                checkpoint=endpoint.model,
                out=str(place / "out"),
                evaluation=EVALUATION,
                corpus=CORPUS,
                endpoint=endpoint,
            )

        server.script({"times": 3, "do": "status", "status": 500})
        partial = call()
        out = Path(partial["out"])
        assert out.name == "lab-closed"
        first = read_manifest(out)
        assert first is not None
        assert first.counts["missing"] == 3
        assert first.inputs["endpoint"] == "lab/closed at 127.0.0.1"
        assert any(row.get("partial") for row in partial["scores"])

        server.script()
        whole = call()
        assert len(server.log()) == 3
        second = read_manifest(out)
        assert second is not None
        assert (second.counts["missing"], second.fingerprint) == (0, first.fingerprint)
        assert not any(row.get("partial") for row in whole["scores"])

        written = (out / MANIFEST).stat().st_mtime_ns
        assert call()["scores"] == whole["scores"]
        assert (out / MANIFEST).stat().st_mtime_ns == written
        assert len(server.log()) == 3

    client = MlflowClient(tracking_uri())
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, filter_string="tags.`awpo.stage` = 'evaluation'")
    told = {run.info.status for run in runs}
    assert (len(runs), told) == (2, {"FINISHED"})
    accuracies = {run.data.metrics["held_out/test_tools/greedy/accuracy"] for run in runs}
    scores = json.loads((out / "scores.json").read_text())
    greedy = next(row for row in scores if row["mode"] == "greedy" and row["group"] == "all")
    assert greedy["accuracy"] in accuracies
