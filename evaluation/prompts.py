"""How a question becomes a prompt, by the model's family: its own template with native tools, or ToolRL's text.

ToolRL (arXiv 2504.13958) lists the tools in the system message and tells the whole history in one user message, in
the tags that the answer has too. `rlla` writes that layout: headings, tags and JSON are those of its published data,
the sentences between them are our own. `awpo.data.sources.toolrl` reads it back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from awpo.chat import CALL, CALL_END, RESPONSE, RESPONSE_END, THINK, THINK_END
from awpo.config import EvaluationConfig
from awpo.types import Message, Tool
from evaluation.generate import Question

_FIRST = "You are an assistant that works with tools, over one turn or many, and answers in a fixed layout."
_LAYOUT = f"""**Steps for Each Turn**
1. **Think:** Go over what is known and what the user wants now.
2. **Decide on Tool Usage:** Where a tool helps, name it and give its parameters.
3. **Respond Appropriately:** Where a reply is due, write one that agrees with the dialogue so far.

**Output Format**
```plaintext
{THINK} what you think {THINK_END}
{CALL}
{{"name": "name of the tool", "parameters": {{"name of the parameter": "its value"}}}}
{{"name": "...", "parameters": {{"...": "..."}}}}
{CALL_END}
{RESPONSE} what you say to the user {RESPONSE_END}
```

**Important Notes**
1. `{THINK}` comes first, always. After it come `{CALL}`, `{RESPONSE}`, or both; one of them at least.
2. `{CALL}` may hold several calls, each a JSON object on a line of its own with "name" and "parameters"; a call without parameters has an empty object.
3. The history holds what was said and called before, and what the tools gave back in `<obs>`."""


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """`name` native or rlla; `thinking` on, off, or auto for what the model's template does by itself."""

    name: Literal["native", "rlla"] = "native"
    thinking: Literal["auto", "on", "off"] = "auto"

    @staticmethod
    def of(config: EvaluationConfig) -> PromptFormat:
        return PromptFormat(config.prompt_format, config.thinking)

    @property
    def identity(self) -> dict[str, str]:
        return {"prompt_format": self.name, "thinking": self.thinking}

    @property
    def template_options(self) -> dict[str, Any]:
        """What the chat template is called with beside messages and tools."""
        return {} if self.thinking == "auto" else {"enable_thinking": self.thinking == "on"}

    def apply(self, question: Question) -> Question:
        """The question as it is put to the model; its tools are those that the template or the server gets."""
        return question if self.name == "native" else rlla(question)


def rlla(question: Question) -> Question:
    """A system and a user message in ToolRL's layout, without tools. A question without tools stays as it is."""
    if not question.tools:
        return question
    own = [message.content or "" for message in question.messages if message.role == "system"]
    system = "\n\n".join([*(own or [_FIRST]), _tool_list(question.tools), _LAYOUT])
    history = "\n".join(_history([message for message in question.messages if message.role != "system"]))
    return Question((Message("system", system), Message("user", f"**Dialogue Records History**\n{history}")))


def _tool_list(tools: Sequence[Tool]) -> str:
    lines = ["**Available Tools**", "In your response, you can use these tools:"]
    for number, tool in enumerate(tools, start=1):
        parameters = json.dumps(_described(tool.parameters), ensure_ascii=False)
        lines += [f"{number}. Name: {tool.name}", f"Description: {tool.description}", f"Parameters: {parameters}"]
    return "\n".join(lines)


def _described(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The properties by name, as ToolRL lists them; the whole schema where they do not say all (what is required)."""
    properties = parameters.get("properties") or {}
    said = set(parameters) <= {"type", "properties"}
    return properties if said else parameters


def _history(messages: Iterable[Message]) -> Iterable[str]:
    """The lines of the history; tool results in a row are one `<obs>`, an object per call."""
    results: list[Message] = []
    for message in messages:
        if message.role == "tool":
            results.append(message)
            continue
        if results:
            yield f"<obs> {_observed(results)} </obs>\n"
            results = []
        if message.role == "user":
            yield f"<user> {message.content or ''} </user>\n"
        else:
            yield from _step(message)
    if results:
        yield f"<obs> {_observed(results)} </obs>"


def _step(message: Message) -> Iterable[str]:
    if message.thought:
        yield f"{THINK} {message.thought} {THINK_END}"
    if message.tool_calls:
        yield CALL
        for call in message.tool_calls:
            yield json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False)
        yield CALL_END
    if message.content:
        yield f"{RESPONSE} {message.content} {RESPONSE_END}\n"


def _observed(results: Sequence[Message]) -> str:
    """Results as ToolRL writes them: [{"name", "results"}]; what has this form already stays as it is."""
    found: list[Any] = []
    for message in results:
        text = message.content or ""
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if len(results) == 1 and isinstance(value, list) and value and all(map(_is_result, value)):
            return text
        found.append(value if _is_result(value) else {"name": message.name or "", "results": value})
    return json.dumps(found, ensure_ascii=False)


def _is_result(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"name", "results"}
