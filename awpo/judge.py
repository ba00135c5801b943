"""The reasoning reward's source: a score in [0, 1] for the thought of a completion.

`RubricJudge` scores by fixed rules and needs nothing but the instance; `EndpointJudge` asks a strong model over an
OpenAI-compatible endpoint. A judgement that failed, or that cannot be made, is NaN, never 0: the methods leave such
rollouts' groups to the outcome reward, and count them.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from awpo.config import JudgeConfig
from awpo.endpoint import Endpoint, EndpointError
from awpo.errors import UserError
from awpo.judge_prompts import RESPONSE_FORMAT, judge_messages, read_answer
from awpo.types import Completion, Instance, ToolCall, content_hash


@dataclass(frozen=True, slots=True)
class Judgement:
    """One thought to be judged: the completion that holds it and the instance that it answers."""

    instance: Instance
    completion: Completion


class Judge(Protocol):
    """Scores thoughts."""

    async def score(self, items: Sequence[Judgement]) -> list[float]:
        """One score in [0, 1], or NaN where there is none, per item, in order."""
        ...


def make_judge(config: JudgeConfig) -> Judge:
    """The judge that the settings name. Raises UserError where its endpoint has no key or a wrong address."""
    return EndpointJudge(config) if config.kind == "endpoint" else RubricJudge()


WEIGHTS = {"coherence": 0.3, "correctness": 0.4, "appropriateness": 0.3}
"""Share of each criterion in the rubric's score; they add up to 1."""

_WORD = re.compile(r"\w+(?:[.:/@-]\w+)*")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")
_STOP_WORDS = frozenset(
    _WORD.findall("a an and are as at be by do for from i in is it its of on or so that the then this to was will with")
)
_I_WILL = (
    r"\b(?:i|i'll|i'd|i'm|let me)(?: (?:will|should|must|can|have to|need to|am going to|going to))?"
    r"(?: (?:now|just|simply|then))? "
)
_NO_CALL = re.compile(
    _I_WILL + r"(?:ask|answer|reply|respond|say|tell|explain|inform|clarify|decline|report|summari[sz]e|thank|greet)\b"
    r"|\b(?:no|none of the|without a|without any) (?:\w+ )?(?:tool|function|call)s?\b(?: fits?\b)?"
)
_DO_CALL = re.compile(_I_WILL + r"(?:call|use|invoke|run)\b|\bfits?\b|\bcalls? (?:of|to)\b")
_LOOP_WINDOW, _LOOP_FREE = 3, 0.8


