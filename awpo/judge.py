"""The reasoning reward's source: a score in [0, 1] for the thought of a completion.

`RubricJudge` scores by fixed rules and needs nothing but the instance; `EndpointJudge` asks a strong model over an
OpenAI-compatible endpoint; `CorrelatedJudge` draws scores of a set quality, for studies. A judgement that failed, or that
cannot be made, is NaN, never 0: the methods leave such rollouts' groups to the outcome reward, and count them.
How good a judge is `awpo.judge_evaluation` measures.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from awpo.config import JudgeConfig
from awpo.endpoint import Endpoint, EndpointError
from awpo.errors import UserError
from awpo.judge_correlated import CorrelatedJudge
from awpo.judge_prompts import CRITERIA, PROMPT_HASH, RESPONSE_FORMAT, judge_messages, read_grades
from awpo.judge_text import (
    DO_CALL,
    NO_CALL,
    WORD,
    informedness,
    names_in,
    normalise,
    overlap_f1,
    values_mentioned,
    variety,
    without_names,
    words_present,
)
from awpo.types import Completion, Instance, ToolCall, content_hash


@dataclass(frozen=True, slots=True)
class Judgement:
    """One thought to be judged: the completion that holds it and the instance that it answers."""

    instance: Instance
    completion: Completion


@dataclass(frozen=True, slots=True)
class Grades:
    """A judgement: its score in [0, 1], or NaN where there is none.

    `criteria` are the scores in [0, 1] that it is made of, by name (none where the judge has none); `samples` the
    scores of the answers that were averaged, NaN for those that failed.
    """

    score: float
    criteria: Mapping[str, float] = field(default_factory=dict)
    samples: tuple[float, ...] = ()


class Judge(Protocol):
    """Scores thoughts."""

    async def score(self, items: Sequence[Judgement]) -> list[float]:
        """One score in [0, 1], or NaN where there is none, per item, in order."""
        ...


def make_judge(config: JudgeConfig, seed: int = 0, draw: int = 0) -> Judge:
    """The judge that the settings name; `seed` is that of a correlated judge's noise.

    Another `draw` is the same judge asked anew: what it said before is not taken from a cache.
    Raises UserError where its endpoint has no key or a wrong address.
    """
    if config.kind == "correlated":
        return CorrelatedJudge(config.correlation or 0.0, seed + draw)
    return EndpointJudge(config, draw=draw) if config.kind == "endpoint" else RubricJudge()


async def grade(judge: Judge, items: Sequence[Judgement]) -> list[Grades]:
    """What `judge.score` gives, with the criteria's scores where the judge has them."""
    if isinstance(judge, RubricJudge | EndpointJudge):
        return await judge.grade(items)
    return [Grades(score) for score in await judge.score(items)]


def judge_identity(config: JudgeConfig) -> dict[str, Any]:
    """Who judges and by which version of which prompt or rules: what every result holds that a judge had a hand in."""
    identity: dict[str, Any] = {"kind": config.kind, "scale": config.scale}
    if config.endpoint:
        asked = config.endpoint.model_dump(include={"model", "temperature", "max_tokens", "options"})
        identity |= {"endpoint": asked, "samples": config.samples, "two_pass": config.two_pass, "prompt": PROMPT_HASH}
    elif config.kind == "correlated":
        identity["correlation"] = config.correlation
    else:
        identity["rules"] = RUBRIC_HASH
    return identity


WEIGHTS = {"coherence": 0.3, "correctness": 0.4, "appropriateness": 0.3}
"""Share of each criterion in the rubric's score; they add up to 1."""

_VARIED = 0.8
"""A text is no loop while at least this share of its word triples are different ones."""


RUBRIC_HASH = content_hash([1, WEIGHTS, _VARIED, WORD.pattern, NO_CALL.pattern, DO_CALL.pattern])
"""The version of the rules; its first entry counts changes of the code."""


