"""How many tokens of a model's context a prompt takes, as its server counts them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

import httpx2

from awpo.config import EndpointConfig

SECONDS = 30.0
TEMPLATE_BYTES = 4096
"""More than a chat template's own words take."""
LARGEST_RESPONSE = 8 * 2**20
"""Bytes of an answer that are read; vLLM's lists the prompt's tokens."""


class PromptCounter:
    """Asks POST /tokenize, which vLLM and the project's own server have beside the API; other servers have none.

    Where the server does not know the question, it is asked once. For use by several threads.
    """

    def __init__(self, config: EndpointConfig) -> None:
        key = os.environ.get(config.api_key_variable, "").strip() or "none"
        self._url = config.base_url.rstrip("/").removesuffix("/v1") + "/tokenize"
        self._asked: dict[str, Any] = {"model": config.model, "add_generation_prompt": True}
        if "chat_template_kwargs" in config.options:
            self._asked["chat_template_kwargs"] = config.options["chat_template_kwargs"]
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._client = httpx2.Client(timeout=SECONDS, follow_redirects=False, headers=headers)
        self._context: int | None = None
        self._able = True

    def count(self, body: Mapping[str, Any]) -> tuple[int, int] | None:
        """(tokens of the prompt, tokens of the context) for the messages, tools and template options of a request;
        None where the server does not tell."""
        if not self._able:
            return None
        content = json.dumps({**body, **self._asked}).encode("ascii")
        try:
            status, answer = self._post(content)
            if status == 400:  # these messages do not fit the template: the answer will say so
                return None
            told = json.loads(answer) if status == 200 else {}
            found = int(told["count"]), int(told["max_model_len"])
        except (httpx2.HTTPError, ValueError, KeyError, TypeError, RecursionError):
            self._able = False
            return None
        self._context = found[1]
        return found

    def _post(self, content: bytes) -> tuple[int, bytes]:
        """Status and body; ValueError for a body longer than a server that tells a number has to send, or compressed."""
        begun = time.monotonic()
        with self._client.stream("POST", self._url, content=content) as response:
            body = bytearray()
            for piece in response.iter_raw():
                body += piece
                if len(body) > LARGEST_RESPONSE or time.monotonic() - begun > SECONDS:
                    raise ValueError("too long")
            return response.status_code, bytes(body)

    def count_if_long(self, body: Mapping[str, Any], max_tokens: int) -> tuple[int, int] | None:
        """As `count`; None, too, where prompt and `max_tokens` surely fit: a token is a byte at least."""
        if self._context is not None and len(json.dumps(body)) + TEMPLATE_BYTES + max_tokens <= self._context:
            return None
        return self.count(body)

    def close(self) -> None:
        self._client.close()
