"""Format `toolrl`: rows of ToolRL's rlla sets (arXiv 2504.13958), each one assistant step with its history as text.

Three shapes are read: `instruction`, `input`, `output` (the SFT set, JSON); `prompt`, `reward_model.ground_truth`,
`extra_info` (the RL set, parquet); `system`, `user`, `answer` (API-Bank as ToolRL processed it, where the answer is a
call or a list of calls). In all, the system text lists the tools and explains ToolRL's layout, the user text holds the
history in tags, and the output is the step. API-Bank is a benchmark: its rows are of the split "test".

What becomes of it:
- The numbered list "Name / Description / Parameters", or "name: description / Parameters", becomes tools. The system message keeps what stands before
  that list and any section but the three about ToolRL's layout, because a prompt is rendered in the layout of the
  model's own chat template.
- `<user>`, `<think>`, `<tool_call>`, `<response>` and `<obs>` become messages. A thought ends at the last
  `</think>`, because thoughts name the tags. Two stock sentences stand for thoughts in the RL set; they are no
  reasoning and are dropped.
- A result that lists one object per call becomes one tool message per call.
- Rows cut from one dialogue share their tools and their first message, so they share the dialogue id, and with it
  the split.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from awpo.data import schema, strict_json
from awpo.data.sources.base import (
    CallNames,
    RowError,
    Source,
    action,
    read_call,
    read_calls,
    read_results,
    read_split,
    read_value,
)
from awpo.types import Dialogue, Message, Tool, ToolCall, content_hash

SOURCE_NAME = "toolrl"
PLACEHOLDER_THOUGHTS = frozenset(
    {
        "I should use the appropriate tool with proper parameters to respond to the user's need.",
        "I should directly respond to the user's need.",
    }
)

_TOOLS_HEADING = "**Available Tools**"
_HISTORY_HEADING = "**Dialogue Records History**"
_LAYOUT_SECTIONS = ("Steps for Each Turn", "Output Format", "Important Notes")
_SECTION = re.compile(r"^\*\*([^*\n]+)\*\*[ \t]*$", re.MULTILINE)
_TOOL = re.compile(r"^(\d+)\. Name: ", re.MULTILINE)
_SHORT_TOOL = re.compile(r"^(\d+)\. ", re.MULTILINE)
_TAGS = ("user", "think", "tool_call", "response", "obs")
_OPENING = re.compile(rf"<({'|'.join(_TAGS)})>")
_NEXT = re.compile(rf"\s*(?:\Z|<(?:{'|'.join(_TAGS)})>)")


def sniff(row: Any) -> bool:
    """Whether the row has a system text with ToolRL's list of tools."""
    try:
        return _TOOLS_HEADING in _texts(row)[0]
    except RowError:
        return False


def _texts(row: Any) -> tuple[str, str, Any, Any]:
    """System text, user text, output (text, or calls) and the split that the row names."""
    if not isinstance(row, Mapping):
        raise RowError("not an object")
    split = None
    if "answer" in row and "system" in row:
        if not isinstance(row["answer"], (dict, list)) or not all(
            isinstance(row.get(k), str) for k in ("system", "user")
        ):
            raise RowError("no system text, history and output")
        return row["system"], row["user"], row["answer"], "test"
    if "prompt" in row:
        prompt, reward_model, extra = row["prompt"], row.get("reward_model"), row.get("extra_info")
        if not isinstance(prompt, list) or [isinstance(m, Mapping) and m.get("role") for m in prompt] != [
            "system",
            "user",
        ]:
            raise RowError("the prompt is not a system and a user message")
        texts = [prompt[0].get("content"), prompt[1].get("content")]
        texts.append(reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None)
        split = extra.get("split") if isinstance(extra, Mapping) else None
    else:
        texts = [row.get("instruction"), row.get("input"), row.get("output")]
    if not all(isinstance(text, str) for text in texts):
        raise RowError("no system text, history and output")
    return texts[0], texts[1], texts[2], split


def _read_parameters(text: str, name: str) -> dict[str, Any]:
    try:
        value = read_value(text)  # some lists were written with Python's repr
    except ValueError as error:
        raise RowError("a tool's parameters are not JSON", f"{name!r:.80}: {error}") from None
    try:
        return schema.normalise_parameters(value)
    except ValueError as error:
        raise RowError("malformed tool", f"{name!r:.80}: {error}") from None


def _read_tools(text: str) -> tuple[Tool, ...]:
    """The tools of the numbered list; a line is an entry only where its number is the next one."""
    starts: list[tuple[int, int]] = []
    short = not _TOOL.search(text)
    for match in (_SHORT_TOOL if short else _TOOL).finditer(text):
        if int(match[1][:9]) == len(starts) + 1:
            starts.append((match.start(), match.end()))
    if not starts:
        raise RowError("no tool list in the system text")
    tools = []
    for index, (_, begin) in enumerate(starts):
        end = starts[index + 1][0] if index + 1 < len(starts) else len(text)
        head, found, parameters = text[begin:end].rpartition("\nParameters:")
        name, described, description = head.partition(":" if short else "\nDescription:")
        if not found or not described or not name.strip():
            raise RowError("malformed tool", f"tool {index}: needs Name, Description and Parameters")
        # A name is kept to the last blank: calls must match it exactly.
        tools.append(Tool(name, description.strip(), _read_parameters(parameters.strip(), name)))
    return tuple(tools)


