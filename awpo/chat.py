"""Between messages and text: render a prompt and a target, take a completion apart.

Prompts are rendered by the tokenizer's own template, so that training sees what inference sees. Targets are
rendered, and completions read, in the layout of Qwen3's template:

    <think>\\n{thought}\\n</think>\\n\\n{reply}\\n<tool_call>\\n{"name": .., "arguments": {..}}\\n</tool_call>

Read as well is the layout of ToolRL (arXiv 2504.13958): one `<tool_call>` block with a JSON object
`{"name", "parameters"}` per line, then `<response>{reply}</response>`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from awpo.types import Completion, Instance, Message, Tool, ToolCall

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
RESPONSE, RESPONSE_END = "<response>", "</response>"
END_TOKENS = ("<|im_end|>", "<|endoftext|>")

MOST_ERRORS = 16
"""Reading stops after this many errors: nobody reads more, and it keeps the time linear on hostile text."""
DEEPEST_VALUE = 64
"""Deepest nesting of a call's arguments; past it a call counts as unreadable, so that no later step recurses over it."""

_SURROGATES = re.compile("[\ud800-\udfff]")
_STRAY = re.compile("|".join(map(re.escape, (THINK, THINK_END, CALL_END, "<|im_start|>", *END_TOKENS))))
_NOT_SPACE = re.compile(r"\S")


def messages_for_template(prompt: Iterable[Message]) -> list[dict[str, Any]]:
    """The messages in OpenAI's form with each call's arguments as a dict, which is what chat templates expect."""
    return [message.to_json() for message in prompt]


def render_prompt(tokenizer: Any, instance: Instance, *, thinking: bool = True) -> str:
    """The instance's tools and prompt as text, up to where the assistant's turn begins.

    `tokenizer` is a transformers tokenizer with a chat template. `thinking=False` passes `enable_thinking=False`
    to the template; otherwise the template's own default holds, as templates without the switch need.
    """
    options = {} if thinking else {"enable_thinking": False}
    return render_messages(tokenizer, instance.prompt, instance.tools, options)


def render_messages(
    tokenizer: Any, messages: Iterable[Message], tools: Iterable[Tool], options: Mapping[str, Any]
) -> str:
    """As `render_prompt`, for messages and tools that are no instance; `options` are the template's own."""
    return tokenizer.apply_chat_template(
        messages_for_template(messages),
        tools=[tool.to_json() for tool in tools] or None,
        add_generation_prompt=True,
        tokenize=False,
        **options,
    )


def render_target(message: Message, thought: str | None) -> str:
    """An assistant's turn as Qwen3's template writes it, without the closing `<|im_end|>`.

    `thought` None writes no `<think>` block (a model without thinking, or a prompt that already holds an empty
    one); an empty string writes the empty block.
    """
    content = message.content or ""
    text = content
    if thought is not None:
        inner = thought.strip("\n")
        text = f"{THINK}\n{inner}\n{THINK_END}\n\n" + content.lstrip("\n")
    for index, call in enumerate(message.tool_calls):
        if index or content:
            text += "\n"
        name, arguments = (json.dumps(part, ensure_ascii=False) for part in (call.name, call.arguments))
        text += f'{CALL}\n{{"name": {name}, "arguments": {arguments}}}\n{CALL_END}'
    return text


def parse_completion(text: str) -> Completion:
    """Takes a model's text apart into thought, calls and reply; never raises, in time linear in the text.

    Well formed (`errors` empty) means: at most one thought, before anything else; then calls, a reply, or both,
    the reply in one piece before or after the calls; something at all after the thought. White space between the
    parts does not matter, nor do trailing `<|im_end|>` and `<|endoftext|>`. Each error names the character offset
    in `text` at which it was found.

    A thought may name a tag, so it ends at the last `</think>`. Where that leaves a broken rest, as when a call's
    argument holds the tag, the first `</think>`, or no thought at all, is taken if the text is well formed that way.
    A text with `</think>` but no `<think>` is read too: some templates write the opening tag into the prompt.

    A call that cannot be read (not JSON, NaN, a key twice, no name, nested too deep, ..) sets `calls_malformed`;
    departures that leave no doubt about what is called (a missing closing tag, an extra key) are errors only.
    """
    problems: list[str] = []
    lone = None if text.isascii() else _SURROGATES.search(text)
    if lone:  # kept, it would make every later write of the text fail
        problems.append(f"character {lone.start()}: a lone surrogate is not text")
        text = _SURROGATES.sub("�", text)
    end = _end_of_turn(text)

    best: _Reader | None = None
    for opened, start, stop in _thoughts(text, end):
        reader = _Reader(text, end)
        reader.errors += problems
        reader.read(opened, start, stop)
        if not reader.errors:
            return reader.completion()
        best = best or reader
    assert best is not None  # _thoughts always offers one
    return best.completion()


