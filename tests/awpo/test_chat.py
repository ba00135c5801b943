"""Rendering against Qwen3's own templates; parsing of everything that a model may write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from awpo.chat import DEEPEST_VALUE, MOST_ERRORS, messages_for_template, parse_completion, render_prompt, render_target
from awpo.types import Completion, Instance, Message, Tool, ToolCall

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
WEATHER = Tool("get_weather", "Weather in a city", {"type": "object", "properties": {"city": {"type": "string"}}})
CLOCK = Tool("clock", "The time", {"type": "object", "properties": {}})
PARIS = ToolCall("get_weather", {"city": "Paris"})
ROME = ToolCall("get_weather", {"city": "Rome"})


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    fast.chat_template = (TEMPLATES / template).read_text("utf-8")
    return fast


QWEN3, INSTRUCT = tokenizer("qwen3.jinja"), tokenizer("qwen3_instruct_2507.jinja")


def instance(*prompt: Message, target: Message | None = None) -> Instance:
    reply = target or Message("assistant", "Hello")
    return Instance("test", "d", 0, 1, "train", (WEATHER, CLOCK), prompt or (Message("user", "Weather?"),), reply)


def call(name: str = "f", key: str = "arguments", **arguments: Any) -> str:
    return json.dumps({"name": name, key: arguments})


def block(*lines: str) -> str:
    return "<tool_call>\n" + "\n".join(lines) + "\n</tool_call>"


TARGETS = [
    Message("assistant", "Sunny in Paris."),
    Message("assistant", None, (PARIS,)),
    Message("assistant", "", (PARIS, ROME)),
    Message("assistant", "I look it up.", (PARIS,)),
    Message("assistant", "\n\nTwo at once.", (PARIS, ROME)),
    Message("assistant", None, (ToolCall("clock", {}),)),
    Message(
        "assistant", None, (ToolCall("f", {"a": 'Grüße "q" \\ \n 早 <&>\'', "n": [1, 2.5, None, True, {"x": []}]}),)
    ),
]
HISTORIES = [
    (Message("user", "Weather?"),),
    (Message("system", "Be kind."), Message("user", "Weather?")),
    (
        Message("user", "Weather?"),
        Message("assistant", None, (PARIS,)),
        Message("tool", '{"c": 20}', name="get_weather"),
    ),
    (
        Message("user", "Weather?"),
        Message("assistant", "In which city?"),
        Message("user", "Paris and Rome"),
        Message("assistant", "I look.", (PARIS, ROME)),
        Message("tool", "20"),
        Message("tool", "25"),
    ),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("thought", ["It fits.", "\nFirst.\n\nThen, <tool_call> is a tag.\n", ""])
@pytest.mark.parametrize("history", HISTORIES)
def test_the_target_is_what_qwen3_renders(target: Message, thought: str, history: tuple[Message, ...]) -> None:
    """What training sees, prompt and target, is the conversation as the template writes it, byte for byte."""
    whole = [*messages_for_template(history), {**target.to_json(), "reasoning_content": thought}]
    expected = QWEN3.apply_chat_template(whole, tools=[WEATHER.to_json(), CLOCK.to_json()], tokenize=False)
    prompt = render_prompt(QWEN3, instance(*history))
    assert prompt + render_target(target, thought) + "<|im_end|>\n" == expected


@pytest.mark.parametrize("target", TARGETS)
def test_without_a_thought_the_target_is_that_of_the_template_without_thinking(target: Message) -> None:
    history = messages_for_template(instance().prompt)
    expected = INSTRUCT.apply_chat_template(
        [*history, target.to_json()], tools=[WEATHER.to_json(), CLOCK.to_json()], tokenize=False
    )
    assert render_prompt(INSTRUCT, instance()) + render_target(target, None) + "<|im_end|>\n" == expected


@pytest.mark.parametrize("fast", [QWEN3, INSTRUCT])
def test_the_prompt_shows_every_tool_and_ends_where_the_assistant_begins(fast: Any) -> None:
    prompt = render_prompt(fast, instance(*HISTORIES[-1]))
    for text in ('"name": "get_weather"', '"name": "clock"', "Paris and Rome", '"city": "Rome"', "25"):
        assert text in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
    assert '\\"city\\"' not in prompt  # arguments are an object, not a string that is encoded once more


def test_thinking_can_be_switched_off() -> None:
    assert render_prompt(QWEN3, instance(), thinking=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "<think>" not in render_prompt(QWEN3, instance())


def test_a_template_never_hears_of_thinking_unless_it_is_switched_off() -> None:
    fast = tokenizer("qwen3.jinja")
    fast.chat_template = "{{ 'given' if enable_thinking is defined else 'not given' }}"
    assert render_prompt(fast, instance()) == "not given"
    assert render_prompt(fast, instance(), thinking=False) == "given"


def test_no_tools() -> None:
    bare = Instance("test", "d", 0, 1, "train", (), (Message("user", "Hi"),), Message("assistant", "Hello"))
    assert render_prompt(QWEN3, bare) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


WELL_FORMED = {
    "reply": ("Hello", Completion(None, (), "Hello")),
    "thought and reply": ("<think>\nt\n</think>\n\nHello", Completion("t", (), "Hello")),
    "empty thought": ("<think>\n\n</think>\n\nHello", Completion("", (), "Hello")),
    "the prompt holds the opening tag": ("t\n</think>\n\nHello", Completion("t", (), "Hello")),
    "call": (block(call(a=1)), Completion(None, (ToolCall("f", {"a": 1}),), "")),
    "calls": (
        f"<think>t</think>{block(call('f'))}\n{block(call('g'))}",
        Completion("t", (ToolCall("f", {}), ToolCall("g", {})), ""),
    ),
    "reply, then call": (f"Wait.\n{block(call())}", Completion(None, (ToolCall("f", {}),), "Wait.")),
    "call, then reply": (f"{block(call())}\nWait.", Completion(None, (ToolCall("f", {}),), "Wait.")),
    "ToolRL, one call": (
        f"<think> t </think>\n{block(call(key='parameters', a=1))}",
        Completion("t", (ToolCall("f", {"a": 1}),), ""),
    ),
    "ToolRL, calls and response": (
        f"<think>t</think>\n{block(call('f', 'parameters'), call('g', 'parameters'))}\n<response> Hi </response>",
        Completion("t", (ToolCall("f", {}), ToolCall("g", {})), "Hi"),
    ),
    "ToolRL, response": ("<think>t</think>\n<response>Hi</response>", Completion("t", (), "Hi")),
    "white space everywhere": (
        f" \n<think> \n t \n </think>\t\n<tool_call> \n\n {call()} \n\n</tool_call>\n\n <|im_end|> \n",
        Completion("t", (ToolCall("f", {}),), ""),
    ),
    "no white space": (f"<tool_call>{call()}</tool_call>", Completion(None, (ToolCall("f", {}),), "")),
    "pretty-printed": (
        block(json.dumps({"name": "f", "arguments": {"a": [1]}}, indent=2)),
        Completion(None, (ToolCall("f", {"a": [1]}),), ""),
    ),
    "end tokens": ("Hello<|im_end|>\n<|endoftext|><|endoftext|>", Completion(None, (), "Hello")),
    "a thought names tags": (
        "<think>No <tool_call> or </think> or <response> is due</think>Hello",
        Completion("No <tool_call> or </think> or <response> is due", (), "Hello"),
    ),
    "an argument names every tag": (
        "<think>t</think>" + block(call(a="</think> <think> </tool_call> <tool_call> <response> <|im_end|>")),
        Completion("t", (ToolCall("f", {"a": "</think> <think> </tool_call> <tool_call> <response> <|im_end|>"}),), ""),
    ),
    "an argument names </think>, no thought": (
        block(call(a="</think>")),
        Completion(None, (ToolCall("f", {"a": "</think>"}),), ""),
    ),
    "a reply names <response>": ("It stands in <response>", Completion(None, (), "It stands in <response>")),
    "a large number": (block(call(a=10**400)), Completion(None, (ToolCall("f", {"a": 10**400}),), "")),
}


@pytest.mark.parametrize("name", WELL_FORMED)
def test_well_formed(name: str) -> None:
    text, expected = WELL_FORMED[name]
    assert parse_completion(text) == expected


LENGTH = len(block(call()))
# name: (text, offset of the first error, a word of its message, what could still be read)
CALL_READ = (ToolCall("f", {}),)
ILL_FORMED: dict[str, tuple[str, int, str, Completion]] = {
    "nothing": ("", 0, "empty", Completion(None, (), "")),
    "white space": (" \n<|im_end|>", 0, "empty", Completion(None, (), "")),
    "only a thought": ("<think>t</think>\n", 16, "nothing after", Completion("t", (), "")),
    "an open thought": ("<think>t", 0, "not closed", Completion("t", (), "")),
    "an open thought with a call": (f"<think>t {block(call())}", 0, "not closed", Completion(f"t {block(call())}", (), "")),
    "two thoughts": ("<think>a</think><think>b</think>c", 16, "second thought", Completion("a</think><think>b", (), "c")),
    "two thoughts apart": ("<think>a</think>b<think>c</think>d", 17, "second thought", Completion("a</think>b<think>c", (), "d")),
    "a thought after the reply": ("a<think>b</think>c", 0, "before the thought", Completion("b", (), "c")),
    "a thought last": (f"{block(call())}<think>t</think>", 0, "before the thought", Completion("t", (), "")),
    "an open thought last": ("Hello<think>t", 5, "<think> out of place", Completion(None, (), "Hello<think>t")),
    "a reply on both sides": (f"a{block(call())}b", 1 + LENGTH, "both sides", Completion(None, CALL_READ, "a\nb")),
    "a reply between calls": (
        f"{block(call())}x{block(call())}", LENGTH, "between", Completion(None, (*CALL_READ, *CALL_READ), "x"),
    ),
    "a stray closing tag": ("a</tool_call>", 1, "</tool_call> out of place", Completion(None, (), "a</tool_call>")),
    "a control token": ("a<|im_end|>\n<|im_start|>user", 1, "<|im_end|> out of place", Completion(None, (), "a<|im_end|>\n<|im_start|>user")),
    "an open call": (f"<tool_call>\n{call()}", 0, "not closed", Completion(None, CALL_READ, "")),
    "an open response": ("<response>a", 0, "not closed", Completion(None, (), "a")),
    "text after the response": ("<response>a</response>b", 22, "after </response>", Completion(None, (), "a")),
    "two responses": ("<response>a</response><response>b</response>", 0, "second response", Completion(None, (), "a</response><response>b")),
    "an empty response": ("<response> </response>", 0, "empty response", Completion(None, (), "")),
    "an extra key": (block('{"name": "f", "arguments": {}, "id": 1}'), 12, "extra key 'id'", Completion(None, CALL_READ, "")),
    "Qwen3's keys in ToolRL's block": (
        block(call(), call()), len("<tool_call>\n" + call() + "\n"), "block of its own", Completion(None, (*CALL_READ, *CALL_READ), ""),
    ),
    "ToolRL's keys in Qwen3's blocks": (
        f"{block(call(key='parameters'))}{block(call(key='parameters'))}", LENGTH + 1, "one block",
        Completion(None, (*CALL_READ, *CALL_READ), ""),
    ),
    "both keys": (
        block(call(key="parameters"), call()), 44, "beside", Completion(None, (*CALL_READ, *CALL_READ), ""),
    ),
    "two calls on a line": (
        block(call(key="parameters") + call(key="parameters")), 43, "lines of their own",
        Completion(None, (*CALL_READ, *CALL_READ), ""),
    ),
    "a lone surrogate": ("a\ud800b", 1, "surrogate", Completion(None, (), "a�b")),
}  # fmt: skip


@pytest.mark.parametrize("name", ILL_FORMED)
def test_ill_formed_but_read(name: str) -> None:
    text, offset, message, expected = ILL_FORMED[name]
    completion = parse_completion(text)
    assert completion.errors
    assert completion.errors[0].startswith(f"character {offset}: ")
    assert message in completion.errors[0]
    assert completion == Completion(expected.thought, expected.tool_calls, expected.content, completion.errors, False)


MALFORMED = {
    "nothing": "",
    "text": "f(a=1)",
    "cut off": '{"name": "f", "arguments": {"a": "x',
    "a trailing comma": '{"name": "f", "arguments": {"a": 1,}}',
    "single quotes": "{'name': 'f', 'arguments': {}}",
    "a raw newline in a string": '{"name": "f", "arguments": {"a": "x\ny"}}',
    "a list": f"[{call()}]",
    "a string": '"f"',
    "a number": "3",
    "null": "null",
    "text behind it": f"{call()} and more",
    "no name": '{"arguments": {}}',
    "an empty name": call(" "),
    "a name that is a number": '{"name": 3, "arguments": {}}',
    "no arguments": '{"name": "f"}',
    "both keys": '{"name": "f", "arguments": {}, "parameters": {}}',
    "arguments in a string": '{"name": "f", "arguments": "{}"}',
    "arguments in a list": '{"name": "f", "arguments": []}',
    "NaN": '{"name": "f", "arguments": {"a": NaN}}',
    "Infinity": '{"name": "f", "arguments": {"a": -Infinity}}',
    "a number out of range": '{"name": "f", "arguments": {"a": 1e999}}',
    "too many digits": f'{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}',
    "a key twice": '{"name": "f", "arguments": {"a": 1, "a": 2}}',
    "the name twice": '{"name": "f", "name": "g", "arguments": {}}',
    "a lone surrogate": '{"name": "f", "arguments": {"a": "\\ud800"}}',
    "a lone surrogate in a key": '{"name": "f", "arguments": {"\\udfff": 1}}',
    "too deep": call(a=0).replace("0", "[" * DEEPEST_VALUE + "]" * DEEPEST_VALUE),
    "far too deep": call(a=0).replace("0", "[" * 50_000 + "]" * 50_000),
    "deep objects": call(a=0).replace("0", '{"a":' * 50_000 + "1" + "}" * 50_000),
    "the tag again": "<tool_call>" + call(),
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("closed", [True, False])
def test_a_call_that_cannot_be_read_is_told_with_its_place(name: str, closed: bool) -> None:
    """vllm#19056: malformed JSON raises inside a parser."""
    before = "<think>t</think>\n<tool_call>"
    completion = parse_completion(before + MALFORMED[name] + ("</tool_call>" if closed else ""))
    assert completion.calls_malformed
    assert completion.thought == "t"
    assert "a call cannot be read: " in completion.errors[0]
    offset = int(completion.errors[0].removeprefix("character ").partition(":")[0])
    assert len(before) <= offset <= len(before + MALFORMED[name])
    assert len(completion.errors[0]) < 200