class RubricJudge:
    """Judges a thought offline, by rules, deterministically, in well under a millisecond.

    score = sum of WEIGHTS x criterion, each criterion in [0, 1]:

    coherence        does the thought lead to the action that follows it? With calls: mean of how well it names just
                     the tools that are called and of the share of their arguments' values that it mentions. With a
                     reply: it says that it asks, answers, or has no tool. Halved where it says the opposite as
                     well; 0 where no action can be read; scaled down where the thought runs in a loop (less than
                     80% of its word triples differ).
    correctness      F1 of its content words and values, with their counts, against the reference rationale.
    appropriateness  the same as coherence, but towards the reference action: it names just the reference's tools
                     (where the reference calls none: those its rationale names), and mentions the reference
                     arguments' values (where it calls none: also says that it does not call, else 0).

    How well a thought names tools is the share of the right ones that it names minus the share of the others on
    offer that it names, at least 0: naming all of them earns nothing. Scores that a thought awards itself are
    words that the reference lacks. Only coherence looks at what the completion does, and compares it with what the
    thought says, not with the reference: whether the action is right is the outcome reward's matter.

    No thought at all scores 0; an instance without a reference rationale NaN.
    """

    async def score(self, items: Sequence[Judgement]) -> list[float]:
        return [self.judge(item) for item in items]

    def judge(self, item: Judgement) -> float:
        """The score of one thought, in [0, 1] or NaN."""
        if item.instance.rationale is None:
            return math.nan
        criteria = self.criteria(item)
        return math.fsum(WEIGHTS[name] * value for name, value in criteria.items())

    def criteria(self, item: Judgement) -> dict[str, float]:
        """Each criterion's value in [0, 1]; the instance has a rationale."""
        instance, completion = item.instance, item.completion
        thought, rationale = _normalise(completion.thought or ""), _normalise(instance.rationale or "")
        words = _WORD.findall(thought)
        if not words:
            return dict.fromkeys(WEIGHTS, 0.0)
        present = set(words)
        offered = tuple(tool.name.casefold() for tool in instance.tools)
        named = _names_in(thought, offered)
        refuses = _NO_CALL.search(thought) is not None
        calls_out = _DO_CALL.search(_NO_CALL.sub(" ", thought)) is not None

        if completion.tool_calls:
            called = {call.name.casefold() for call in completion.tool_calls}
            own_named = named | {name for name in called.difference(offered) if name in thought}
            coherence = _mean(_informedness(own_named, called, offered), _values(completion.tool_calls, present))
            coherence *= 0.5 if refuses else 1.0
        elif completion.calls_malformed or not completion.content:
            coherence = 0.0
        else:
            coherence = refuses * (0.5 if calls_out else 1.0)

        target = instance.target
        if target.tool_calls:
            due = {call.name.casefold() for call in target.tool_calls}
            appropriateness = _mean(_informedness(named, due, offered), _values(target.tool_calls, present))
            appropriateness *= 0.5 if refuses else 1.0
        else:
            due = _names_in(rationale, offered)
            appropriateness = _informedness(named, due, offered) * refuses * (0.5 if calls_out else 1.0)

        return {
            "coherence": coherence * _loop_factor(words),
            "correctness": _f1(words, _WORD.findall(rationale)),
            "appropriateness": appropriateness,
        }


def _normalise(text: str) -> str:
    return _THOUSANDS.sub("", text.casefold().replace("’", "'"))


@lru_cache(maxsize=4096)
def _name_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(set(names), key=lambda name: (-len(name), name))
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")


def _names_in(text: str, names: tuple[str, ...]) -> set[str]:
    """Which of the names occur in the text as whole words; of names that overlap, the longest."""
    return set(_name_pattern(names).findall(text)) if names else set()


def _informedness(named: set[str], right: set[str], offered: Iterable[str]) -> float:
    """Share of the right names that are named, minus the share of the others that are; at least 0 (Youden's J)."""
    wrong = set(offered) - right
    recall = len(named & right) / len(right) if right else 1.0
    return max(0.0, recall - (len(named & wrong) / len(wrong) if wrong else 0.0))


def _values(calls: Sequence[ToolCall], present: set[str]) -> float | None:
    """Mean over the calls' argument values of the share of their words that are present; None without values.

    Booleans and nulls are left out: a thought need not spell them.
    """
    shares: list[float] = []
    pending: list[Any] = [call.arguments for call in calls]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        elif value is not None and not isinstance(value, bool):
            whole = isinstance(value, float) and value.is_integer()
            words = _WORD.findall(_normalise(str(int(value) if whole else value)))
            if words:
                shares.append(sum(word in present for word in words) / len(words))
    return sum(shares) / len(shares) if shares else None


def _mean(first: float, second: float | None) -> float:
    return first if second is None else (first + second) / 2


def _f1(words: list[str], reference: list[str]) -> float:
    """F1 of two bags of content words: 2 |a and b| / (|a| + |b|), counts included."""
    a = Counter(word for word in words if word not in _STOP_WORDS)
    b = Counter(word for word in reference if word not in _STOP_WORDS)
    total = a.total() + b.total()
    return 2 * (a & b).total() / total if total else 1.0


def _loop_factor(words: list[str]) -> float:
    """1 for a text whose word triples differ, towards 0 for one that repeats itself."""
    triples = list(zip(*(words[start:] for start in range(_LOOP_WINDOW)), strict=False))
    return min(1.0, len(set(triples)) / len(triples) / _LOOP_FREE) if triples else 1.0


SMALLEST_CHECKED_BATCH = 8
"""Fewer judgements than this never stop a run: one failure of two says little."""
MOST_CACHED = 100_000
"""Scores that an endpoint judge remembers; the oldest are forgotten first."""
LOW_SCORE = 0.5
"""With `two_pass`, a first score below this is replaced by a second one, given with the reference in sight."""


