"""Demonstrations as annotators of mixed quality write them: some decide wrongly.

Supervised fine-tuning on such a set leaves something for reinforcement learning to win: the policy knows how calls
are written, and sometimes makes the wrong decision (call, ask or reply; which tool; how many calls).
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from awpo.data.offline_rationales import offline_rationale
from awpo.types import Instance, Message, Tool, ToolCall

REFUSAL = "I cannot help with that."


def wrong_decision(instance: Instance, generator: random.Random) -> Instance | None:
    """The same instance with a wrong action and a rationale that argues for it; None where no wrong one is at hand.

    Where calls are due: a refusal, another offered tool with the same values, or one call too few. Where a reply is
    due: a call of an offered tool with words of the last message.
    """
    calls = instance.target.tool_calls
    options: list[Message] = []
    if calls:
        options.append(Message("assistant", REFUSAL))
        others = [tool for tool in instance.tools if tool.name not in {call.name for call in calls}]
        if others:
            values = [value for call in calls for value in call.arguments.values()]
            options.append(_call(generator.choice(others), values))
        if len(calls) > 1:
            options += [Message("assistant", tool_calls=calls[:-1])] * 2
    elif instance.tools:
        words = (instance.prompt[-1].content or "").split()
        generator.shuffle(words)
        options.append(_call(generator.choice(instance.tools), [word.strip('.,?!"') for word in words]))
    chosen = [option for option in options if option is not None and option != instance.target]
    if not chosen:
        return None
    wrong = replace(instance, target=generator.choice(chosen), rationale=None, id="")
    return wrong.with_rationale(offline_rationale(wrong))


def _call(tool: Tool, values: list[Any]) -> Message:
    names = tool.parameters.get("required") or list(tool.parameters.get("properties", {}))
    return Message("assistant", tool_calls=(ToolCall(tool.name, dict(zip(names, values, strict=False))),))
