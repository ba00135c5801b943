"""Answers of any OpenAI-compatible endpoint: a checkpoint that a server on this machine has, or a closed model.

Requests, limits, retries and the cache of answers are `awpo.endpoint`'s. With native tools the server may give calls
back as structure (a tool parser, a closed model) or as text with their tags (the project's own server); both are read.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from awpo.chat import CALL, CALL_END, THINK, THINK_END
from awpo.config import EndpointConfig
from awpo.endpoint import Endpoint, Reply, is_local
from awpo.endpoint_answers import EndpointError
from awpo.errors import UserError
from awpo.events import Progress, silent
from awpo.types import Message, ToolCall
from evaluation.endpoint_room import PromptCounter
from evaluation.generate import Generated, Question, Sampling
from evaluation.prompts import PromptFormat
from evaluation.target import endpoint_identity

MOST_FAILURES = 20
"""So many answers failed in a row, without one that came, and the endpoint is taken to be down."""
_TOO_LONG = re.compile(r"context[ _-]*(length|window|of)|context_length_exceeded|maximum context", re.IGNORECASE)
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What OpenAI's format allows as a tool's name. Servers of open models take any."""


class EndpointGenerator:
    """Asks an endpoint. `fingerprint` says which model it has where that is known better than by its name.

    `cache` is the file of answers of an endpoint on this machine, `spending` that of what was spent; see
    `awpo.endpoint.Endpoint`. Fields that `config.options` names are sent as they stand there, whatever the sampling
    says; null leaves a field to the server.
    """

    def __init__(
        self,
        config: EndpointConfig,
        prompt_format: PromptFormat = PromptFormat(),  # noqa: B008 -- it cannot be changed
        *,
        fingerprint: str | None = None,
        engine: str = "endpoint",
        cache: Path | None = None,
        spending: Path | None = None,
    ) -> None:
        self.config, self.prompt_format = config, prompt_format
        self.endpoint = Endpoint(config, cache=cache, spending=spending, whole=True)
        self._counter = PromptCounter(config)
        self._renames = not is_local(urlsplit(config.base_url).hostname or "")
        self.identity: dict[str, Any] = {
            "model": fingerprint or endpoint_identity(config),
            "engine": engine,
            **prompt_format.identity,
            **({"tool_names": "as OpenAI allows"} if self._renames else {}),
        }

    def answer(
        self, questions: Sequence[Question], sampling: Sampling, *, progress: Progress = silent
    ) -> list[list[Generated]]:
        return asyncio.run(self._answer(questions, sampling, progress))

    def room(self, question: Question) -> int | None:
        body, _ = self._body(question)
        told = self._counter.count(body)
        return None if told is None else max(0, told[1] - told[0])

    def close(self) -> None:
        """Closes the cache and connections; nothing is asked afterwards."""
        self.endpoint.close_cache()
        self._counter.close()

    async def _answer(
        self, questions: Sequence[Question], sampling: Sampling, progress: Progress
    ) -> list[list[Generated]]:
        answers: list[list[Generated | None]] = [[None] * sampling.answers for _ in questions]
        total, done, failures = len(questions) * sampling.answers, 0, 0
        progress(0, total, "completions")
        waiting = iter(self._draws(questions, sampling))

        async def work() -> None:
            nonlocal done, failures
            for index, place, fields, draw in waiting:
                answer = await self._ask(questions[index], fields, draw)
                answers[index][place] = answer
                failures = failures + 1 if answer.finish == "failed" else 0
                if failures >= MOST_FAILURES:
                    raise UserError(
                        f"{answer.failure}; so did {failures} requests in a row. Answers so far are kept: the same "
                        "command goes on with the rest"
                    )
                done += 1
                progress(done, total, "completions")

        async with self.endpoint:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.config.concurrency, total)):
                        group.create_task(work())
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return [[answer for answer in row if answer is not None] for row in answers]

    def _draws(self, questions: Sequence[Question], sampling: Sampling) -> list[tuple[int, int, dict[str, Any], int]]:
        """What is to be asked: the question's index, the answer's place, fields of the request, number of the draw."""
        found = []
        seen: Counter[str] = Counter()
        for index, question in enumerate(questions):
            occurrence = seen[question.hash]
            seen[question.hash] += 1
            for place in range(sampling.answers):
                greedy = sampling.temperature == 0 or (sampling.with_greedy and place == 0)
                fields: dict[str, Any] = {"max_tokens": sampling.max_tokens, "temperature": 0.0}
                if sampling.stop:
                    fields["stop"] = list(sampling.stop)
                draw = 0
                if not greedy:
                    draw = occurrence * sampling.samples + place
                    fields |= {"temperature": sampling.temperature, "seed": _seed(sampling.seed, draw)}
                found.append((index, place, fields, draw))
        return found

    def _body(self, question: Question) -> tuple[dict[str, Any], dict[str, str]]:
        """Messages, tools and template options of a request, and the tools' own names by those that are sent."""
        asked = self.prompt_format.apply(question)
        names = _sent_names([tool.name for tool in asked.tools]) if self._renames else {}
        body: dict[str, Any] = {"messages": messages_for_endpoint(asked.messages, names, thoughts=not self._renames)}
        if asked.tools:
            body["tools"] = [tool.to_json() for tool in asked.tools]
            for tool in body["tools"]:
                tool["function"]["name"] = names.get(tool["function"]["name"], tool["function"]["name"])
        if options := self.prompt_format.template_options:
            body["chat_template_kwargs"] = options
        return body, {sent: name for name, sent in names.items()}

    async def _ask(self, question: Question, fields: Mapping[str, Any], draw: int) -> Generated:
        body, names = self._body(question)
        request = {**body, **fields}
        # Where prompt and answer might not fit together, the server tells how much room there is, if it can.
        told = await asyncio.to_thread(self._counter.count_if_long, body, int(fields["max_tokens"]))
        if told is not None:
            count, context = told
            if count >= context:
                return Generated("", 0, "no_room", prompt_tokens=count)
            request["max_tokens"] = min(int(fields["max_tokens"]), context - count)
        messages = request.pop("messages")
        request = {name: value for name, value in request.items() if name not in self.config.options}
        try:
            reply = await self.endpoint.ask(messages, draw=draw, **request)
        except EndpointError as error:
            if error.hopeless:
                raise
            if error.status == 400 and _TOO_LONG.search(str(error)):
                return Generated("", 0, "no_room")
            return Generated("", 0, "failed", failure=str(error))
        return read_reply(reply, names)


