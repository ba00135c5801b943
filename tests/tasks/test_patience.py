"""A store that is away for a while is waited for; one that refuses is not; a stop of the flow ends the waiting."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, RESOURCE_DOES_NOT_EXIST, TEMPORARILY_UNAVAILABLE
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

from tasks import cancellation
from tasks.patience import PATIENCE_SECONDS, is_away, patience_of_this_run, patient
from tasks.tracking_store import Tracking


class Flaky:
    """A client whose store is away for the first calls."""

    tracking_uri = "postgresql://db/mlflow"

    def __init__(
        self, away: int, code: int = TEMPORARILY_UNAVAILABLE, message: str = "the database system is starting up"
    ) -> None:
        self.away, self.code, self.message, self.calls = away, code, message, 0

    def get_run(self, run_id: str) -> str:
        self.calls += 1
        if self.calls <= self.away:
            raise MlflowException(self.message, error_code=self.code)
        return run_id


def client_of(flaky: Flaky, seconds: float = 60) -> Any:
    return patient(flaky, seconds, ask=0.01)  # type: ignore[arg-type]


def test_a_store_that_comes_back_is_waited_for() -> None:
    flaky = Flaky(away=3)
    assert client_of(flaky).get_run("a") == "a"
    assert flaky.calls == 4
    assert client_of(flaky).tracking_uri == flaky.tracking_uri


def test_a_store_that_stays_away_is_an_error_in_the_end() -> None:
    with pytest.raises(MlflowException, match="starting up"):
        client_of(Flaky(away=10**9), seconds=0.05).get_run("a")


def test_what_the_store_refuses_is_asked_once() -> None:
    flaky = Flaky(away=1, code=RESOURCE_DOES_NOT_EXIST)
    with pytest.raises(MlflowException):
        client_of(flaky).get_run("a")
    assert flaky.calls == 1


def test_a_stop_ends_the_waiting() -> None:
    flaky = Flaky(away=10**9)
    found: list[BaseException] = []

    def ask() -> None:
        try:
            client_of(flaky, seconds=600).get_run("a")
        except MlflowException as error:
            found.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        cancellation.stop()
        asking.join(30)
        assert found
    finally:
        cancellation._stopped.clear()


def test_real_stores_that_are_away_and_that_refuse(
    tmp_path: Path, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    began = time.monotonic()
    with pytest.raises(MlflowException) as away:
        patient(MlflowClient(tracking_uri=f"http://127.0.0.1:{unused_port}"), 0.2, ask=0.1).get_run("a")
    assert is_away(away.value)
    assert time.monotonic() - began > 0.1  # asked more than once
    with pytest.raises(MlflowException) as refused:
        MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db").get_run("a")
    assert not is_away(refused.value)


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_who_loses_a_race_for_a_row_asks_again(tracking: Tracking) -> None:
    """Several runs take the same data at once, and MLflow keeps one row for it."""
    client, together = tracking.client(), threading.Barrier(4)

    def take(run_id: str, digest: int) -> int:
        data = Dataset("instances", str(digest), "local", "{}")
        together.wait()
        client.log_inputs(run_id, datasets=[DatasetInput(data, [InputTag("mlflow.data.context", "instances")])])
        return len(client.get_run(run_id).inputs.dataset_inputs)

    for digest in range(4):
        runs = [client.create_run(tracking.experiment_id).info.run_id for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(take, runs, [digest] * 4)) == [1, 1, 1, 1]


def test_a_race_that_is_always_lost_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.patience.RACE_SECONDS", 0.0)
    flaky = Flaky(away=10**9, code=INTERNAL_ERROR, message="(psycopg.errors.UniqueViolation) duplicate key value")
    with pytest.raises(MlflowException, match="duplicate key"):
        client_of(flaky).get_run("a")
    assert flaky.calls == 11


def test_a_run_of_a_deployment_waits_for_its_store_and_a_command_does_not() -> None:
    assert patience_of_this_run() == 0
    for deployment, seconds in ((None, 0), (uuid4(), PATIENCE_SECONDS)):
        run = FlowRun(flow_id=uuid4(), deployment_id=deployment)
        with FlowRunContext.model_construct(flow_run=run):
            assert patience_of_this_run() == seconds
