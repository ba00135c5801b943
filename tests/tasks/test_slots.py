"""Slots on a real Prefect server: taken together or not at all, waited for with a word, given back whatever happens."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import flows.prefect_home  # noqa: F401 - before Prefect is imported

# isort: split
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.flow_engine import run_flow
from prefect.server.concurrency.lease_storage.filesystem import ConcurrencyLeaseStorage
from prefect.states import Pending
from prefect.testing.utilities import prefect_test_harness

from awpo.errors import UserError
from tasks import cancellation
from tasks.slots import slots

pytestmark = [pytest.mark.slow, pytest.mark.servers]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    """A server with limits of one slot (`one`), two (`two`) and four (`four`)."""
    with prefect_test_harness(server_startup_timeout=180):
        with get_client(sync_client=True) as client:
            for name, limit in (("one", 1), ("two", 2), ("four", 4)):
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=limit))
        yield


def taken(name: str) -> int:
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(name).active_slots


def in_a_flow(work: Callable[[], Any]) -> Any:
    return flow(name="test")(work)()


def wait_for(what: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.2)


def test_slots_are_held_for_the_block_and_given_back_after_an_error(server: None) -> None:
    """prefect#17415: slots are lost."""

    def work() -> None:
        with slots({"two": 1}):
            assert taken("two") == 1
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        in_a_flow(work)
    assert taken("two") == 0


def test_nothing_is_held_while_another_limit_is_waited_for(server: None) -> None:
    told: list[str] = []
    free, waiting = threading.Event(), threading.Event()
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    logging.getLogger("prefect._internal.concurrency").addHandler(handler)

    def holds() -> None:
        with slots({"one": 1}):
            waiting.wait(60)
            # Several tries of the other have been made and have kept nothing.
            assert taken("four") == 0
        free.set()

    def waits() -> None:
        with slots({"four": 3, "one": 1}, note=lambda text: (told.append(text), waiting.set())):  # type: ignore[arg-type,return-value]
            assert free.is_set()
            assert (taken("four"), taken("one")) == (3, 1)

    first = threading.Thread(target=in_a_flow, args=(holds,))
    first.start()
    wait_for(lambda: taken("one") == 1)
    in_a_flow(waits)
    first.join()
    logging.getLogger("prefect._internal.concurrency").removeHandler(handler)
    assert not [record for record in logged if record.levelno >= logging.ERROR], "waiting is no error"
    assert told[0].startswith("waiting for a free slot of four (3 slots) and one")
    assert told[-1].startswith("got a slot of four (3 slots) and one after")
    assert (taken("four"), taken("one")) == (0, 0)


def test_waiting_ends_when_the_flow_is_stopped(server: None) -> None:
    ended: list[BaseException] = []
    waiting = threading.Event()

    def waits() -> None:
        with slots({"one": 1}, note=lambda _: waiting.set()):
            pytest.fail("there was no free slot")

    def run() -> None:
        try:
            in_a_flow(waits)
        except InterruptedError as error:
            ended.append(error)

    def holds() -> None:
        with cancellation.stops_its_tasks(), slots({"one": 1}):
            thread = threading.Thread(target=run)
            thread.start()
            waiting.wait(60)
            cancellation.stop()
            thread.join(30)
            assert not thread.is_alive()

    in_a_flow(holds)
    with cancellation.stops_its_tasks():  # takes the signal back
        assert len(ended) == 1
    assert taken("one") == 0


def test_more_slots_than_there_are_is_said_at_once(server: None) -> None:
    def work() -> None:
        with slots({"two": 3}):
            pytest.fail("there are two")

    with pytest.raises(UserError, match=r"3 slots of the limit 'two' are needed, and it has fewer; raise it"):
        in_a_flow(work)


def test_a_limit_that_is_not_there_limits_nothing(server: None) -> None:
    def work() -> str:
        with slots({"nobody-made-it": 1}):
            return "done"

    assert in_a_flow(work) == "done"


def test_outside_of_a_run_nothing_is_asked() -> None:
    with slots({"one": 1}):
        pass


HOLDER = """
import time
from prefect import flow
from tasks.slots import slots

@flow
def hold():
    with slots({"gpu": 1}):
        print("held", flush=True)
        time.sleep(600)

hold()
"""


def test_a_killed_process_gives_its_slot_back_even_past_a_restart_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prefect#17415: slots are lost."""
    from flows.prefect_server import temporary_server

    monkeypatch.setenv("AWPO_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS", "1")
    (tmp_path / "home").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def ask(code: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "PREFECT_API_URL": url},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    limits = "from flows.limits import ensure_limits; print(*ensure_limits())"
    active = (
        "from prefect.client.orchestration import get_client\n"
        "with get_client(sync_client=True) as c: print(c.read_global_concurrency_limit_by_name('gpu').active_slots)"
    )
    with temporary_server() as url:
        assert ask(limits) == "gpu judge-api"
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER],
            env={**environment, "PREFECT_API_URL": url},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None
        assert "held" in holder.stdout.readline()
        holder.kill()
        holder.wait()
        assert ask(active) == "1"
    # A minute passes, in which nobody renews the lease.
    storage = ConcurrencyLeaseStorage(tmp_path / "home" / "concurrency_leases")

    async def expire() -> int:
        leases = await storage.read_active_lease_ids()
        for lease in leases:
            await storage.renew_lease(lease, timedelta(seconds=-1))
        return len(leases)

    assert asyncio.run(expire()) == 1
    with temporary_server() as url:
        wait_for(lambda: ask(active) == "0")


def test_a_run_goes_on_where_its_deployments_lease_is_lost(server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine renews it, and would end the run of a server that has forgotten its leases."""
    monkeypatch.setattr("prefect.concurrency._leases._RENEWAL_FRACTION", 0.01)  # of 300 s
    lost = threading.Event()

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "no longer reserved" in record.getMessage():
                lost.set()

    @flow
    def works() -> bool:
        with get_client(sync_client=True) as client:
            client.release_concurrency_slots_with_lease(lease)
        told = lost.wait(120)
        time.sleep(1.0)  # in which the engine would end it
        return told

    with get_client(sync_client=True) as client:
        made = client.create_deployment(client.create_flow(works), "limited", concurrency_limit=1)
        run = client.create_flow_run_from_deployment(made)
        client.set_flow_run_state(run.id, Pending())
        run = client.read_flow_run(run.id)
    assert run.state
    lease = run.state.state_details.deployment_concurrency_lease_id
    assert lease
    loggers = [logging.getLogger(name) for name in ("prefect.flow_runs", "prefect.concurrency")]
    ear = Ear()
    for logger in loggers:
        logger.addHandler(ear)
    try:
        assert run_flow(works, flow_run=run) is True
    finally:
        for logger in loggers:
            logger.removeHandler(ear)
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run.id).state
    assert state
    assert state.is_completed()