def _end_of_turn(text: str) -> int:
    """Where the turn ends: before trailing white space and end tokens."""
    end = len(text)
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        if not text.endswith(END_TOKENS, 0, end):
            return end
        end -= next(len(token) for token in END_TOKENS if text.endswith(token, 0, end))


def _thoughts(text: str, end: int) -> Iterator[tuple[int, int, int]]:
    """Readings of where the thought lies, best first: offsets (tag, thought's start, thought's end).

    (-1, 0, 0) reads no thought at all. At most three readings, so that trying them all stays linear.
    """
    last = text.rfind(THINK_END, 0, end)
    first = text.find(THINK_END, 0, end)
    tag = text.find(THINK, 0, end)
    opens = tag == 0 or (tag > 0 and text[:tag].isspace())
    if last < 0:
        yield (tag, tag + len(THINK), end) if opens else (-1, 0, 0)
        return
    if 0 <= tag < last:
        yield tag, tag + len(THINK), last
        if tag < first < last:
            yield tag, tag + len(THINK), first
    else:
        yield 0, 0, last
        if first < last:
            yield 0, 0, first
    if not opens:
        yield -1, 0, 0


class _CannotRead(ValueError):
    """A call that is JSON but not a call."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _CannotRead("an object holds a key twice")
    return value


def _no_constant(name: str) -> Any:
    raise _CannotRead(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)


def _check_value(value: Any) -> None:
    """Refuses what JSON's grammar lets through but no later step can store or compare; without recursion."""
    level: list[Any] = [value]
    for _ in range(DEEPEST_VALUE):
        below: list[Any] = []
        for item in level:
            kind = type(item)  # JSON has no subclasses
            if kind is str:
                if not item.isascii() and _SURROGATES.search(item):
                    raise _CannotRead("a string holds a lone surrogate")
            elif kind is dict:
                below.extend(item)
                below.extend(item.values())
            elif kind is list:
                below.extend(item)
            elif kind is float and not math.isfinite(item):
                raise _CannotRead("a number is out of range")
        if not below:
            return
        level = below
    raise _CannotRead(f"a value is nested more than {DEEPEST_VALUE} deep")


