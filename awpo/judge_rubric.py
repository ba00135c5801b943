"""A judge by fixed rules: it needs nothing but the instance and the completion, and costs nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
from awpo.judgement import Grades, Judgement
from awpo.types import ToolCall, content_hash

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
            return Grades(math.nan, failure="the instance has no reference rationale")
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
