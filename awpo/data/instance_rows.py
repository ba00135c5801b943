"""A dialogue straight to the rows of its instances: each message is written as JSON once, not once per step.

The rows are those that `store` makes of the instances of `decompose`, to the byte: an id is the hash of a text that is
put together from the texts of tools and messages, and so are the columns `prompt` and `tools`.
"""

from __future__ import annotations

import hashlib
import json
from operator import le
from typing import Any

from awpo.data import strict_json
from awpo.types import Dialogue, Message, Split, Tool

# As `awpo.types.canonical_json`, which makes an encoder at each call.
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str).encode
_quote = json.encoder.encode_basestring  # a text as JSON without escapes of other scripts


class Texts:
    """The JSON of a dialogue's tools and messages, as it is hashed and as it is stored.

    `messages` are hashed for the dialogue; `bare`, which are without thoughts, for its instances.
    """

    def __init__(self, dialogue: Dialogue) -> None:
        self.of = dialogue
        self.tools = f"[{','.join([_canonical_tool(tool) for tool in dialogue.tools])}]"
        self.messages: list[str] = []
        self.bare: list[str] = []
        self.stored: list[str | None] = []
        for message in dialogue.messages:
            whole, bare, stored = _message_texts(message)
            self.messages.append(whole)
            self.bare.append(bare)
            self.stored.append(stored)

    def content_hash(self) -> str:
        """`sources.base.dialogue_hash` of the dialogue."""
        text = f"[{self.tools},[{','.join(self.messages)}]]"
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _message_texts(message: Message) -> tuple[str, str, str | None]:
    """A message as it is hashed, with its thought and without, and as it is stored; None where it cannot be.

    Put together from its parts: `canonical_json(message.to_json())` with keys in their order, and
    `strict_json.dump(message_to_json(message))`, without making objects and encoders for each.
    """
    content, role = _quote(message.content or ""), message.role
    name = "" if not message.name else f',"name":{_quote(message.name)}'
    calls = stored_calls = ""
    storable = True
    if message.tool_calls:
        hashed, kept = [], []
        for call in message.tool_calls:
            called = _quote(call.name)
            arguments, stored = _arguments_texts(call.arguments)
            storable = storable and stored is not None
            hashed.append(f'{{"function":{{"arguments":{arguments},"name":{called}}},"type":"function"}}')
            kept.append(f'{{"type":"function","function":{{"name":{called},"arguments":{stored}}}}}')
        calls, stored_calls = f',"tool_calls":[{",".join(hashed)}]', f',"tool_calls":[{",".join(kept)}]'
    whole = bare = f'{{"content":{content}{name},"role":"{role}"{calls}}}'
    if message.thought:
        thought = _quote(message.thought)
        whole = f'{{"content":{content}{name},"reasoning_content":{thought},"role":"{role}"{calls}}}'
    if not storable:
        return whole, bare, None
    own_name = ',"name":""' if message.name == "" else name
    own_content = "null" if message.content is None else content
    return whole, bare, f'{{"role":"{role}","content":{own_content}{stored_calls}{own_name}}}'


_SIMPLE = {True: "true", False: "false", None: "null"}


def _arguments_texts(arguments: dict[str, Any]) -> tuple[str, str | None]:
    """A call's arguments with sorted keys, and in their order; None where they cannot be stored."""
    parts: list[str] = []
    for name, value in arguments.items():
        kind = type(value)
        if kind is str:
            text = _quote(value)
        elif kind is int:
            text = repr(value)
        elif kind is bool or value is None:
            text = _SIMPLE[value]
        else:  # numbers that are not finite, values in values: as the encoder writes them
            break
        parts.append(f"{_quote(name)}:{text}")
    else:
        stored = f"{{{','.join(parts)}}}"
        names = list(arguments)
        if all(map(le, names, names[1:])):
            return stored, stored
        by_name = [part for _, part in sorted(zip(names, parts, strict=True))]
        return f"{{{','.join(by_name)}}}", stored
    canonical = _canonical(arguments)
    try:
        return canonical, strict_json.dump(arguments)
    except ValueError:
        return canonical, None


# The texts of tools that readers gave out more than once, by the object; that the object is held keeps its id its own.
_texts: dict[int, tuple[Tool, str, str]] = {}
TEXTS_KEPT = 4096


def _canonical_tool(tool: Tool) -> str:
    try:
        return _tool_texts(tool)[1]
    except ValueError:  # it cannot be stored: said where its rows are made
        return _canonical(tool.to_json())


def _tool_texts(tool: Tool) -> tuple[Tool, str, str]:
    found = _texts.get(id(tool))
    if found is None:
        if len(_texts) >= TEXTS_KEPT:
            _texts.clear()
        found = _texts[id(tool)] = (tool, _canonical(tool.to_json()), strict_json.dump(tool.to_json()))
    return found


def dialogue_rows(texts: Texts, split: Split, last_step_only: bool) -> list[dict[str, Any]]:
    """The rows of a checked dialogue's instances, of a split. Raises ValueError where a text cannot be stored."""
    dialogue = texts.of
    messages = dialogue.messages
    positions = [index for index, message in enumerate(messages) if message.role == "assistant"]
    tools = f"[{','.join([_tool_texts(tool)[2] for tool in dialogue.tools])}]"
    for kept in (dialogue.source, dialogue.id, *[message.thought for message in messages if message.thought]):
        kept.encode("utf-8")
    history = hashlib.sha256(f"[{texts.tools},[".encode("utf-8", "surrogatepass"))
    stored: list[str] = []
    rows: list[dict[str, Any]] = []
    step = 0
    for index, message in enumerate(messages[: positions[-1] + 1]):
        encoded = texts.bare[index].encode("utf-8")  # ValueError for a lone surrogate
        text = texts.stored[index]
        if text is None:
            raise ValueError("a call's arguments cannot be stored")
        if message.role == "assistant":
            if not last_step_only or index == positions[-1]:
                digest = history.copy()
                digest.update(b"]," + encoded + b"]")
                kind = (
                    "reply" if not message.tool_calls else "call+reply" if (message.content or "").strip() else "call"
                )
                rows.append(
                    {
                        "id": digest.hexdigest()[:16],
                        "source": dialogue.source,
                        "dialogue_id": dialogue.id,
                        "step": step,
                        "steps": len(positions),
                        "split": split,
                        "kind": kind,
                        "tools": tools,
                        "prompt": f"[{','.join(stored)}]",
                        "target": text,
                        "rationale": message.thought,
                    }
                )
            step += 1
        history.update(b"," + encoded if index else encoded)
        stored.append(text)
    return rows
