"""The nouns of the project, each defined once.

A `Dialogue` is what a source holds; an `Instance` is one assistant step of it, with everything before
that step as its prompt; a `Completion` is what a model wrote for an instance, taken apart.
JSON forms are those of the OpenAI chat format, so that any file in it can be read back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Kind = Literal["call", "reply", "call+reply"]
Split = Literal["train", "validation", "test_phrasings", "test_tools", "test"]


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no white space: equal values give equal text, which is what is hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def content_hash(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool: its name and its arguments by parameter name."""

    name: str
    arguments: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ToolCall:
        """Reads the OpenAI form or the bare `{"name", "arguments"}`; arguments may be a JSON string.

        Raises ValueError where a name is missing or the arguments are not an object.
        """
        function = value.get("function", value) if isinstance(value, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError("a tool call is an object, or holds one as 'function'")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments) if arguments.strip() else {}
        if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
            raise ValueError("a tool call needs a string 'name' and an object 'arguments'")
        return ToolCall(function["name"], arguments)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called; `parameters` is a JSON Schema of type object."""

    name: str
    description: str
    parameters: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Tool:
        """Reads the OpenAI form or the bare function. Raises ValueError where the name is missing, or is no string, the
        description is none, or the parameters are no object."""
        function = value.get("function", value) if isinstance(value, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError("a tool needs a string 'name'")
        description = function.get("description") or ""
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(description, str) or not isinstance(parameters, dict):
            raise ValueError("a tool needs a string 'description' and an object 'parameters'")
        return Tool(function["name"], description, parameters)


@dataclass(frozen=True, slots=True)
class Message:
    """One message. An assistant's may hold a thought, calls, content; a tool's `content` is its result."""

    role: Role
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    thought: str | None = None
    name: str | None = None

    def to_json(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.tool_calls:
            message["tool_calls"] = [call.to_json() for call in self.tool_calls]
        if self.name:
            message["name"] = self.name
        return message

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Message:
        """Raises ValueError where the role is unknown, the content is no text or a call cannot be read."""
        if not isinstance(value, Mapping) or value.get("role") not in ("system", "user", "assistant", "tool"):
            role = value.get("role") if isinstance(value, Mapping) else value
            raise ValueError(f"unknown role {role!r:.200}")
        if not isinstance(value.get("content"), str | None):
            raise ValueError(f"the content of a message is a string: {value['content']!r:.200}")
        return Message(
            role=value["role"],
            content=value.get("content"),
            tool_calls=tuple(ToolCall.from_json(call) for call in value.get("tool_calls") or ()),
            thought=value.get("reasoning_content"),
            name=value.get("name"),
        )


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A whole conversation with the tools that were on offer; `split` where the source assigns one."""

    id: str
    source: str
    tools: tuple[Tool, ...]
    messages: tuple[Message, ...]
    split: Split | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "source": self.source,
            "split": self.split,
            "tools": [tool.to_json() for tool in self.tools],
            "messages": [message.to_json() for message in self.messages],
        }


@dataclass(frozen=True, slots=True)
class Instance:
    """One assistant step of a dialogue: the unit of training and of evaluation.

    `step` counts assistant steps from 0 to `steps` - 1; `prompt` is everything before it, without earlier
    thoughts; `target` is the reference action (its own thought dropped); `rationale` is the reference
    reasoning for it, once one has been written.
    """

    source: str
    dialogue_id: str
    step: int
    steps: int
    split: Split
    tools: tuple[Tool, ...]
    prompt: tuple[Message, ...]
    target: Message
    rationale: str | None = None
    id: str = field(default="")

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", self.compute_id())

    def compute_id(self) -> str:
        """Content hash of tools, prompt and target: the same question has the same id wherever it comes from."""
        return content_hash(
            [
                [tool.to_json() for tool in self.tools],
                [message.to_json() for message in self.prompt],
                self.target.to_json(),
            ]
        )

    @property
    def kind(self) -> Kind:
        if not self.target.tool_calls:
            return "reply"
        return "call+reply" if (self.target.content or "").strip() else "call"

    def with_rationale(self, rationale: str | None) -> Instance:
        return replace(self, rationale=rationale)


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's text, taken apart by `awpo.chat.parse_completion`.

    `errors` names each departure from the format, in order of appearance; an empty tuple means well formed.
    `calls_malformed` is true where a call was begun that could not be read.
    """

    thought: str | None
    tool_calls: tuple[ToolCall, ...]
    content: str
    errors: tuple[str, ...] = ()
    calls_malformed: bool = False
