"""A client of an OpenAI-compatible chat endpoint that many requests at once cannot bring down.

Bounded concurrency, rate limits, a time limit per try, retries with growing random pauses where trying again can help,
and `Retry-After` honoured by all requests of the client. Answers are read with distrust (`awpo.endpoint_answers`) and
kept on disk (`awpo.endpoint_cache`), what is asked is counted and kept within a budget (`awpo.endpoint_limits`). The key
is read from the environment, is sent to the configured host only (redirects are not followed), and stands in no message
or log.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import httpx2
import openai

from awpo.config import EndpointConfig
from awpo.endpoint_answers import NO_KEY, AnswerReader, EndpointError, can_pass
from awpo.endpoint_cache import CachedAnswer, EndpointCache, request_key, shared_cache_file
from awpo.endpoint_connections import Connections, Refused
from awpo.endpoint_limits import Budget, RateLimiter, Usage, estimated_tokens
from awpo.errors import UserError

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds: the pause before try n + 1 is drawn from [0, min(LONGEST_PAUSE, FIRST_PAUSE * 2^n)] ("full jitter")."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: its text, the server's `finish_reason`, and whether it came from the cache.

    Tokens and seconds are what it took when it was made.
    """

    text: str
    finish: str | None
    cached: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, answer: CachedAnswer, *, cached: bool = False) -> Reply:
        return cls(answer.text, answer.finish, cached, answer.prompt_tokens, answer.completion_tokens, answer.seconds)