@dataclass
class _Reader:
    """One reading of a text up to offset `end`; collects the parts and what is wrong with them."""

    text: str
    end: int
    thought: str | None = None
    calls: list[ToolCall] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    malformed: bool = False
    blocks: int = 0
    keys: set[str] = field(default_factory=set)

    def completion(self) -> Completion:
        return Completion(
            self.thought, tuple(self.calls), "\n".join(self.replies), tuple(self.errors[:MOST_ERRORS]), self.malformed
        )

    def error(self, offset: int, what: str) -> None:
        self.errors.append(f"character {offset}: {what}")

    def read(self, opened: int, start: int, stop: int) -> None:
        """Reads thought and body, given where the thought lies (see `_thoughts`)."""
        body = 0
        if opened >= 0:
            self.thought = self.text[start:stop].strip()
            body = stop + len(THINK_END)
            if self.text[:opened].strip():
                self.error(0, "text before the thought")
            if stop == self.end:
                self.error(opened, "the thought is not closed")
                return
            closed = self.text.find(THINK_END, start, stop)
            again = self.text.find(THINK, closed, stop) if closed >= 0 else -1
            if again >= 0:
                self.error(again, "a second thought")
        if not _NOT_SPACE.search(self.text, body, self.end):
            self.error(body, "nothing after the thought" if opened >= 0 else "an empty completion")
            return
        self.read_body(body)

    def read_body(self, position: int) -> None:
        while position < self.end and len(self.errors) < MOST_ERRORS:
            tag = self.text.find(CALL, position, self.end)
            self.read_reply(position, self.end if tag < 0 else tag, last=tag < 0)
            if tag < 0:
                break
            position = self.read_block(tag)

    def read_reply(self, start: int, stop: int, *, last: bool) -> None:
        """The text outside of calls between two offsets; blank text is nothing."""
        found = _NOT_SPACE.search(self.text, start, stop)
        if not found:
            return
        start = found.start()
        if self.replies or (self.blocks and not last):
            self.error(start, "text between or on both sides of the calls")
        reply = self.text[start:stop].rstrip()
        if reply.startswith(RESPONSE):
            inner, closing, outside = reply[len(RESPONSE) :].rpartition(RESPONSE_END)
            if not closing:
                self.error(start, f"{RESPONSE} is not closed")
                inner = outside
            elif outside:
                self.error(start + len(reply) - len(outside), f"text after {RESPONSE_END}")
            closed = inner.find(RESPONSE_END)
            if closed >= 0 and inner.find(RESPONSE, closed) >= 0:
                self.error(start, "a second response")
            if closing and not inner.strip():
                self.error(start, "an empty response")
            reply = inner.strip()
        stray = _STRAY.search(self.text, start, stop)
        if stray:
            self.error(stray.start(), f"{stray[0]} out of place")
        self.replies.append(reply)

    def read_block(self, tag: int) -> int:
        """Reads the calls of the block that opens at `tag`; returns the offset behind it."""
        self.blocks += 1
        position, calls = tag + len(CALL), 0
        while True:
            found = _NOT_SPACE.search(self.text, position, self.end)
            position, before = (found.start() if found else self.end), position
            if calls and position == self.end:
                self.error(tag, f"{CALL} is not closed")
                return position
            if calls and self.text.startswith(CALL_END, position, self.end):
                return position + len(CALL_END)
            start = position
            try:
                position = self.read_call(start)
            except RecursionError:
                problem = "nested too deep"
            except json.JSONDecodeError as error:
                problem, position = f"not JSON: {error.msg}", error.pos
            except ValueError as error:  # _CannotRead, and integers of too many digits
                problem = str(error).partition(";")[0]
            else:
                calls += 1
                if calls > 1 and "\n" not in self.text[before:start]:
                    self.error(start, "calls of one block stand on lines of their own")
                if calls == 2 and "arguments" in self.keys:
                    self.error(start, 'several calls with "arguments" in one block: each has a block of its own')
                if calls == 1 and self.blocks == 2 and "parameters" in self.keys:
                    self.error(tag, 'several blocks of calls with "parameters": one block holds them all')
                continue
            self.malformed = True
            self.error(min(position, self.end), f"a call cannot be read: {problem}")
            closing = self.text.find(CALL_END, before, self.end)
            return self.end if closing < 0 else closing + len(CALL_END)

    def read_call(self, position: int) -> int:
        """Reads one JSON object as a call; returns the offset behind it. Raises ValueError or RecursionError."""
        value, after = _DECODER.raw_decode(self.text, position)
        if not isinstance(value, dict):
            raise _CannotRead("it is not a JSON object")
        name = value.get("name")
        if not isinstance(name, str) or not name.strip():
            raise _CannotRead('it has no "name" that is a non-empty string')
        given = "arguments" if "arguments" in value else "parameters"
        arguments = value.get(given)
        if not isinstance(arguments, dict) or (given == "arguments" and "parameters" in value):
            raise _CannotRead('it needs one of "arguments" and "parameters", an object')
        _check_value(value)
        if len(value) > 2:
            extra = next(key for key in value if key not in ("name", given))
            self.error(position, f"a call has the extra key {extra[:40]!r}")
        if len(self.keys) == 1 and given not in self.keys:
            self.error(position, 'calls with "arguments" beside calls with "parameters"')
        self.keys.add(given)
        self.calls.append(ToolCall(name, arguments))
        return after
