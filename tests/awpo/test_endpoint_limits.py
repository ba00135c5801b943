"""Rates on a clock of their own, a budget against a real server, counters by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awpo.config import EndpointConfig
from awpo.endpoint import Endpoint
from awpo.endpoint_limits import Budget, RateLimiter, SpendingLimitReached, Usage, estimated_tokens
from awpo.errors import UserError


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def times(limits: tuple[int | None, int | None], *tokens: int, settled: int | None = None) -> list[float]:
    """When requests of so many tokens pass, all of them waiting from 0 on."""
    clock = Clock()

    async def run() -> list[float]:
        limiter = RateLimiter(*limits, clock=clock, sleep=clock.sleep)
        passed = []
        for wanted in tokens:
            entry = await limiter.wait(wanted)
            if settled is not None:
                limiter.settle(entry, settled)
            passed.append(clock.now - 1000)
        return passed

    return asyncio.run(run())


def test_rates_by_hand() -> None:
    assert times((None, None), 5, 5, 5) == [0, 0, 0]
    assert times((2, None), 1, 1, 1, 1, 1) == [0, 0, 60, 60, 120]
    assert times((None, 100), 40, 40, 40, 40, 40) == [0, 0, 60, 60, 120]
    assert times((None, 100), 40, 40, 40, 40, 40, settled=20) == [0, 0, 0, 0, 60]  # 4 x 20 + 40 > 100
    assert times((3, 100), 90, 1, 1, 90) == [0, 0, 0, 60]


def test_a_request_larger_than_the_limit_passes_alone() -> None:
    assert times((None, 100), 50, 500, 50) == [0, 60, 120]


@settings(max_examples=60, deadline=None)
@given(
    requests=st.one_of(st.none(), st.integers(1, 5)),
    tokens=st.one_of(st.none(), st.integers(10, 50)),
    wanted=st.lists(st.integers(1, 10), max_size=25),
)
def test_no_minute_holds_more_than_the_limits(requests: int | None, tokens: int | None, wanted: list[int]) -> None:
    passed = times((requests, tokens), *wanted)
    assert passed == sorted(passed)
    for start in passed:
        window = [n for n, moment in zip(wanted, passed, strict=True) if start <= moment < start + 60]
        assert requests is None or len(window) <= requests
        assert tokens is None or sum(window) <= tokens


def config(url: str = "http://127.0.0.1:9/v1", **values: Any) -> EndpointConfig:
    return EndpointConfig(base_url=url, model="m", **{"attempts": 1, "timeout_seconds": 5, **values})


def test_a_run_of_several_processes_shares_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    limits = Endpoint(config(requests_per_minute=10, tokens_per_minute=3))._rates
    assert (limits.requests, limits.tokens) == (2, 1)


def test_the_rate_of_a_real_client(faults: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    client = Endpoint(config(faults.url, requests_per_minute=2))
    client._rates = RateLimiter(2, None, clock=clock, sleep=clock.sleep)

    async def five() -> None:
        async with client:
            await asyncio.gather(*(client.chat([{"role": "user", "content": str(n)}]) for n in range(5)))

    asyncio.run(five())
    assert clock.now - 1000 == 120
    assert len(faults.log()) == 5


def ask_until_refused(client: Endpoint, most: int, at_once: int = 1) -> int:
    """How many requests were answered."""

    async def run() -> int:
        answered = 0
        async with client:
            for start in range(0, most, at_once):
                chats = [client.chat([{"role": "user", "content": f"{n:018d}"}]) for n in range(start, start + at_once)]
                for result in await asyncio.gather(*chats, return_exceptions=True):
                    if isinstance(result, SpendingLimitReached):
                        continue
                    assert isinstance(result, str)
                    answered += 1
        return answered

    return asyncio.run(run())


@pytest.mark.parametrize("at_once", [1, 10])
def test_a_token_limit_is_never_passed(faults: Any, at_once: int) -> None:
    # A request is estimated at (18 + 12) / 3 = 10 + 20 tokens and takes 12 + 8: after 9 of them 180 are spent, and
    # 180 + 30 > 205.
    faults.script(default={"do": "answer", "usage": {"prompt_tokens": 12, "completion_tokens": 8}})
    client = Endpoint(config(faults.url, max_tokens=20, token_limit=205))
    assert ask_until_refused(client, 20, at_once) == 9
    assert client.usage.prompt_tokens + client.usage.completion_tokens == 180
    assert len(faults.log()) == 9


def test_a_spending_limit_is_never_passed_and_says_what_was_spent(faults: Any) -> None:
    # 2 and 10 a million tokens: 10 x 2 + 20 x 10 = 220 millionths at the dearest, 12 x 2 + 8 x 10 = 104 really.
    faults.script(default={"do": "answer", "usage": {"prompt_tokens": 12, "completion_tokens": 8}})
    prices = {"input_price": 2, "output_price": 10, "spending_limit": 0.000533}
    client = Endpoint(config(faults.url, max_tokens=20, **prices))
    assert ask_until_refused(client, 20) == 4  # 4 x 104 + 220 > 533
    assert client.usage.cost(client.config) == pytest.approx(0.000416)
    with pytest.raises(SpendingLimitReached, match=r"budget for m is used up \(0\.000416 of 0\.000533, 80 tokens\)"):
        asyncio.run(client.chat([{"role": "user", "content": "0" * 18}]))


def test_an_answer_that_never_came_counts_at_its_dearest(faults: Any) -> None:
    faults.script({"times": 2, "do": "hang"})
    client = Endpoint(config(faults.url, max_tokens=20, token_limit=70, timeout_seconds=0.3, attempts=3))
    with pytest.raises(SpendingLimitReached):  # 30 + 30 for what may have been charged, and 30 more
        asyncio.run(client.chat([{"role": "user", "content": "0" * 18}]))
    assert len(faults.log()) == 2


def test_a_refusal_costs_nothing(faults: Any) -> None:
    faults.script({"times": 5, "do": "status", "status": 400})
    client = Endpoint(config(faults.url, max_tokens=20, token_limit=31))

    async def run() -> str:
        async with client:
            for _ in range(5):
                with pytest.raises(UserError, match="400"):
                    await client.chat([{"role": "user", "content": "0" * 18}])
            return await client.chat([{"role": "user", "content": "0" * 18}])

    assert asyncio.run(run()) == "Good morning"


def test_settings_that_cannot_hold() -> None:
    for wrong, message in (
        ({"input_price": 1}, "go together"),
        ({"spending_limit": 1}, "needs input_price"),
        ({"requests_per_minute": 0}, "must be more than 0"),
    ):
        with pytest.raises(UserError, match=message):
            EndpointConfig.read({"base_url": "http://localhost/v1", "model": "m", **wrong}, "test")
    assert not Budget(config()).limited


def test_counters_as_metrics() -> None:
    usage = Usage(requests=5, answers=4, prompt_tokens=1000, completion_tokens=500, seconds=2.0)
    metrics = usage.metrics(config(input_price=2, output_price=4))
    assert metrics["latency"] == 0.5
    assert metrics["cost"] == pytest.approx(0.004)
    assert "cost" not in usage.metrics(config())
    assert "latency" not in Usage().metrics()
    assert estimated_tokens([]) == 1
