"""What an endpoint may be asked per minute and in all, and what it was asked: rates, a budget, counters."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from awpo.config import EndpointConfig
from awpo.endpoint_spending import Spending, Tokens, machines
from awpo.errors import UserError

WINDOW_SECONDS = 60.0
BYTES_PER_TOKEN = 3.0
"""For estimates before a request: English prose has about 4.5 bytes a token, JSON about 3.3."""
MILLION = 1_000_000
LOOK_AGAIN_SECONDS = 0.25
"""How often a request that waits for the budget looks whether other processes spent less than they reserved."""


def estimated_tokens(messages: Iterable[Mapping[str, Any]]) -> int:
    """A cautious estimate of a request's prompt tokens, from the bytes of its messages; at least 1."""
    size = sum(len(str(message.get("content") or "").encode("utf-8", "replace")) + 12 for message in messages)
    return max(1, round(size / BYTES_PER_TOKEN))


@dataclass
class Usage:
    """Counters over an endpoint's life. `requests` counts tries that were sent, `answers` those that were answered.

    Tokens are the server's count; where it tells none they are estimated, and `estimated` counts such answers.
    `seconds` is the sum of the answers' latencies, so that `seconds / answers` is their mean.
    """

    requests: int = 0
    answers: int = 0
    cache_hits: int = 0
    retries: int = 0
    failures: int = 0
    estimated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def cost(self, config: EndpointConfig) -> float | None:
        """What the tokens cost at the configured prices; None without prices."""
        return cost_of(config, self.prompt_tokens, self.completion_tokens)

    def metrics(self, config: EndpointConfig | None = None) -> dict[str, float]:
        """The counters by name, the mean latency where there is one, and the cost where there are prices."""
        found = {field.name: float(getattr(self, field.name)) for field in fields(self)}
        if self.answers:
            found["latency"] = self.seconds / self.answers
        cost = self.cost(config) if config else None
        return found if cost is None else {**found, "cost": cost}


def cost_of(config: EndpointConfig, prompt_tokens: float, completion_tokens: float) -> float | None:
    """The price of so many tokens, in the currency of the prices; None without prices."""
    if config.input_price is None or config.output_price is None:
        return None
    return (prompt_tokens * config.input_price + completion_tokens * config.output_price) / MILLION


class RateLimiter:
    """Lets so many requests and tokens pass in any 60 seconds, in the order in which they came.

    What passed stands in a window with its time. A request's tokens are an estimate until it is answered: `settle`
    then puts the true number in its place. One that is larger than the limit passes when the window is empty.
    """

    def __init__(
        self,
        requests: int | None,
        tokens: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.requests, self.tokens, self._clock, self._sleep = requests, tokens, clock, sleep
        self._window: deque[list[float]] = deque()  # [time, tokens] of each request
        self._turn = asyncio.Lock()

    def begin(self) -> None:
        """To be called in a new event loop: what passed still counts, who waited is gone."""
        self._turn = asyncio.Lock()

    async def wait(self, tokens: int) -> list[float]:
        """Returns when a request of so many tokens may be sent; the result is for `settle`."""
        entry = [0.0, float(tokens)]
        if self.requests is None and self.tokens is None:
            return entry
        async with self._turn:
            while (pause := self._pause(tokens)) > 0:
                await self._sleep(pause)
            entry[0] = self._clock()
            self._window.append(entry)
        return entry

    def settle(self, entry: list[float], tokens: int) -> None:
        """Puts the number of tokens that a request really took in place of its estimate."""
        entry[1] = float(tokens)

    def _pause(self, tokens: int) -> float:
        """Seconds until the oldest request that is in the way has left the window; 0 where none is."""
        now = self._clock()
        while self._window and self._window[0][0] <= now - WINDOW_SECONDS:
            self._window.popleft()
        if not self._window:
            return 0.0
        full = self.requests is not None and len(self._window) >= self.requests
        if self.tokens is not None and sum(entry[1] for entry in self._window) + tokens > self.tokens:
            full = True
        return self._window[0][0] + WINDOW_SECONDS - now if full else 0.0


class SpendingLimitReached(UserError):
    """The next request might pass the budget, and nothing that is under way could still change that."""


class Budget:
    """Keeps what is spent within `spending_limit` and `token_limit`.

    Both hold for a run: for all processes and attempts that keep `file` together (`awpo.endpoint_spending`), or for
    this object without one. A request is let through when it fits at its dearest: the estimate of its prompt and as
    many tokens as it may answer with. Where it does not fit beside the requests under way it waits for them, since
    most cost less than their dearest. An answer that never came may be charged all the same, so it counts in full.
    Raises UserError where the file cannot be used.
    """

    def __init__(self, config: EndpointConfig, file: Path | None = None) -> None:
        self.config = config
        parts = machines() if file else 1
        self._money = config.spending_limit / parts if config.spending_limit is not None else None
        self._tokens = config.token_limit // parts if config.token_limit is not None else None
        self._spending = Spending(file) if self.limited else None
        self._changed = asyncio.Condition()

    @property
    def limited(self) -> bool:
        return self.config.spending_limit is not None or self.config.token_limit is not None

    def begin(self) -> None:
        """To be called in a new event loop, where nothing is under way."""
        self._changed = asyncio.Condition()
        if self._spending:
            self._spending.begin()

    def close(self) -> None:
        """Closes the file; nothing is asked afterwards."""
        if self._spending:
            self._spending.close()

    def _fits(self, prompt: int, completion: int) -> bool:
        if self._tokens is not None and prompt + completion > self._tokens:
            return False
        cost = cost_of(self.config, prompt, completion)
        return cost is None or self._money is None or cost <= self._money

    async def reserve(self, prompt: int, completion: int) -> None:
        """Raises SpendingLimitReached where the request cannot be paid for."""
        if self._spending is None:
            return
        async with self._changed:
            while not self._spending.reserve((prompt, completion), self._fits):
                if not self._spending.may_change():
                    raise self._reached(self._spending.total(), prompt + completion)
                with suppress(TimeoutError):  # of what other processes spend nobody tells
                    async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                        await self._changed.wait()

    async def settle(self, reserved: Tokens, spent: Tokens) -> None:
        """Replaces a reservation by what was spent: (prompt tokens, completion tokens) each."""
        if self._spending is None:
            return
        async with self._changed:
            self._spending.settle(reserved, spent)
            self._changed.notify_all()

    def _reached(self, total: Tokens, wanted: int) -> SpendingLimitReached:
        tokens = sum(total)
        if self._tokens is not None and tokens + wanted > self._tokens:
            spent, key = f"{tokens:,} of {self._tokens:,} tokens", "token_limit"
        else:
            cost = cost_of(self.config, *total) or 0.0
            spent, key = f"{cost:.4g} of {self._money:g}, {tokens:,} tokens", "spending_limit"
        return SpendingLimitReached(
            f"the budget for {self.config.model} is used up ({spent}), the next request might pass it; raise {key} and "
            "start again, what was answered is kept"
        )