def test_reading_goes_on_behind_a_call_that_cannot_be_read() -> None:
    completion = parse_completion(f"{block('oops')}\n{block(call())}\nHello")
    assert completion.tool_calls == CALL_READ
    assert completion.content == "Hello"
    assert completion.calls_malformed
    assert len(completion.errors) == 1


def test_a_tag_in_the_argument_of_a_call_before_it_is_not_its_end() -> None:
    completion = parse_completion(block(call(a="</tool_call>"), "oops") + "\nHello")
    assert (completion.tool_calls, completion.content) == ((ToolCall("f", {"a": "</tool_call>"}),), "Hello")


def test_reading_stops_after_too_many_errors() -> None:
    def bad(blocks: int) -> Completion:
        return parse_completion((block("oops") + "\n") * blocks + block(call()))

    assert (bad(MOST_ERRORS - 1).tool_calls, len(bad(MOST_ERRORS - 1).errors)) == (CALL_READ, MOST_ERRORS - 1)
    assert (bad(MOST_ERRORS).tool_calls, len(bad(MOST_ERRORS).errors)) == ((), MOST_ERRORS)
    assert bad(MOST_ERRORS).calls_malformed


HOSTILE = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<think></think>",
    "</think><think>",
    "<response>",
    "</response>",
    "<response></response>",
    "<|im_end|>",
    "<tool_call></tool_call>",
    '<tool_call>{"',
    '<tool_call>["',
    '<tool_call>{"a":</tool_call>',
    "<tool_call>x</tool_call>\n",
    "x<tool_call>[</tool_call>",
    block(call(key="parameters")),
    block(call()) + "x",
    call() + "\n",
    '{"a":',
    "[",
    "\\u",
    '"',
    "\n",
    " ",
    "\ud800",
]


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("start", ["", "<think>", "</think>", "<tool_call>", "<tool_call>\n{", "<response>"])
def test_long_hostile_texts_are_read_in_reasonable_time(piece: str, start: str) -> None:
    """A reader that is quadratic in any of these would need minutes."""
    completion = parse_completion(start + piece * (300_000 // len(piece)))
    assert len(completion.errors) <= MOST_ERRORS


FRAGMENTS = [
    *HOSTILE, '{"name": "f", "arguments": {}}', "name", "arguments", "{", "}", "]", ":", ",", "1", "NaN", "\\ud800", "a", "-", "\x00",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)))
