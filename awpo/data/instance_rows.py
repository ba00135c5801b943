"""A dialogue straight to the rows of its instances: each message is written as JSON once, not once per step.

The rows are those that `store` makes of the instances of `decompose`, to the byte: an id is the hash of a text that is
put together from the texts of tools and messages, and so are the columns `prompt` and `tools`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from awpo.data import strict_json
from awpo.data.splits import split_of
from awpo.data.store import message_to_json
from awpo.types import Dialogue, Tool

# As `awpo.types.canonical_json`, which makes an encoder at each call.
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str).encode


class Texts:
    """The canonical JSON of a dialogue's tools and messages, from which its hashes are made."""

    def __init__(self, dialogue: Dialogue) -> None:
        self.of = dialogue
        self.tools = f"[{','.join([_canonical_tool(tool) for tool in dialogue.tools])}]"
        self.messages = [_canonical(message.to_json()) for message in dialogue.messages]

    def with_split(self, dialogue: Dialogue) -> Texts:
        """The same texts for a dialogue that differs in nothing but its split."""
        texts = Texts.__new__(Texts)
        texts.of, texts.tools, texts.messages = dialogue, self.tools, self.messages
        return texts

    def content_hash(self) -> str:
        """`sources.base.dialogue_hash` of the dialogue."""
        text = f"[{self.tools},[{','.join(self.messages)}]]"
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


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


def dialogue_rows(texts: Texts, last_step_only: bool) -> list[dict[str, Any]]:
    """The rows of a checked dialogue's instances. Raises ValueError where a text cannot be stored."""
    dialogue = texts.of
    positions = [index for index, message in enumerate(dialogue.messages) if message.role == "assistant"]
    tools = f"[{','.join([_tool_texts(tool)[2] for tool in dialogue.tools])}]"
    for text in (dialogue.source, dialogue.id, *(message.thought for message in dialogue.messages)):
        (text or "").encode("utf-8")
    history = hashlib.sha256(f"[{texts.tools},[".encode("utf-8", "surrogatepass"))
    stored: list[str] = []
    rows: list[dict[str, Any]] = []
    split = dialogue.split or split_of(dialogue.id)
    for index, message in enumerate(dialogue.messages[: positions[-1] + 1]):
        bare = replace(message, thought=None) if message.thought else message
        canonical = _canonical(bare.to_json()) if message.thought else texts.messages[index]
        encoded = canonical.encode("utf-8", "surrogatepass")
        text = strict_json.dump(message_to_json(bare))
        if message.role == "assistant" and (not last_step_only or index == positions[-1]):
            digest = history.copy()
            digest.update(b"]," + encoded + b"]")
            kind = "reply" if not bare.tool_calls else "call+reply" if (bare.content or "").strip() else "call"
            row: dict[str, Any] = {"id": digest.hexdigest()[:16], "source": dialogue.source, "dialogue_id": dialogue.id}
            row |= {"step": positions.index(index), "steps": len(positions), "split": split, "kind": kind}
            row |= {"tools": tools, "prompt": f"[{','.join(stored)}]", "target": text, "rationale": message.thought}
            rows.append(row)
        history.update(b"," + encoded if index else encoded)
        stored.append(text)
    return rows
