"""The connections of an endpoint's client, and what they refuse to read."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import httpx2
import openai

from awpo.config import EndpointConfig

LARGEST_RESPONSE = 8 * 2**20
"""Bytes of one response; past them the answer is refused, whatever the server still has to say."""
CONNECTIONS_PER_POOL = 4
"""A pool looks at all its idle connections for every request: at 64 at once that was half of the client's time."""


class Refused(openai.OpenAIError):
    """Raised while a response is read; passes through the openai client as it is."""


class _BoundedStream(httpx2.AsyncByteStream):
    """A response's body that refuses to be longer than `LARGEST_RESPONSE`."""

    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self.inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self.inner:
            size += len(chunk)
            if size > LARGEST_RESPONSE:
                raise Refused(f"its response is longer than {LARGEST_RESPONSE} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self.inner.aclose()


async def _bound(response: httpx2.Response) -> None:
    # Asked for as it is, so that what is counted is what is kept: a small compressed body may unpack to gigabytes.
    if response.headers.get("content-encoding", "identity") != "identity":
        raise Refused("it compresses its response though asked not to")
    # JSON is UTF-8. A charset that the server names may be a codec that decodes no text (base64) or raises (utf-16).
    response.encoding = "utf-8"
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = _BoundedStream(response.stream)


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """One for all pools: reading the certificates takes longer than many requests."""
    return httpx2.create_ssl_context()


class Connections:
    """As many connections as `config.concurrency`, in small pools, for one event loop; close them in it."""

    def __init__(self, config: EndpointConfig, key: str) -> None:
        self._config, self._key = config, key
        self._most = -(-config.concurrency // CONNECTIONS_PER_POOL)
        self._pools: list[openai.AsyncOpenAI] = []
        self._busy: list[int] = []

    @contextmanager
    def borrow(self) -> Iterator[openai.AsyncOpenAI]:
        """The pool with the fewest requests under way; a new one only where all others are full."""
        place = min(range(len(self._busy)), key=self._busy.__getitem__, default=0)
        if (not self._busy or self._busy[place] >= CONNECTIONS_PER_POOL) and len(self._pools) < self._most:
            place = len(self._pools)
            self._pools.append(self._new())
            self._busy.append(0)
        self._busy[place] += 1
        try:
            yield self._pools[place]
        finally:
            self._busy[place] -= 1

    def _new(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self._config.base_url,
            api_key=self._key,
            max_retries=0,
            timeout=self._config.timeout_seconds,
            http_client=openai.DefaultAsyncHttpxClient(
                verify=_ssl_context(),
                follow_redirects=False,
                event_hooks={"response": [_bound]},
                limits=httpx2.Limits(max_connections=CONNECTIONS_PER_POOL),
            ),
            default_headers={"Accept-Encoding": "identity"},
        )

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools))