class RubricJudge:
    """Judges a thought offline, by rules, deterministically, in well under a millisecond.

    score = sum of WEIGHTS x criterion, each criterion in [0, 1]:

    coherence        does the thought lead to the action that follows it? With calls: how well it names just the
                     tools that are called, times (1 + how many of their arguments' values it mentions) / 2. With a
                     reply: it says that it asks, answers, or has no tool. Halved where it says the opposite as
                     well; 0 where no action can be read; scaled down where the thought runs in a loop (less than
                     80% of its word triples differ, and less than the reference's).
    correctness      F1 of its content words and values, with their counts, against the reference rationale's; the
                     names of tools left out that the reference names.
    appropriateness  the same as coherence, but towards the reference action: it names just the reference's tools,
                     times (1 + how many of the reference arguments' values it mentions) / 2; where the reference
                     calls none, it names just the tools that the rationale names, and says that it does not call.

    How well a thought names tools: the share of the right ones that it names minus the share of the others on offer
    that it names, at least 0, so that naming all of them earns nothing; others that the reference names too, be it
    as plain words, are neither right nor wrong. How many values: the share of all that it mentions over the share
    that the reference rationale mentions, at most 1 (and 1 where that mentions none). Scores that a thought awards
    itself are words that the reference lacks. Only coherence looks at what the completion does, and only to compare
    it with what the thought says: whether the action is right is the outcome reward's matter.

    No thought at all scores 0; an instance without a reference rationale NaN.
    """

    async def score(self, items: Sequence[Judgement]) -> list[float]:
        return [self.judge(item) for item in items]

    async def grade(self, items: Sequence[Judgement]) -> list[Grades]:
        return [self._grades(item) for item in items]

    def judge(self, item: Judgement) -> float:
        """The score of one thought, in [0, 1] or NaN."""
        return self._grades(item).score

    def _grades(self, item: Judgement) -> Grades:
        if not (item.instance.rationale or "").strip():
            return Grades(math.nan)
        criteria = self.criteria(item)
        return Grades(math.fsum(WEIGHTS[name] * value for name, value in criteria.items()), criteria)

    def criteria(self, item: Judgement) -> dict[str, float]:
        """Each criterion's value in [0, 1]; the instance has a rationale."""
        instance, completion = item.instance, item.completion
        thought, rationale = normalise(completion.thought or ""), normalise(instance.rationale or "")
        words, reference_words = WORD.findall(thought), WORD.findall(rationale)
        if not words:
            return dict.fromkeys(WEIGHTS, 0.0)
        target = instance.target
        present = words_present(thought)
        expected = values_mentioned(target.tool_calls, words_present(rationale)) if target.tool_calls else 1.0

        def mentions(calls: Sequence[ToolCall]) -> float:
            share = values_mentioned(calls, present)
            return min(1.0, share / expected) if share is not None and expected else 1.0

        offered = tuple(tool.name.casefold() for tool in instance.tools)
        named, reference_named = names_in(thought, offered), names_in(rationale, offered)
        others = set(offered) - reference_named
        refuses = NO_CALL.search(thought) is not None
        calls_out = DO_CALL.search(NO_CALL.sub(" ", thought)) is not None

        if completion.tool_calls:
            called = {call.name.casefold() for call in completion.tool_calls}
            own_named = named | {name for name in called.difference(offered) if name in thought}
            coherence = informedness(own_named, called, others) * (1 + mentions(completion.tool_calls)) / 2
            coherence *= 0.5 if refuses else 1.0
        elif completion.calls_malformed or not completion.content:
            coherence = 0.0
        else:
            coherence = refuses * (0.5 if calls_out else 1.0)

        if target.tool_calls:
            due = {call.name.casefold() for call in target.tool_calls}
            appropriateness = informedness(named, due, others) * (1 + mentions(target.tool_calls)) / 2
            appropriateness *= 0.5 if refuses else 1.0
        else:
            appropriateness = informedness(named, reference_named, others) * refuses * (0.5 if calls_out else 1.0)

        return {
            "coherence": coherence * min(1.0, variety(words) / min(_VARIED, variety(reference_words))),
            "correctness": overlap_f1(
                *(WORD.findall(without_names(text, reference_named)) for text in (thought, rationale))
            ),
            "appropriateness": appropriateness,
        }


SMALLEST_CHECKED_BATCH = 8
"""Fewer judgements than this never stop a run: one failure of two says little."""
MOST_CACHED = 100_000
"""Scores that an endpoint judge remembers; the oldest are forgotten first."""
LOW_SCORE = 0.5
"""With `two_pass`, a first score below this is replaced by a second one, given with the reference in sight."""


NO_THOUGHT = Grades(0.0, dict.fromkeys(CRITERIA, 0.0))
FAILED = Grades(math.nan)


