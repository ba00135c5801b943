"""What a chat endpoint answers, read with distrust: completions, refusals, pauses that it asks for.

The endpoint's key is taken out of all that is read, and of all that is said about it.
"""

from __future__ import annotations

import email.utils
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import openai

from awpo.endpoint_cache import CachedAnswer
from awpo.endpoint_connections import Refused
from awpo.endpoint_limits import estimated_tokens
from awpo.errors import UserError

LONGEST_RETRY_AFTER = 300.0
"""Seconds; a server that asks for a longer wait than this is given up on, with a message that says so."""
MOST_TOKENS = 10**9
"""Of one answer; a server that tells more is not believed."""
LEAST_KEY = 12
"""Characters of a key that is looked for in answers; shorter ones, as local servers are given, may be words."""
RETRIED = frozenset({408, 409, 429})
"""Statuses worth another try, besides 5xx, time-outs and lost connections."""
NO_KEY = "none"
"""Sent to a server of this machine that is given no key."""

_HINTS = {
    401: "check the key in {variable}",
    403: "check what the key in {variable} may use",
    404: "check base_url (it usually ends in /v1) and the model's name",
}


class EndpointError(UserError):
    """A request that failed for good. `status` is the HTTP status, None where there was no answer to speak of.

    `passes` says that the endpoint was away or overloaded, and not that this request is wrong.
    """

    def __init__(self, message: str, status: int | None = None, *, passes: bool = False) -> None:
        super().__init__(message)
        self.status, self.passes = status, passes

    @property
    def hopeless(self) -> bool:
        """Whether every other request will fail in the same way: a wrong key, address or model."""
        return self.status in _HINTS


class AnswerReader:
    """Reads the answers of the endpoint at `address`, which is given the key that stands in the environment as
    `key_variable`.

    With `whole` a completion's text is the whole message as JSON, see `whole_message`; else its content.
    """

    def __init__(self, address: str, key: str, key_variable: str, *, whole: bool) -> None:
        self.address = address
        self.whole = whole
        self._key, self._key_variable = key, key_variable

    def completion(self, response: httpx2.Response, messages: Sequence[Mapping[str, Any]]) -> tuple[CachedAnswer, bool]:
        """The answer to `messages`, its seconds left 0, and whether the server told its tokens; else they are estimated.

        Raises Refused where the response is no chat completion, or holds no text.
        """
        try:
            value = response.json()
            choice = value["choices"][0]
            text = whole_message(choice["message"]) if self.whole else choice["message"]["content"]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise Refused(f"it is not a chat completion: {self._excerpt(response.text)}") from None
        finish = choice.get("finish_reason")
        if not isinstance(text, str) or not text.strip():
            raise Refused(f"its answer holds no text (finish_reason {finish!r})")
        if len(self._key) >= LEAST_KEY:  # a server that repeats it would have it written down with the answer
            text = text.replace(self._key, "***")
        text = text.encode("utf-8", "replace").decode()  # JSON can spell lone surrogates, files cannot hold them
        told = _told_tokens(value.get("usage"))
        tokens = told or (estimated_tokens(messages), estimated_tokens([{"content": text}]))
        return CachedAnswer(text, finish if isinstance(finish, str) else None, *tokens, 0.0), told is not None

    def refusal(self, error: openai.APIStatusError) -> EndpointError:
        """A refusal in one line, with what to check where that is known."""
        status = error.status_code
        if 300 <= status < 400:
            target = self._without_key(error.response.headers.get("location", "elsewhere"))
            return self.error(f"redirects to {target[:200]}, which is not followed; set base_url to it", status)
        hint = _HINTS.get(status, "").format(variable=self._key_variable)
        message = f"answered {status}: {self._excerpt(error.response.text)}"
        return self.error(f"{message}; {hint}" if hint else message, status)

    def pause(self, error: openai.APIStatusError) -> float:
        """Seconds that a refusal asks all requests to wait; 0 where it asks for nothing, or is final.

        Raises EndpointError where they are more than `LONGEST_RETRY_AFTER`.
        """
        wait = retry_after(error.response.headers.get("retry-after"))
        if wait is None or not can_pass(error):
            return 0.0
        if wait > LONGEST_RETRY_AFTER:
            away = self.error(
                f"answered {error.status_code} and asks to wait {wait:.10g} s; start again later", error.status_code
            )
            away.passes = True
            raise away from None
        return wait

    def error(self, what: str, status: int | None = None) -> EndpointError:
        return EndpointError(f"the endpoint {self.address} {what}", status)

    def _excerpt(self, body: str) -> str:
        """One short line of a response, the message of an OpenAI-style error where there is one, without the key."""
        try:
            error = json.loads(body)["error"]
            body = error["message"] if isinstance(error, dict) else error
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        # First the key, then the cut, which may go through it.
        return " ".join(self._without_key(str(body))[:2000].split())[:200] or "(an empty body)"

    def _without_key(self, text: str) -> str:
        return text if self._key == NO_KEY else text.replace(self._key, "***")


def can_pass(error: openai.APIStatusError) -> bool:
    """Whether another try may succeed."""
    return error.status_code >= 500 or error.status_code in RETRIED


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
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if seconds == seconds else None  # not NaN


def whole_message(message: Mapping[str, Any]) -> str:
    """What an answer's message holds of content, thought and calls, as JSON. `reasoning` is a newer name of the thought."""
    kept = {key: message[key] for key in ("content", "reasoning_content", "tool_calls") if message.get(key)}
    if message.get("reasoning"):
        kept.setdefault("reasoning_content", message["reasoning"])
    return json.dumps(kept)


def _told_tokens(usage: Any) -> tuple[int, int] | None:
    """(prompt, completion) tokens as an answer's `usage` tells them; None where it does not."""
    if not isinstance(usage, dict):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if type(prompt) is type(completion) is int and 0 <= prompt <= MOST_TOKENS and 0 <= completion <= MOST_TOKENS:
        return prompt, completion
    return None
