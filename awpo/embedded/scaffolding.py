"""The text around the words of a prompt: what a chat template and JSON write every time.

A prompt with four tools is mostly `{"type": "function", "function": {"name": "` and its like. Each such piece
becomes one token of the embedded tokenizer, which makes prompts about three times shorter. The pieces are found
by rendering instances whose free strings (names, descriptions, values, sentences) are replaced by a mark.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from awpo import chat
from awpo.types import Instance, Message, Tool, ToolCall

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

MARK = "\ue000"  # of Unicode's private use area: no template writes it, and JSON leaves it as it is
_FREE = re.compile(f"{MARK}+|-?\\d+(?:\\.\\d+)?")
_CUTS = re.compile("|".join(map(re.escape, (*CONTROL_TOKENS, *TAGS))))

Render = Callable[..., str]


def mask_value(value: Any) -> Any:
    """The value with a mark for every string (distinct ones for keys) and 0 for every number."""
    if isinstance(value, dict):
        return {MARK * (place + 1): mask_value(member) for place, member in enumerate(value.values())}
    if isinstance(value, list):
        return [mask_value(member) for member in value]
    if isinstance(value, str):
        return MARK
    return value if isinstance(value, bool) or value is None else 0


def _mask_schema(schema: Any) -> Any:
    """A JSON Schema of which the keywords and types stay."""
    if isinstance(schema, list):
        return [_mask_schema(member) for member in schema]
    if not isinstance(schema, dict):
        return mask_value(schema)
    masked: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties" and isinstance(value, dict):
            masked[key] = {MARK * (place + 1): _mask_schema(member) for place, member in enumerate(value.values())}
        elif key == "type" and isinstance(value, str):
            masked[key] = value
        else:
            masked[key] = _mask_schema(value)
    return masked


def _mask_message(message: Message) -> Message:
    content = message.content and MARK
    if message.role == "tool":
        with contextlib.suppress(ValueError):
            content = json.dumps(mask_value(json.loads(message.content or "")), ensure_ascii=False)
    calls = tuple(ToolCall(MARK, mask_value(call.arguments)) for call in message.tool_calls)
    return replace(message, content=content, tool_calls=calls)


def mask_instance(instance: Instance) -> Instance:
    """The instance with marks for everything that is not scaffolding."""
    tools = tuple(Tool(MARK, MARK, _mask_schema(tool.parameters)) for tool in instance.tools)
    prompt = tuple(_mask_message(message) for message in instance.prompt)
    return replace(instance, tools=tools, prompt=prompt, target=_mask_message(instance.target), id="masked")


def frame(render: Render) -> tuple[str, str]:
    """What the template writes before the first tool and after the last one, without the system's own words."""
    tool = {MARK: 0}
    text = render([{"role": "system", "content": MARK * 2}, {"role": "user", "content": MARK}], tools=[tool])
    before, _, after = text.partition(json.dumps(tool, ensure_ascii=False))
    return before.rpartition(MARK)[2].lstrip("\n"), after.partition(CONTROL_TOKENS[2])[0]


def scaffolding(instances: Iterable[Instance], tokenizer: Any, *, most: int, least_share: float) -> list[str]:
    """The pieces, most frequent first: those in at least `least_share` of the instances, `most` at most.

    `tokenizer` is any transformers tokenizer with the chat template. The two pieces of `frame` come first.
    """
    head, tail = frame(lambda messages, **options: tokenizer.apply_chat_template(messages, tokenize=False, **options))
    counts: Counter[str] = Counter()
    total = 0
    for instance in instances:
        masked = mask_instance(instance)
        text = chat.render_prompt(tokenizer, masked) + chat.render_target(masked.target, MARK)
        text = text.replace(head, MARK).replace(tail, MARK)
        pieces = {piece for part in _CUTS.split(text) for piece in _FREE.split(part)}
        counts.update(sorted(pieces))
        total += 1
    frequent = [piece for piece, count in counts.most_common() if len(piece) > 1 and count >= least_share * total]
    return [piece for piece in dict.fromkeys((head, tail, *frequent[:most])) if piece]