def _read_system(text: str) -> tuple[str, tuple[Tool, ...]]:
    """The system text without the list of tools and ToolRL's layout, and the tools."""
    head, found, rest = text.partition(_TOOLS_HEADING)
    if not found:
        raise RowError("no tool list in the system text")
    first = next((match for match in _SECTION.finditer(rest) if match[1] in _LAYOUT_SECTIONS), None)
    listing, tail = (rest[: first.start()], rest[first.start() :]) if first else (rest, "")
    kept = [head.strip()]
    sections = list(_SECTION.finditer(tail))
    ends = [*(section.start() for section in sections[1:]), len(tail)]
    for section, end in zip(sections, ends, strict=False):  # no section, and `ends` still holds the text's end
        if section[1] not in _LAYOUT_SECTIONS:
            kept.append(tail[section.start() : end].strip())
    return "\n\n".join(part for part in kept if part), _read_tools(listing)


def _blocks(text: str, where: str) -> list[tuple[str, str]]:
    """The tagged parts, in order, as (tag, text). Raises RowError where anything stands outside of them.

    A closing tag counts only where the next thing is an opening tag or the end: texts may themselves name tags.
    """
    blocks, at = [], 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        opening = _OPENING.match(text, at)
        if not opening:
            raise RowError("text outside of the tags", f"{where}: {text[at : at + 40]!r}")
        closing = f"</{opening[1]}>"
        end = text.find(closing, opening.end())
        while end >= 0 and not _NEXT.match(text, end + len(closing)):
            end = text.find(closing, end + 1)
        if end < 0:
            raise RowError("a tag that is not closed", f"{where}: <{opening[1]}>")
        blocks.append((opening[1], text[opening.end() : end].strip()))
        at = end + len(closing)
    return blocks


def _read_calls(text: str, where: str) -> tuple[ToolCall, ...]:
    """The calls of a `<tool_call>` block: JSON objects with `name` and `parameters`, one after the other."""
    decoder, calls, at = strict_json.StrictDecoder(), [], 0
    while at < len(text):
        try:
            value, end, fault = decoder.raw_decode(text, at)
        except ValueError as error:
            fault = str(error)
        if fault:
            raise RowError("a tool call is not JSON", f"{where}: {fault}")
        key = "arguments" if isinstance(value, Mapping) and "parameters" not in value else "parameters"
        calls.append(read_call(value, where, key))
        at = end
        while at < len(text) and text[at].isspace():
            at += 1
    if not calls:
        raise RowError("malformed tool call", f"{where}: an empty <tool_call>")
    return tuple(calls)


def _step(parts: Mapping[str, str], where: str) -> Message:
    thought = parts.get("think")
    return Message(
        role="assistant",
        content=parts.get("response") or None,
        tool_calls=_read_calls(parts["tool_call"], where) if "tool_call" in parts else (),
        thought=thought if thought and thought not in PLACEHOLDER_THOUGHTS else None,
    )


def _read_history(text: str) -> list[Message]:
    text = text.partition(_HISTORY_HEADING)[2] if _HISTORY_HEADING in text else text
    messages: list[Message] = []
    step: dict[str, list[str]] = {}
    calls = CallNames.of(())

    def close_step() -> None:
        nonlocal calls
        if step:
            parts = {tag: "\n".join(said) for tag, said in step.items()}
            messages.append(_step(parts, f"history, message {len(messages)}"))
            calls = CallNames.of(messages[-1].tool_calls)
            step.clear()

    for tag, content in _blocks(text, "history"):
        if tag in ("user", "obs"):
            close_step()
            messages.extend([Message("user", content)] if tag == "user" else read_results(content, calls))
        elif tag == "response" and step.keys() == {"response"}:
            step[tag].append(content)  # what was between them was taken out when the set was made
        else:
            if tag in step or (tag == "think" and step):
                close_step()
            step[tag] = [content]
    close_step()
    return messages


def _read_output(text: Any) -> Message:
    """The step itself. Its thought, which may name the tags, ends at the last `</think>`."""
    if not isinstance(text, str):
        return action(read_calls(text, "answer"))
    parts: dict[str, str] = {}
    rest = text
    if text.lstrip().startswith("<think>") and "</think>" in text:
        thought, _, rest = text.lstrip().removeprefix("<think>").rpartition("</think>")
        parts["think"] = thought.strip()
    for tag, content in _blocks(rest, "output"):
        if tag not in ("tool_call", "response") or tag in parts:
            raise RowError("the output is not one step", f"<{tag}>")
        parts[tag] = content
    return _step(parts, "output")


def read(row: Mapping[str, Any]) -> Dialogue:
    """The dialogue up to the row's step, whose last message is that step. Raises RowError."""
    system, history, output, split = _texts(row)
    remark, tools = _read_system(system)
    messages = _read_history(history)
    if not messages:
        raise RowError("an empty history")
    return Dialogue(
        id=content_hash([[tool.to_json() for tool in tools], messages[0].to_json()]),
        source=SOURCE_NAME,
        tools=tools,
        messages=(*([Message("system", remark)] if remark else []), *messages, _read_output(output)),
        split=read_split(split),
    )


SOURCE = Source(
    SOURCE_NAME,
    "ToolRL's rows (instruction, input, output; prompt, reward_model; system, user, answer)",
    sniff,
    read,
    2,
    True,
)
