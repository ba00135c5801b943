import asyncio
import random

import pytest

from awpo.chat import parse_completion
from awpo.config import JudgeConfig
from awpo.errors import UserError
from awpo.judge import make_judge
from awpo.judge_correlated import CorrelatedJudge
from awpo.judgement import Judgement
from awpo.rewards import outcome_reward
from awpo.types import Instance, Message, Tool, ToolCall

WEATHER = Tool("get_weather", "weather", {"type": "object", "properties": {"city": {"type": "string"}}})
TEXTS = [
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    '<tool_call>\n{"name": "get_time", "arguments": {"city": "Paris"}}\n</tool_call>',
    "Hello.",
    "<tool_call>\n{broken",
]


def items(count: int) -> list[Judgement]:
    generator = random.Random(0)
    return [
        Judgement(
            Instance(
                source="t",
                dialogue_id=str(number),
                step=0,
                steps=1,
                split="train",
                tools=(WEATHER,),
                prompt=(Message("user", f"weather in Paris, {number}"),),
                target=Message("assistant", tool_calls=(ToolCall("get_weather", {"city": "Paris"}),)),
                rationale=None,
            ),
            parse_completion(generator.choice(TEXTS)),
        )
        for number in range(count)
    ]


def scores(judge: CorrelatedJudge, batch: list[Judgement]) -> list[float]:
    return asyncio.run(judge.score(batch))


def correlation(a: list[float], b: list[float]) -> float:
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    dot = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    return dot / (sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)) ** 0.5


@pytest.mark.parametrize("rho", [0.8, 0.0, -0.5, 1.0, -1.0])
def test_the_correlation_with_the_outcome_is_what_was_asked_for(rho: float) -> None:
    batch = items(4000)
    found = scores(CorrelatedJudge(rho), batch)
    outcomes = [outcome_reward(item.instance, item.completion) for item in batch]
    # The standard error of a correlation is at most 1 / sqrt(4000) = 0.016; cutting to [0, 1] takes little.
    assert correlation(outcomes, found) == pytest.approx(rho, abs=0.05)
    assert min(found) >= 0
    assert max(found) <= 1
    assert sum(found) / len(found) == pytest.approx(0.5, abs=0.02)


def test_noise_follows_seed_and_content_and_not_the_order() -> None:
    batch = items(50)
    first = scores(CorrelatedJudge(0.0, seed=1), batch)
    assert first == scores(CorrelatedJudge(0.0, seed=1), batch)
    assert first != scores(CorrelatedJudge(0.0, seed=2), batch)
    assert list(reversed(first)) == scores(CorrelatedJudge(0.0, seed=1), batch[::-1])


def test_the_same_completion_twice_gets_two_opinions() -> None:
    batch = items(1) * 3
    assert len(set(scores(CorrelatedJudge(0.0), batch))) == 3


def test_outcomes_that_do_not_vary_leave_the_noise_alone() -> None:
    batch = items(1) * 8
    assert scores(CorrelatedJudge(1.0), batch) == [0.5] * 8
    assert scores(CorrelatedJudge(1.0), []) == []


def test_a_correlation_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"in \[-1, 1\], not 1.5"):
        CorrelatedJudge(1.5)


def test_the_settings_name_it() -> None:
    judge = make_judge(JudgeConfig.read({"kind": "correlated", "correlation": -0.5}, "x"), seed=3)
    assert isinstance(judge, CorrelatedJudge)
    assert (judge.correlation, judge.seed) == (-0.5, 3)
    for wrong in ({"kind": "correlated"}, {"correlation": 0.5}):
        with pytest.raises(UserError, match="go together"):
            JudgeConfig.read(wrong, "x")
