"""Limits hold for a run: for all its processes, over all its attempts, whichever of them was killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from awpo.config import EndpointConfig, JudgeConfig
from awpo.config_training import PolicyConfig
from awpo.endpoint import Endpoint
from awpo.endpoint_limits import Budget, SpendingLimitReached
from awpo.endpoint_spending import SPENDING, Spending, machines, spending_file
from awpo.errors import UserError
from awpo.judge import make_judge
from awpo.judge_endpoint import EndpointJudge

# A request is estimated at (18 + 12) / 3 = 10 + 20 tokens and takes 12 + 8.
ASKING = """
import asyncio, sys
from pathlib import Path
from awpo.config import EndpointConfig
from awpo.endpoint import Endpoint
from awpo.endpoint_limits import SpendingLimitReached

async def ask(endpoint, name):
    try:
        return bool(await endpoint.chat([{"role": "user", "content": name}]))
    except SpendingLimitReached:
        return False

async def run(url, file, name):
    config = EndpointConfig(base_url=url, model="m", max_tokens=20, token_limit=405, concurrency=4, cache="off")
    async with Endpoint(config, spending=Path(file)) as endpoint:
        print("ready", flush=True)
        sys.stdin.readline()
        print(sum(await asyncio.gather(*(ask(endpoint, f"{name}{number:017d}") for number in range(30)))))