class Endpoint:
    """A chat endpoint. Usable from one event loop after another, as `asyncio.run` makes them; close it in each.

    `seed` fixes the pauses; its default is the process's rank, so that ranks that failed together try again apart.
    `cache` is the file of answers where `config.cache` is "auto" and the endpoint is on this machine: such a server
    may answer differently the next time, so what it said is not shared between runs. `spending` is the file in which all
    processes and attempts of a run keep what they spent; without it the limits hold for this object. With
    `whole` a reply's text is the answer's whole message as JSON, {"content", "reasoning_content", "tool_calls"}; it may
    be empty. `usage` counts.
    Raises UserError where base_url is no http(s) URL, a host other than this machine has no key, or the cache cannot
    be opened.
    """

    def __init__(
        self,
        config: EndpointConfig,
        *,
        seed: int | None = None,
        cache: Path | None = None,
        spending: Path | None = None,
        whole: bool = False,
    ) -> None:
        self.config = config
        url = urlsplit(config.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise UserError(f"base_url {config.base_url!r} is not an http(s) URL; give one like http://host:8000/v1")
        self.address = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"  # without a password, for messages
        key = os.environ.get(config.api_key_variable, "").strip()
        local = is_local(url.hostname)
        if not key and not local:
            raise UserError(
                f"the endpoint {self.address} needs a key: set the environment variable {config.api_key_variable}"
            )
        self._key = key or NO_KEY
        self._answers = AnswerReader(self.address, self._key, config.api_key_variable, whole=whole)
        self._random = random.Random(int(os.environ.get("RANK", 0)) if seed is None else seed)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: Connections | None = None
        self._slots = asyncio.Semaphore(config.concurrency)
        self._not_before = 0.0  # time.monotonic() before which a Retry-After forbids requests
        self._length_option = "max_tokens"
        self.usage = Usage()
        processes = max(1, int(os.environ.get("WORLD_SIZE", 1)))
        self._rates = RateLimiter(
            _share(config.requests_per_minute, processes), _share(config.tokens_per_minute, processes)
        )
        self._budget = Budget(config, spending)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        file = cache_file(config, cache)
        self._cache = EndpointCache(file) if file else None

    def __repr__(self) -> str:
        return f"Endpoint({self.address}, {self.config.model})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections of the running event loop; the next `chat` opens new ones."""
        connections, self._connections = self._connections, None
        if connections is not None and self._loop is asyncio.get_running_loop():
            await connections.close()

    def _connect(self) -> Connections:
        loop = asyncio.get_running_loop()
        if self._connections is None or self._loop is not loop:
            self._loop = loop
            self._slots = asyncio.Semaphore(self.config.concurrency)
            self._turns = WeakValueDictionary()
            self._rates.begin()
            self._budget.begin()
            self._connections = Connections(self.config, self._key)
        return self._connections

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The answer's text; see `ask`."""
        return (await self.ask(messages, **options)).text

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        draw: int = 0,
        keep: Callable[[str], bool] | None = None,
        **options: Any,
    ) -> Reply:
        """The answer, from the cache where it is known. `options` are further fields of the request and win over the
        configuration's.

        Another `draw` is another answer to the same request. `keep` says of a text whether it is worth keeping.
        Raises EndpointError where the request was refused, or failed in every one of `config.attempts` tries, and
        SpendingLimitReached where the budget may not suffice.
        """
        request = self._request(messages, options)
        connections = self._connect()
        if self._cache is None:
            return Reply.of(await self._try(connections, request))
        key = request_key(self.config.base_url, request, self._draw(draw))
        turn = self._turns.setdefault(key, asyncio.Lock())
        async with turn:  # whoever asks the same at the same time waits for the first, and finds its answer
            if known := self._cache.get(key):
                self.usage.cache_hits += 1
                return Reply.of(known, cached=True)
            answer = await self._try(connections, request)
            if keep is None or keep(answer.text):
                self._cache.put(key, str(request["model"]), answer)
            return Reply.of(answer)

    def known(self, messages: Sequence[Mapping[str, Any]], *, draw: int = 0) -> Reply | None:
        """The cached answer to a request without further options; None where it would have to be asked."""
        if self._cache is None:
            return None
        answer = self._cache.get(request_key(self.config.base_url, self._request(messages, {}), self._draw(draw)))
        return Reply.of(answer, cached=True) if answer else None

    def _draw(self, draw: int) -> int | str:
        """A whole message and its text are kept under two keys."""
        return f"message {draw}" if self._answers.whole else draw

    def close_cache(self) -> None:
        """Closes the files of answers and of what was spent; nothing is asked afterwards."""
        if self._cache is not None:
            self._cache.close()
        self._budget.close()

    def _request(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": self.config.model,
            "messages": list(messages),
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
            **self.config.options,
            **options,
        }

    async def _try(self, connections: Connections, request: Mapping[str, Any]) -> CachedAnswer:
        """The answer of one of `config.attempts` tries."""
        failure: EndpointError | None = None
        for attempt in range(self.config.attempts):
            if failure is not None:
                self.usage.retries += 1
                bound = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (attempt - 1))
                await asyncio.sleep(self._random.uniform(0, bound))
            async with self._slots:
                while (wait := self._not_before - time.monotonic()) > 0:
                    await asyncio.sleep(wait + self._random.uniform(0, FIRST_PAUSE))
                try:
                    return await self._ask_within_limits(connections, request)
                except (TimeoutError, openai.APITimeoutError):
                    failure = self._answers.error(f"gave no answer within {self.config.timeout_seconds:g} s")
                except openai.APIStatusError as error:
                    failure = self._answers.refusal(error)
                    self._not_before = max(self._not_before, time.monotonic() + self._answers.pause(error))
                    if not can_pass(error):
                        self.usage.failures += 1
                        raise failure from None
                except openai.APIConnectionError as error:
                    reason = str(error.__cause__ or error) or type(error.__cause__).__name__
                    failure = self._answers.error(f"cannot be reached ({reason}); is it running, is base_url right?")
                except Refused as error:
                    self.usage.failures += 1
                    raise self._answers.error(f"cannot be used: {error}") from None
        assert failure is not None  # attempts >= 1
        self.usage.failures += 1
        tries = f" (the last of {self.config.attempts} tries)" if self.config.attempts > 1 else ""
        raise EndpointError(f"{failure}{tries}", failure.status, passes=True)

    async def _ask_within_limits(self, connections: Connections, request: Mapping[str, Any]) -> CachedAnswer:
        """One try: waits for its turn, pays for it, sets the time limit and counts."""
        prompt, longest = estimated_tokens(request["messages"]), int(request["max_tokens"])
        await self._budget.reserve(prompt, longest)
        spent = (0, 0)  # a refusal costs nothing
        try:
            entry = await self._rates.wait(prompt + longest)
            self.usage.requests += 1
            start = time.monotonic()
            spent = (prompt, longest)  # until it is known better: an answer that never came may be charged
            try:
                async with asyncio.timeout(self.config.timeout_seconds):
                    answer = await self._ask(connections, request)
            except openai.APIStatusError:
                spent = (0, 0)
                raise
            spent = (answer.prompt_tokens, answer.completion_tokens)
            self._rates.settle(entry, sum(spent))
            self.usage.answers += 1
            self.usage.prompt_tokens += spent[0]
            self.usage.completion_tokens += spent[1]
            seconds = time.monotonic() - start
            self.usage.seconds += seconds
            return replace(answer, seconds=round(seconds, 4))
        finally:
            await self._budget.settle((prompt, longest), spent)

    async def _ask(self, connections: Connections, request: Mapping[str, Any]) -> CachedAnswer:
        # Sent as it is: the fields are the server's matter, not that of the client library's version. In ASCII, as a
        # source's lone surrogate would not encode.
        fields = {self._length_option if name == "max_tokens" else name: value for name, value in request.items()}
        body, headers = json.dumps(fields).encode("ascii"), {"Content-Type": "application/json"}
        try:
            with connections.borrow() as client:
                response = await client.post(
                    "/chat/completions", cast_to=httpx2.Response, content=body, options={"headers": headers}
                )
        except openai.BadRequestError as error:
            if self._length_option == "max_tokens" and "max_completion_tokens" in error.response.text:
                self._length_option = "max_completion_tokens"  # OpenAI's reasoning models know no other name
                return await self._ask(connections, request)
            raise
        answer, told = self._answers.completion(response, request["messages"])
        self.usage.estimated += not told
        return answer


def _share(limit: int | None, processes: int) -> int | None:
    """One process's part of a limit that all of a run's processes keep together; at least 1."""
    return None if limit is None else max(1, limit // processes)


def cache_file(config: EndpointConfig, own: Path | None) -> Path | None:
    """Where an endpoint's answers are kept: `own` is the file for those of an endpoint on this machine; None: nowhere."""
    if config.cache == "off":
        return None
    if config.cache != "auto":
        return Path(config.cache)
    return own if is_local(urlsplit(config.base_url).hostname or "") else shared_cache_file()


def is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