def messages_for_endpoint(
    messages: Sequence[Message], names: Mapping[str, str], *, thoughts: bool
) -> list[dict[str, Any]]:
    """Messages in OpenAI's form: each call has an id, which its result refers to; arguments are JSON text."""
    found: list[dict[str, Any]] = []
    open_calls: list[str] = []
    count = 0
    for message in messages:
        made = message.to_json()
        if not thoughts:
            made.pop("reasoning_content", None)
        if message.tool_calls:
            open_calls = []
            for call in made["tool_calls"]:
                call["id"] = f"call{count:05d}"  # nine letters and digits: some templates take no other
                count += 1
                open_calls.append(call["id"])
                function = call["function"]
                function["name"] = names.get(function["name"], function["name"])
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        if message.role == "tool":
            made["tool_call_id"] = open_calls.pop(0) if open_calls else f"call{count:05d}"
        found.append(made)
    return found


def read_reply(reply: Reply, names: Mapping[str, str]) -> Generated:
    """An endpoint's answer, its thought and calls written into the text in the layout of `awpo.chat`."""
    message = json.loads(reply.text)
    if reply.finish == "content_filter":
        return Generated("", reply.completion_tokens, "failed", failure="the endpoint's content filter took the answer")
    text = _text(message.get("content"))
    if thought := _text(message.get("reasoning_content")):
        text = f"{THINK}\n{thought.strip()}\n{THINK_END}\n\n{text.lstrip()}"
    raw = message.get("tool_calls")
    calls: list[ToolCall] | None = None
    if isinstance(raw, list) and raw:
        calls = []
        for call in raw:
            written, read = _read_call(call, names)
            text += f"\n{CALL}\n{written}\n{CALL_END}" if text else f"{CALL}\n{written}\n{CALL_END}"
            calls += [read] if read else []
    return Generated(
        text,
        reply.completion_tokens,
        "length" if reply.finish == "length" else "stop",
        prompt_tokens=reply.prompt_tokens,
        seconds=reply.seconds,
        tool_calls=None if calls is None else tuple(calls),
    )


def _read_call(value: Any, names: Mapping[str, str]) -> tuple[str, ToolCall | None]:
    """A structured call as text, and as a call; None where it cannot be read, and the text shows it as it came."""
    function = value.get("function") if isinstance(value, dict) else None
    function = function if isinstance(function, dict) else {}
    name = _text(function.get("name"))
    name = names.get(name, name)
    arguments = function.get("arguments")
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    try:
        call = ToolCall.from_json({"name": name, "arguments": arguments if arguments is not None else {}})
    except (ValueError, RecursionError):
        return f'{{"name": {json.dumps(name)}, "arguments": {_text(raw)}}}', None
    written = json.dumps(call.arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {_text(written)}}}', call


def _text(value: Any) -> str:
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else ""


def _seed(seed: int, draw: int) -> int:
    """A seed of its own for every draw, in the 31 bits that all servers take."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{draw}".encode()).digest()[:4], "big") >> 1


def _sent_names(names: Sequence[str]) -> dict[str, str]:
    """Names that OpenAI's format takes, one for each: other characters become underscores, twins get a number."""
    sent: dict[str, str] = {name: name for name in names if _TOOL_NAME.fullmatch(name)}
    for name in names:
        if name in sent:
            continue
        made = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64] or "tool"
        number = 1
        while made in sent.values():
            number += 1
            made = f"{made[:60]}_{number}"
        sent[name] = made
    return sent