def test_it_never_raises_and_what_it_gives_can_be_stored(text: str) -> None:
    """vllm#19056: malformed JSON raises inside a parser."""
    completion = parse_completion(text)
    for name, arguments in ((call.name, call.arguments) for call in completion.tool_calls):
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode("utf-8")
    (completion.content + (completion.thought or "") + "".join(completion.errors)).encode("utf-8")
    if not completion.errors:
        assert completion.tool_calls or completion.content
    assert not completion.calls_malformed or completion.errors


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda text: "<" not in text)
JSON_TEXT = st.one_of(WORDS, st.sampled_from(["</think>", "</tool_call>", "<think>", '"', "\\", "<|im_end|>"]))
JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), JSON_TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(JSON_TEXT, inner, max_size=4)),
    max_leaves=10,
)
CALLS = st.lists(
    st.builds(ToolCall, WORDS.filter(str.strip), st.dictionaries(JSON_TEXT, JSON_VALUES, max_size=4)), max_size=4
)


@settings(max_examples=300, deadline=None)
@given(thought=st.none() | WORDS, calls=CALLS, content=WORDS)
def test_what_is_rendered_is_read_back(thought: str | None, calls: list[ToolCall], content: str) -> None:
    if not calls and not content.strip():
        content = "Hello"
    text = render_target(Message("assistant", content, tuple(calls)), thought)
    expected = Completion(None if thought is None else thought.strip(), tuple(calls), content.strip())
    assert parse_completion(text) == expected
    assert parse_completion(text + "<|im_end|>\n") == expected


@settings(max_examples=200, deadline=None)
@given(
    thought=st.lists(st.sampled_from(["</think>", "<tool_call>", "</tool_call>", "<response>", "a", "\n"]), max_size=6)
)
def test_a_thought_may_name_tags(thought: list[str]) -> None:
    inner = "".join(["so ", *thought, " so"])
    completion = parse_completion(render_target(Message("assistant", None, (PARIS,)), inner))
    assert completion == Completion(inner, (PARIS,), "")