class EndpointJudge:
    """Asks a strong model for a score, and takes no failure for an opinion.

    The score is the mean of three criteria (`awpo.judge_prompts`), averaged over `samples` answers; of those, the
    ones that could not be had or read are left out. A judgement of which no answer could (the endpoint failed, its
    answer could not be read, the batch's deadline passed) is NaN. An empty thought is 0 without asking; the same
    thought about the same instance is asked once. An instance without a rationale is judged without one.

    `judged` and `failures` count over the judge's life; `batch_judged`, `batch_failures` those of the latest batch,
    `last_error` says what went wrong last (None: nothing yet). `draw` above 0 asks anew what a cache on disk knows.
    """

    def __init__(self, config: JudgeConfig, endpoint: Endpoint | None = None, *, draw: int = 0) -> None:
        if endpoint is None:
            if config.endpoint is None:
                raise UserError("judge kind 'endpoint' needs 'endpoint' with base_url and model")
            endpoint = Endpoint(config.endpoint)
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
        keys = [self._key(item) if (item.completion.thought or "").strip() else None for item in items]
        pending = {
            key: item for key, item in zip(keys, items, strict=True) if key is not None and key not in self._cache
        }
        fresh = await self._ask_all(pending)
        found = [NO_THOUGHT if key is None else fresh[key] if key in fresh else self._cache[key] for key in keys]
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

    def _key(self, item: Judgement) -> str:
        return content_hash(judge_messages(item.instance, item.completion, with_reference=True))

    async def _ask_all(self, pending: dict[str, Judgement]) -> dict[str, Grades]:
        """The judgements of distinct items; failed ones where there is none when the deadline passes."""
        if not pending:
            return {}
        tasks = {key: asyncio.create_task(self._judge(item)) for key, item in pending.items()}
        try:
            done, late = await asyncio.wait(
                tasks.values(), timeout=self.config.deadline_seconds, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()  # raises what makes all further asking pointless
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            await self.endpoint.close()
        if late:
            self.last_error = f"no answer before the batch's deadline of {self.config.deadline_seconds:g} s"
        return {key: FAILED if task in late else task.result() for key, task in tasks.items()}

    async def _judge(self, item: Judgement) -> Grades:
        """One judgement. Raises EndpointError only where every other request would fail as well."""
        found = await self._average(item, with_reference=not self.config.two_pass)
        if self.config.two_pass and item.instance.rationale is not None and found.score < LOW_SCORE:
            found = await self._average(item, with_reference=True)
        return found

    async def _average(self, item: Judgement, *, with_reference: bool) -> Grades:
        messages = judge_messages(item.instance, item.completion, with_reference=with_reference)
        draws = range(self._first_draw, self._first_draw + self.config.samples)
        answers = await asyncio.gather(*(self._ask(messages, draw) for draw in draws))
        samples = [math.fsum(answer.values()) / len(answer) if answer else math.nan for answer in answers]
        readable = [answer for answer in answers if answer]
        if not readable:
            return Grades(math.nan, samples=tuple(samples))
        criteria = {name: math.fsum(answer[name] for answer in readable) / len(readable) for name in CRITERIA}
        return Grades(math.fsum(criteria.values()) / len(criteria), criteria, tuple(samples))

    async def _ask(self, messages: list[dict[str, str]], draw: int) -> dict[str, float] | None:
        """The criteria's scores of one answer; None where it could not be had or read."""
        try:
            answer = await self._answer(messages, draw)
        except EndpointError as error:
            if error.hopeless:
                raise
            self.last_error = str(error)
            return None
        grades = read_grades(answer)
        if grades is None:
            self.last_error = f"an answer without readable scores: {' '.join(answer[:200].split())!r}"
        return grades

    async def _answer(self, messages: list[dict[str, str]], draw: int) -> str:
        def keep(text: str) -> bool:
            return read_grades(text) is not None

        # What was answered without a schema in an earlier run need not be refused with it first.
        if self._schema and (self._schema_taken or self.endpoint.known(messages, draw=draw) is None):
            try:
                reply = await self.endpoint.ask(messages, draw=draw, keep=keep, response_format=RESPONSE_FORMAT)
                self._schema_taken = True
                return reply.text
            except EndpointError as error:
                if error.status not in (400, 422):
                    raise
        reply = await self.endpoint.ask(messages, draw=draw, keep=keep)
        if not reply.cached:
            self._schema = False  # refused with it, answered without
        return reply.text

    def _remember(self, found: dict[str, Grades]) -> None:
        self._cache.update((key, grades) for key, grades in found.items() if not math.isnan(grades.score))
        while len(self._cache) > MOST_CACHED:
            del self._cache[next(iter(self._cache))]