class EndpointJudge:
    """Asks a strong model for a score, and takes no failure for an opinion.

    The score is the mean of three criteria (`awpo.judge_prompts`). A judgement that cannot be had (the endpoint
    failed, its answer could not be read, the batch's deadline passed) is NaN. An empty thought is 0 without asking;
    the same thought about the same instance is asked once. An instance without a rationale is judged without one.

    `judged` and `failures` count over the judge's life; `batch_judged`, `batch_failures` those of the latest batch,
    `last_error` says what went wrong last (None: nothing yet).
    """

    def __init__(self, config: JudgeConfig, endpoint: Endpoint | None = None) -> None:
        if endpoint is None:
            if config.endpoint is None:
                raise UserError("judge kind 'endpoint' needs 'endpoint' with base_url and model")
            endpoint = Endpoint(config.endpoint)
        self.config, self.endpoint = config, endpoint
        self.judged = self.failures = self.batch_judged = self.batch_failures = 0
        self.last_error: str | None = None
        self._cache: dict[str, float] = {}
        self._schema = True  # until the server refuses response_format

    async def score(self, items: Sequence[Judgement]) -> list[float]:
        """One score in [0, 1] or NaN per item, within `deadline_seconds`.

        Raises UserError where more than `failure_limit` of at least 8 judgements failed, or where every request must
        fail (a wrong key, address or model).
        """
        keys = [self._key(item) if (item.completion.thought or "").strip() else None for item in items]
        pending = {
            key: item for key, item in zip(keys, items, strict=True) if key is not None and key not in self._cache
        }
        fresh = await self._ask_all(pending)
        scores = [0.0 if key is None else fresh[key] if key in fresh else self._cache[key] for key in keys]
        self._remember(fresh)
        self.batch_judged, self.batch_failures = len(items), sum(map(math.isnan, scores))
        self.judged += self.batch_judged
        self.failures += self.batch_failures
        share = self.batch_failures / max(1, self.batch_judged)
        if self.batch_judged >= SMALLEST_CHECKED_BATCH and share > self.config.failure_limit:
            raise UserError(
                f"the judge {self.endpoint.config.model} failed on {self.batch_failures} of {self.batch_judged} thoughts "
                f"(failure_limit {self.config.failure_limit:g}); last: {self.last_error}; mend the endpoint and resume"
            )
        return scores

    def _key(self, item: Judgement) -> str:
        return content_hash(judge_messages(item.instance, item.completion, with_reference=True))

    async def _ask_all(self, pending: dict[str, Judgement]) -> dict[str, float]:
        """The scores of distinct items; NaN where there is none when the deadline passes."""
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
        return {key: math.nan if task in late else task.result() for key, task in tasks.items()}

    async def _judge(self, item: Judgement) -> float:
        """One score or NaN. Raises EndpointError only where every other request would fail as well."""
        try:
            score = await self._ask(item, with_reference=not self.config.two_pass)
            if self.config.two_pass and item.instance.rationale is not None and score < LOW_SCORE:
                score = await self._ask(item, with_reference=True)
        except EndpointError as error:
            if error.hopeless:
                raise
            self.last_error = str(error)
            return math.nan
        return score

    async def _ask(self, item: Judgement, *, with_reference: bool) -> float:
        messages = judge_messages(item.instance, item.completion, with_reference=with_reference)
        answer: str | None = None
        if self._schema:
            try:
                answer = await self.endpoint.chat(messages, response_format=RESPONSE_FORMAT)
            except EndpointError as error:
                if error.status not in (400, 422):
                    raise
        if answer is None:
            answer = await self.endpoint.chat(messages)
            self._schema = False  # refused with it, answered without
        score = read_answer(answer)
        if math.isnan(score):
            self.last_error = f"an answer without readable scores: {' '.join(answer[:200].split())!r}"
        return score

    def _remember(self, scores: dict[str, float]) -> None:
        self._cache.update((key, score) for key, score in scores.items() if not math.isnan(score))
        while len(self._cache) > MOST_CACHED:
            del self._cache[next(iter(self._cache))]
