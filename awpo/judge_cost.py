"""What a judge over an endpoint will be asked and at which cost, before it is."""

from __future__ import annotations

from collections.abc import Sequence

from awpo.config import JudgeConfig
from awpo.data.endpoint_rationales import Estimate
from awpo.endpoint_limits import cost_of, estimated_tokens
from awpo.judge_prompts import judge_messages
from awpo.types import Completion, Instance

USUAL_ANSWER = 60
"""Tokens of a usual answer: one line of reason and three numbers as JSON."""


def estimate_judgements(instances: Sequence[Instance], config: JudgeConfig, thoughts: int) -> Estimate | None:
    """What judging so many different thoughts about such instances takes; None where no model is asked.

    The prompts are those for the reference rationales and actions, whose length a policy's come near. With `two_pass`
    the estimate is that of both passes for every thought, which is the most. What the cache knows is not taken off,
    since a policy's thoughts are new. Raises ValueError without instances.
    """
    endpoint = config.endpoint
    if endpoint is None:
        return None
    if not instances:
        raise ValueError("an estimate needs instances")
    passes = (False, True) if config.two_pass else (True,)
    tokens = 0
    for item in instances:
        right = Completion(item.rationale, item.target.tool_calls, item.target.content or "")
        tokens += sum(estimated_tokens(judge_messages(item, right, with_reference=shown)) for shown in passes)
    requests = thoughts * config.samples * len(passes)
    prompt = round(tokens / len(instances) * thoughts * config.samples)
    usual, most = requests * min(USUAL_ANSWER, endpoint.max_tokens), requests * endpoint.max_tokens
    costs = [cost_of(endpoint, prompt, completion) for completion in (0, usual, most)]
    return Estimate(requests, 0, prompt, usual, most, *costs)
