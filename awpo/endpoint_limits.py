"""What an endpoint may be asked per minute and in all, and what it was asked: rates, a budget, counters."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from awpo.config import EndpointConfig
from awpo.errors import UserError

WINDOW_SECONDS = 60.0
BYTES_PER_TOKEN = 3.0
"""For estimates before a request: English prose has about 4.5 bytes a token, JSON about 3.3."""
MILLION = 1_000_000


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

    A request is let through when it fits at its dearest: the estimate of its prompt and as many tokens as it may
    answer with. Where it does not fit beside the requests under way it waits for them, since most cost less than
    their dearest. An answer that never came may be charged all the same, so it counts in full.
    """

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config
        self.limited = config.spending_limit is not None or config.token_limit is not None
        self._spent = self._reserved = (0, 0)
        self._changed = asyncio.Condition()

    def begin(self) -> None:
        """To be called in a new event loop, where nothing is under way."""
        self._changed, self._reserved = asyncio.Condition(), (0, 0)

    def _fits(self, prompt: int, completion: int) -> bool:
        if self.config.token_limit is not None and prompt + completion > self.config.token_limit:
            return False
        cost = cost_of(self.config, prompt, completion)
        return cost is None or self.config.spending_limit is None or cost <= self.config.spending_limit

    async def reserve(self, prompt: int, completion: int) -> None:
        """Raises SpendingLimitReached where the request cannot be paid for."""
        if not self.limited:
            return
        async with self._changed:
            while True:
                spent, reserved = self._spent, self._reserved
                if self._fits(spent[0] + reserved[0] + prompt, spent[1] + reserved[1] + completion):
                    self._reserved = (reserved[0] + prompt, reserved[1] + completion)
                    return
                if reserved == (0, 0):
                    raise self._reached(prompt + completion)
                await self._changed.wait()

    async def settle(self, reserved: tuple[int, int], spent: tuple[int, int]) -> None:
        """Replaces a reservation by what was spent: (prompt tokens, completion tokens) each."""
        if not self.limited:
            return
        async with self._changed:
            self._reserved = (self._reserved[0] - reserved[0], self._reserved[1] - reserved[1])
            self._spent = (self._spent[0] + spent[0], self._spent[1] + spent[1])
            self._changed.notify_all()

    def _reached(self, wanted: int) -> SpendingLimitReached:
        tokens, most = sum(self._spent), self.config.token_limit
        if most is not None and tokens + wanted > most:
            spent, key = f"{tokens:,} of {most:,} tokens", "token_limit"
        else:
            cost = cost_of(self.config, *self._spent) or 0.0
            spent, key = f"{cost:.4g} of {self.config.spending_limit:g}, {tokens:,} tokens", "spending_limit"
        return SpendingLimitReached(
            f"the budget for {self.config.model} is used up ({spent}), the next request might pass it; raise {key} and "
            "start again, what was answered is kept"
        )
