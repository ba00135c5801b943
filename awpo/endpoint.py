"""A client of an OpenAI-compatible chat endpoint that many requests at once cannot bring down.

Bounded concurrency, a time limit per try, retries with growing random pauses where trying again can help, and
`Retry-After` honoured by all requests of the client. The key is read from the environment, is sent to the configured
host only (redirects are not followed), and stands in no message or log.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, Self
from urllib.parse import urlsplit

import httpx2
import openai

from awpo.config import EndpointConfig
from awpo.errors import UserError

LARGEST_RESPONSE = 8 * 2**20
"""Bytes of one response; past them the answer is refused, whatever the server still has to say."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds: the pause before try n + 1 is drawn from [0, min(LONGEST_PAUSE, FIRST_PAUSE * 2^n)] ("full jitter")."""
LONGEST_RETRY_AFTER = 300.0
"""Seconds; a server that asks for a longer wait than this is given up on, with a message that says so."""
RETRIED = frozenset({408, 409, 429})
"""Statuses worth another try, besides 5xx, time-outs and lost connections."""

_HINTS = {
    401: "check the key in {variable}",
    403: "check what the key in {variable} may use",
    404: "check base_url (it usually ends in /v1) and the model's name",
}


class EndpointError(UserError):
    """A request that failed for good. `status` is the HTTP status, None where there was no answer to speak of."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def hopeless(self) -> bool:
        """Whether every other request will fail in the same way: a wrong key, address or model."""
        return self.status in _HINTS


class _Refused(openai.OpenAIError):
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
                raise _Refused(f"its response is longer than {LARGEST_RESPONSE} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self.inner.aclose()


async def _bound(response: httpx2.Response) -> None:
    # Asked for as it is, so that what is counted is what is kept: a small compressed body may unpack to gigabytes.
    if response.headers.get("content-encoding", "identity") != "identity":
        raise _Refused("it compresses its response though asked not to")
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = _BoundedStream(response.stream)


class Endpoint:
    """A chat endpoint. Usable from one event loop after another, as `asyncio.run` makes them; close it in each.

    `seed` fixes the pauses; its default is the process's rank, so that ranks that failed together try again apart.
    Raises UserError where base_url is no http(s) URL, or a host other than this machine has no key.
    """

    def __init__(self, config: EndpointConfig, *, seed: int | None = None) -> None:
        self.config = config
        url = urlsplit(config.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise UserError(f"base_url {config.base_url!r} is not an http(s) URL; give one like http://host:8000/v1")
        self.address = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"  # without a password, for messages
        key = os.environ.get(config.api_key_variable, "").strip()
        if not key and not _is_local(url.hostname):
            raise UserError(
                f"the endpoint {self.address} needs a key: set the environment variable {config.api_key_variable}"
            )
        self._key = key or "none"
        self._random = random.Random(int(os.environ.get("RANK", 0)) if seed is None else seed)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: openai.AsyncOpenAI | None = None
        self._slots = asyncio.Semaphore(config.concurrency)
        self._not_before = 0.0  # time.monotonic() before which a Retry-After forbids requests
        self._length_option = "max_tokens"

    def __repr__(self) -> str:
        return f"Endpoint({self.address}, {self.config.model})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections of the running event loop; the next `chat` opens new ones."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.close()

    def _connect(self) -> openai.AsyncOpenAI:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop = loop
            self._slots = asyncio.Semaphore(self.config.concurrency)
            self._client = openai.AsyncOpenAI(
                base_url=self.config.base_url,
                api_key=self._key,
                max_retries=0,
                timeout=self.config.timeout_seconds,
                http_client=openai.DefaultAsyncHttpxClient(
                    follow_redirects=False,
                    event_hooks={"response": [_bound]},
                    limits=httpx2.Limits(max_connections=self.config.concurrency),
                ),
                default_headers={"Accept-Encoding": "identity"},
            )
        return self._client

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The answer's text. `options` are further fields of the request and win over the configuration's.

        Raises EndpointError where the request was refused, or failed in every one of `config.attempts` tries.
        """
        client = self._connect()
        failure: EndpointError | None = None
        for attempt in range(self.config.attempts):
            if failure is not None:
                bound = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (attempt - 1))
                await asyncio.sleep(self._random.uniform(0, bound))
            async with self._slots:
                while (wait := self._not_before - time.monotonic()) > 0:
                    await asyncio.sleep(wait + self._random.uniform(0, FIRST_PAUSE))
                try:
                    async with asyncio.timeout(self.config.timeout_seconds):
                        return await self._ask(client, messages, options)
                except (TimeoutError, openai.APITimeoutError):
                    failure = self._error(f"gave no answer within {self.config.timeout_seconds:g} s")
                except openai.APIStatusError as error:
                    failure = self._status_error(error)
                    self._heed_retry_after(error)
                    if error.status_code < 500 and error.status_code not in RETRIED:
                        raise failure from None
                except openai.APIConnectionError as error:
                    reason = str(error.__cause__ or error) or type(error.__cause__).__name__
                    failure = self._error(f"cannot be reached ({reason}); is it running, is base_url right?")
                except _Refused as error:
                    raise self._error(f"cannot be used: {error}") from None
        assert failure is not None  # attempts >= 1
        tries = f" (the last of {self.config.attempts} tries)" if self.config.attempts > 1 else ""
        raise EndpointError(f"{failure}{tries}", failure.status)

    async def _ask(
        self, client: openai.AsyncOpenAI, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> str:
        request = {
            "model": self.config.model,
            "messages": list(messages),
            "temperature": self.config.temperature,
            self._length_option: self.config.max_tokens,
            **options,
        }
        # Sent as it is: the fields are the server's matter, not that of the client library's version. In ASCII, as a
        # source's lone surrogate would not encode.
        body, headers = json.dumps(request).encode("ascii"), {"Content-Type": "application/json"}
        try:
            response = await client.post(
                "/chat/completions", cast_to=httpx2.Response, content=body, options={"headers": headers}
            )
        except openai.BadRequestError as error:
            if self._length_option == "max_tokens" and "max_completion_tokens" in error.response.text:
                self._length_option = "max_completion_tokens"  # OpenAI's reasoning models know no other name
                return await self._ask(client, messages, options)
            raise
        try:
            choice = response.json()["choices"][0]
            text = choice["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise _Refused(f"it is not a chat completion: {self._excerpt(response.text)}") from None
        if not isinstance(text, str) or not text.strip():
            raise _Refused(f"its answer holds no text (finish_reason {choice.get('finish_reason')!r})")
        return text.encode("utf-8", "replace").decode()  # JSON can spell lone surrogates, files cannot hold them

    def _heed_retry_after(self, error: openai.APIStatusError) -> None:
        wait = retry_after(error.response.headers.get("retry-after"))
        if wait is None or not (error.status_code >= 500 or error.status_code in RETRIED):
            return
        if wait > LONGEST_RETRY_AFTER:
            raise self._error(
                f"answered {error.status_code} and asks to wait {wait:.0f} s; start again later", error.status_code
            ) from None
        self._not_before = max(self._not_before, time.monotonic() + wait)

    def _status_error(self, error: openai.APIStatusError) -> EndpointError:
        status = error.status_code
        if 300 <= status < 400:
            target = error.response.headers.get("location", "elsewhere")
            return self._error(f"redirects to {target[:200]}, which is not followed; set base_url to it", status)
        hint = _HINTS.get(status, "").format(variable=self.config.api_key_variable)
        message = f"answered {status}: {self._excerpt(error.response.text)}"
        return self._error(f"{message}; {hint}" if hint else message, status)

    def _error(self, what: str, status: int | None = None) -> EndpointError:
        return EndpointError(f"the endpoint {self.address} {what}", status)

    def _excerpt(self, body: str) -> str:
        """One short line of a response, the message of an OpenAI-style error where there is one, without the key."""
        try:
            error = json.loads(body)["error"]
            body = error["message"] if isinstance(error, dict) else error
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        line = " ".join(str(body)[:2000].split())[:200] or "(an empty body)"
        return line if self._key == "none" else line.replace(self._key, "***")


def retry_after(value: str | None) -> float | None:
    """Seconds that a `Retry-After` header asks to wait, never negative; None where there is none to understand.

    Both of its forms are read: a number of seconds and an HTTP date.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if seconds == seconds else None  # not NaN


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
