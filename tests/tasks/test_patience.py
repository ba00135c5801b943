"""A store that is away for a while is waited for; one that refuses is not; a stop of the flow ends the waiting."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, TEMPORARILY_UNAVAILABLE

from tasks import cancellation
from tasks.patience import is_away, patient


class Flaky:
    """A client whose store is away for the first calls."""

    tracking_uri = "postgresql://db/mlflow"

    def __init__(self, away: int, code: int = TEMPORARILY_UNAVAILABLE) -> None:
        self.away, self.code, self.calls = away, code, 0

    def get_run(self, run_id: str) -> str:
        self.calls += 1
        if self.calls <= self.away:
            raise MlflowException("the database system is starting up", error_code=self.code)
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