asyncio.run(run(*sys.argv[1:]))
"""


def config(url: str = "http://127.0.0.1:1/v1", **values: Any) -> EndpointConfig:
    settings = {"base_url": url, "model": "m", "max_tokens": 20, "cache": "off", "attempts": 1}
    return EndpointConfig.read({**settings, **values}, "the test")


def asking(url: str, file: Path, name: str) -> subprocess.Popen[str]:
    """A process that waits for a line, then asks 30 times and tells how often it was answered."""
    process = subprocess.Popen(
        [sys.executable, "-c", ASKING, url, str(file), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def test_processes_spend_the_limit_once_together_and_wholly(faults: Any, tmp_path: Path) -> None:
    """After 19 answers 380 are spent, and 380 + 30 > 405: together they get as many as one alone would."""
    faults.script(default={"do": "answer", "usage": {"prompt_tokens": 12, "completion_tokens": 8}, "delay": 0.02})
    processes = [asking(faults.url, tmp_path / SPENDING, name) for name in "ab"]
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    answered = [int(process.communicate(timeout=120)[0]) for process in processes]
    assert sum(answered) == len(faults.log()) == 19


def ask(client: Endpoint, times: int) -> int:
    """How many of so many requests were answered."""

    async def run() -> int:
        answered = 0
        async with client:
            for number in range(times):
                try:
                    answered += bool(await client.chat([{"role": "user", "content": f"{number:018d}"}]))
                except SpendingLimitReached:
                    break
        return answered

    return asyncio.run(run())


def test_a_resumed_run_counts_what_was_spent_before(faults: Any, tmp_path: Path) -> None:
    faults.script(default={"do": "answer", "usage": {"prompt_tokens": 12, "completion_tokens": 8}})
    limited = config(faults.url, token_limit=205)
    first = Endpoint(limited, spending=tmp_path / SPENDING)
    assert ask(first, 6) == 6
    first.close_cache()
    assert ask(Endpoint(limited, spending=tmp_path / SPENDING), 20) == 3  # 9 in all
    with pytest.raises(SpendingLimitReached, match=r"used up \(180 of 205 tokens\)"):
        asyncio.run(Endpoint(limited, spending=tmp_path / SPENDING).chat([{"role": "user", "content": "0" * 18}]))
    raised = config(faults.url, token_limit=225)
    assert ask(Endpoint(raised, spending=tmp_path / SPENDING), 20) == 1


def test_what_a_killed_process_had_under_way_counts_at_its_dearest_and_holds_nobody_up(
    faults: Any, tmp_path: Path
) -> None:
    """Four requests of a killed process may have been charged: 4 x 30 of 405 are gone."""
    faults.script({"match": "a", "do": "hang"}, default={"do": "answer", "usage": {"prompt_tokens": 12, "completion_tokens": 8}})  # fmt: skip
    process = asking(faults.url, tmp_path / SPENDING, "a")
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()
    while len(faults.log()) < 4:
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert ask(Endpoint(config(faults.url, token_limit=405), spending=tmp_path / SPENDING), 30) == 13
    with Spending(tmp_path / SPENDING) as spending:
        assert sum(spending.total()) == 120 + 260  # 380 + 30 > 405


def test_a_request_waits_for_what_another_process_may_give_back(tmp_path: Path) -> None:
    other = Spending(tmp_path / SPENDING)  # another client, of a process that lives
    budget = Budget(config(token_limit=100), tmp_path / SPENDING)
    assert other.reserve((10, 80), lambda prompt, completion: True)

    async def run() -> None:
        waiting = asyncio.create_task(budget.reserve(10, 20))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        other.settle((10, 80), (10, 30))
        await asyncio.wait_for(waiting, 30)
        await budget.settle((10, 20), (10, 20))
        with pytest.raises(SpendingLimitReached):
            await budget.reserve(20, 20)

    asyncio.run(run())
    other.close()


def test_what_a_client_left_behind_in_another_event_loop_counts(tmp_path: Path) -> None:
    with Spending(tmp_path / SPENDING) as spending:
        assert spending.reserve((3, 4), lambda *_: True)
        assert spending.may_change()
        spending.begin()
        assert spending.total() == (3, 4)
        assert not spending.may_change()


def test_a_client_of_another_machine_holds_nobody_up(tmp_path: Path) -> None:
    """The folder was moved, or the container restarted under another name."""
    with Spending(tmp_path / SPENDING) as spending:
        spending._connection.execute("INSERT INTO spending VALUES ('elsewhere:1:1#0', 1, 2, 3, 4)")
        assert not spending.may_change()
        assert spending.total() == (4, 6)


def test_machines_keep_a_file_each_for_an_equal_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (machines(), spending_file(tmp_path).name) == (1, SPENDING)
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2"), ("GROUP_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert (machines(), spending_file(tmp_path).name) == (2, ".spending-1.sqlite")
    budget = Budget(config(token_limit=101), spending_file(tmp_path))
    asyncio.run(budget.reserve(10, 40))
    asyncio.run(budget.settle((10, 40), (10, 40)))
    with pytest.raises(SpendingLimitReached, match="50 of 50 tokens"):
        asyncio.run(budget.reserve(1, 1))
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # a launcher that tells nothing of machines
    assert machines() == 1


def test_a_file_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / SPENDING).write_text("no database, by any means; " * 40)
    with pytest.raises(UserError, match=r"what was spent cannot be kept in .*spending_limit"):
        Endpoint(config(token_limit=10), spending=tmp_path / SPENDING)
    Endpoint(config(), spending=tmp_path / SPENDING)  # without limits nothing is kept


def test_the_judges_of_a_run_share_its_limit(tmp_path: Path) -> None:
    settings = {"kind": "endpoint", "endpoint": config(token_limit=100).model_dump()}
    judges = [make_judge(JudgeConfig.read(settings, "the test"), draw=draw, folder=tmp_path) for draw in (0, 1)]
    first, second = (judge.endpoint._budget for judge in judges if isinstance(judge, EndpointJudge))
    asyncio.run(first.reserve(10, 60))
    asyncio.run(first.settle((10, 60), (10, 60)))
    with pytest.raises(SpendingLimitReached, match="70 of 100 tokens"):
        asyncio.run(second.reserve(10, 30))


def test_training_goes_on_under_a_higher_limit_and_another_address_but_not_with_another_model() -> None:
    def identity(**endpoint: Any) -> dict[str, Any]:
        judge = {"kind": "endpoint", "endpoint": config(**endpoint).model_dump()}
        return PolicyConfig.read({"judge": judge}, "the test").identity()

    assert identity(token_limit=100) == identity(token_limit=200, concurrency=2, url="http://127.0.0.1:2/v1")
    assert identity() != identity(model="other")
    assert identity() != identity(temperature=0.5)
