"""A judge that asks a strong model over an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from awpo.config import JudgeConfig
from awpo.endpoint import Endpoint, Reply
from awpo.endpoint_answers import EndpointError
from awpo.endpoint_spending import spending_file
from awpo.errors import UserError
from awpo.judge_prompts import CRITERIA, RESPONSE_FORMAT, judge_messages, read_grades
from awpo.judgement import Grades, JudgeAnswer, Judgement
from awpo.types import content_hash

SMALLEST_CHECKED_BATCH = 8
"""Fewer judgements than this never stop a run: one failure of two says little."""
MOST_CACHED = 20_000
"""Judgements that an endpoint judge remembers, with the answers; the oldest are forgotten first."""
LOW_SCORE = 0.5
"""With `two_pass`, a first score below this is replaced by a second one, given with the reference in sight."""


WORKERS_PER_REQUEST = 4
"""Judgements in the making for each request that may be under way."""
NO_THOUGHT = Grades(0.0, dict.fromkeys(CRITERIA, 0.0))


class EndpointJudge:
    """Asks a strong model for a score, and takes no failure for an opinion.

    The score is the mean of three criteria (`awpo.judge_prompts`), averaged over `samples` answers; of those, the
    ones that could not be had or read are left out. A judgement of which no answer could (the endpoint failed, its
    answer could not be read, the batch's deadline passed) is NaN. An empty thought is 0 without asking; the same
    thought about the same instance is asked once. An instance without a rationale is judged without one.

    `judged` and `failures` count over the judge's life; `batch_judged`, `batch_failures` those of the latest batch,
    `last_error` says what went wrong last (None: nothing yet). `draw` above 0 asks anew what a cache on disk knows.
    `folder` is that of the run, over whose processes and attempts the endpoint's limits hold.
    """

    def __init__(
        self, config: JudgeConfig, endpoint: Endpoint | None = None, *, draw: int = 0, folder: Path | None = None
    ) -> None:
        if endpoint is None:
            if config.endpoint is None:
                raise UserError("judge kind 'endpoint' needs 'endpoint' with base_url and model")
            endpoint = Endpoint(config.endpoint, spending=spending_file(folder) if folder else None)
        self.config, self.endpoint = config, endpoint
        self.judged = self.failures = self.batch_judged = self.batch_failures = 0
        self.last_error: str | None = None
        self._first_draw = draw * config.samples
        self._cache: dict[str, Grades] = {}
        self._schema = True  # until the server refuses response_format
        self._schema_taken = False  # it has answered with one

    async def score(self, items: Sequence[Judgement]) -> list[float]:
        """One score in [0, 1] or NaN per item; see `grade`."""
        return [grades.score for grades in await self.grade(items)]

    async def grade(self, items: Sequence[Judgement]) -> list[Grades]:
        """One judgement per item, within `deadline_seconds`.

        Raises UserError where more than `failure_limit` of at least 8 judgements failed, where every request must
        fail (a wrong key, address or model), or where the budget is used up.
        """
        keys: list[str | None] = [None] * len(items)
        fresh: dict[str, Grades] = {}
        await self._ask_all(items, keys, fresh)
        too_late = Grades(
            math.nan, failure=f"no answer before the batch's deadline of {self.config.deadline_seconds:g} s"
        )
        known = {**self._cache, **fresh}
        found = [
            NO_THOUGHT if _thinks_nothing(item) else known.get(key or "", too_late)
            for key, item in zip(keys, items, strict=True)
        ]
        if too_late in found:
            self.last_error = too_late.failure
        self._remember(fresh)
        self.batch_judged, self.batch_failures = len(items), sum(math.isnan(grades.score) for grades in found)
        self.judged += self.batch_judged
        self.failures += self.batch_failures
        share = self.batch_failures / max(1, self.batch_judged)
        if self.batch_judged >= SMALLEST_CHECKED_BATCH and share > self.config.failure_limit:
            raise UserError(
                f"the judge {self.endpoint.config.model} failed on {self.batch_failures} of {self.batch_judged} thoughts "
                f"(failure_limit {self.config.failure_limit:g}); last: {self.last_error}; mend the endpoint and resume"
            )
        return found

    def metrics(self) -> dict[str, float]:
        """Counters over the judge's life: judgements and failures, and those of its endpoint."""
        usage = self.endpoint.usage.metrics(self.endpoint.config)
        usage["failed_requests"] = usage.pop("failures")
        return {"judged": float(self.judged), "failures": float(self.failures), **usage}

    async def _ask_all(self, items: Sequence[Judgement], keys: list[str | None], fresh: dict[str, Grades]) -> None:
        """Fills in each item's key and, for those that are not remembered, the judgement; what is left out was late.

        Each of a few workers takes one item after another. All at once would render every prompt before the first
        request leaves, and a worker that waits to try again has to leave room for others, so there are more workers
        than requests at once.
        """
        places = iter(range(len(items)))
        asked: set[str] = set()

        async def work() -> None:
            for place in places:
                item = items[place]
                if _thinks_nothing(item):
                    continue
                messages = judge_messages(item.instance, item.completion, with_reference=True)
                key = keys[place] = content_hash(messages)
                if key not in asked and key not in self._cache:
                    asked.add(key)
                    fresh[key] = await self._judge(item, messages)

        count = min(len(items), WORKERS_PER_REQUEST * self.endpoint.config.concurrency)
        workers = [asyncio.create_task(work()) for _ in range(count)]
        if not workers:
            return
        try:
            done, _ = await asyncio.wait(
                workers, timeout=self.config.deadline_seconds, return_when=asyncio.FIRST_EXCEPTION
            )
            for worker in done:
                worker.result()  # raises what makes all further asking pointless
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await self.endpoint.close()

    async def _judge(self, item: Judgement, with_reference: list[dict[str, str]]) -> Grades:
        """One judgement; `with_reference` are the messages that show the reference, where there is one.

        Raises EndpointError only where every other request would fail as well.
        """
        if not self.config.two_pass:
            return await self._average(with_reference, shown=True)
        without = judge_messages(item.instance, item.completion, with_reference=False)
        found = await self._average(without, shown=False)
        if item.instance.rationale is not None and found.score < LOW_SCORE:
            again = await self._average(with_reference, shown=True)
            found = replace(again, answers=found.answers + again.answers)
        return found

    async def _average(self, messages: list[dict[str, str]], *, shown: bool) -> Grades:
        draws = range(self._first_draw, self._first_draw + self.config.samples)
        answers = await asyncio.gather(*(self._ask(messages, draw, shown) for draw in draws))
        samples = tuple(answer.score for answer in answers)
        readable = [answer.criteria for answer in answers if answer.criteria]
        if not readable:
            return Grades(math.nan, samples=samples, answers=tuple(answers), failure=answers[-1].failure)
        criteria = {name: math.fsum(scores[name] for scores in readable) / len(readable) for name in CRITERIA}
        return Grades(math.fsum(criteria.values()) / len(criteria), criteria, samples, tuple(answers))

    async def _ask(self, messages: list[dict[str, str]], draw: int, with_reference: bool) -> JudgeAnswer:
        try:
            reply = await self._answer(messages, draw)
        except EndpointError as error:
            if error.hopeless:
                raise
            self.last_error = str(error)
            return JudgeAnswer(with_reference, time.time(), failure=self.last_error)
        grades, failure = read_grades(reply.text), ""
        if grades is None:
            self.last_error = failure = f"an answer without readable scores: {' '.join(reply.text[:200].split())!r}"
        return JudgeAnswer(
            with_reference,
            time.time(),
            reply.text,
            grades or {},
            failure,
            reply.seconds,
            reply.prompt_tokens,
            reply.completion_tokens,
            reply.cached,
        )

    async def _answer(self, messages: list[dict[str, str]], draw: int) -> Reply:
        def keep(text: str) -> bool:
            return read_grades(text) is not None

        # What was answered without a schema in an earlier run need not be refused with it first.
        if self._schema and (self._schema_taken or self.endpoint.known(messages, draw=draw) is None):
            try:
                reply = await self.endpoint.ask(messages, draw=draw, keep=keep, response_format=RESPONSE_FORMAT)
                self._schema_taken = True
                return reply
            except EndpointError as error:
                if error.status not in (400, 422):
                    raise
        reply = await self.endpoint.ask(messages, draw=draw, keep=keep)
        if not reply.cached:
            self._schema = False  # refused with it, answered without
        return reply

    def _remember(self, found: dict[str, Grades]) -> None:
        self._cache.update((key, grades) for key, grades in found.items() if not math.isnan(grades.score))
        while len(self._cache) > MOST_CACHED:
            del self._cache[next(iter(self._cache))]


def _thinks_nothing(item: Judgement) -> bool:
    return not (item.completion.thought or "").strip()
