"""Decoding beside the official handler of Qwen models with native calling: where they agree, and where they don't."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from awpo.chat import parse_completion
from evaluation.bfcl.decode import decoded_calls, ends_turn, executable, without_thought
from evaluation.bfcl.package import INSTALL
from evaluation.bfcl.versions import V4

needs_package = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason=f"needs: {INSTALL}")
pytestmark = needs_package

CALL = '<tool_call>\n{"name": "geo.find", "arguments": {"a": 1.5, "b": ["x", null, true]}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def theirs(official: Callable[[str], Any], text: str) -> list[dict[str, Any]]:
    """What the official handler decodes; an exception is no call, as its runner has it."""
    handler = official("model_handler.local_inference.qwen_fc").QwenFCHandler("model", 0)
    behind = text.split("</think>")[-1].lstrip("\n") if "</think>" in text else text
    try:
        return handler.decode_ast(behind)
    except Exception:  # noqa: BLE001 -- as the runner does
        return []


TEXTS = [
    CALL,
    f"{CALL}\n{OTHER}",
    f"<think>\nshort\n</think>\n\n{CALL}",
    f"<think>\n{OTHER}\n</think>\n\n{CALL}",
    f"Some words.\n{CALL}",
    f"{CALL}\nSome words.",
    "Some words.",
    "",
    f"{CALL}\n<tool_call>\n{{broken\n</tool_call>",
    '<tool_call>\n["no", "object"]\n</tool_call>',
    '<tool_call>\n{"arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "f"}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": "text"}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": {}, "extra": 1}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": {"a": "ünï 😀 \\" \\\\ </b>"}}\n</tool_call>',
]


@pytest.mark.parametrize("text", TEXTS)
def test_both_decode_the_same(official: Callable[[str], Any], text: str) -> None:
    assert decoded_calls(parse_completion(text)) == theirs(official, text)


F = [{"f": {"a": 1}}]


@pytest.mark.parametrize(
    ("text", "ours", "official_calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}', F, []),  # the closing tag is missing
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', F, []),  # no line breaks
        ('<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n</tool_call>', F, []),  # ToolRL's layout
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "f", "arguments": {}}\n</tool_call>',
            [*F, {"f": {}}],
            [],
        ),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 2, "a": 1}}\n</tool_call>', [], F),  # a key twice
        ('<think>\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [], F),  # the thought is open
        ('<tool_call>\n{"name": "f", "arguments": {"a": Infinity}}\n</tool_call>', [], [{"f": {"a": float("inf")}}]),
    ],
)
def test_where_they_differ(
    official: Callable[[str], Any], text: str, ours: list[dict[str, Any]], official_calls: list[dict[str, Any]]
) -> None:
    """The list in docs/benchmarks.md; a change here must be told there."""
    assert decoded_calls(parse_completion(text)) == ours
    assert theirs(official, text) == official_calls


OFFICIAL_V4 = """
handler = official("model_handler.local_inference.qwen_fc").QwenFCHandler("model", 0, "model", True)
answer = []
for text in asked:
    behind = text.split("</think>")[-1].lstrip("\\n") if "</think>" in text else text
    try:
        answer.append(handler.decode_ast(behind, "python", False))
    except Exception:
        answer.append([])
"""


def test_version_4_passes_over_what_is_no_json(ask_v4: Callable[[str, Any], Any]) -> None:
    texts = [*TEXTS, f"{CALL}\n<tool_call>\nno\n</tool_call>\n{OTHER}"]
    ours = [decoded_calls(parse_completion(text), V4) for text in texts]
    assert ours == ask_v4(OFFICIAL_V4, texts)
    assert ours[-1] == [*ours[0], {"f": {}}]
    # Where a block is JSON but no call, the official handler loses the others; here it is passed over, too.
    listed = f'{CALL}\n<tool_call>\n["no", "object"]\n</tool_call>'
    assert (decoded_calls(parse_completion(listed), V4), ask_v4(OFFICIAL_V4, [listed])) == (ours[0], [[]])


@pytest.mark.parametrize("text", ["a", "<think>\nx\n</think>\n\na", "x</think>y</think>\na\n", "\na", "</think>"])
def test_a_thought_is_cut_off_as_the_official_handler_does(text: str) -> None:
    assert without_thought(text) == (text.split("</think>")[-1].lstrip("\n") if "</think>" in text else text)


def test_calls_become_the_text_that_the_official_package_evaluates(official: Callable[[str], Any]) -> None:
    calls = [{"cd": {"folder": 'it\'s "a"\n\\'}}, {"f": {}}, {"g": {"a": 1.0, "b": [True, None, {"c": "ü"}]}}]
    convert = official("model_handler.utils").convert_to_function_call
    assert executable(calls) == convert(calls)
    assert executable(calls)[2] == "g(a=1.0,b=[True, None, {'c': 'ü'}])"


CODE = "__import__('sys').stdout.write('broken into')"


@pytest.mark.parametrize(
    "call",
    [
        {f"[{CODE}] or f": {}},
        {f"f(x={CODE})#": {}},
        {"f": {f"x={CODE},y": 1}},
        {"f": {f"**{{'x': {CODE}}}) #": 1}},
        {"f": {"'code') #": 1}},
        {"f.__globals__.clear": {}},
        {"__import__": {"name": "os"}},
        {"ｅｘｅｃ": {}},  # Python reads it as exec
        {"inspect.os.getpid": {}},
        {"f": {"": 1}},
        {"": {}},
        {"f\n": {}},
    ],
)
def test_a_name_is_no_code(call: dict[str, Any]) -> None:
    """What is evaluated calls a string, and nothing that the model wrote."""
    (text,) = executable([call])
    tree = ast.parse(text, mode="eval").body
    assert isinstance(tree, ast.Call)
    assert isinstance(tree.func, ast.Constant)
    assert not tree.args + tree.keywords


@pytest.mark.parametrize("texts", [[], [""], ["f()"], ["", ""]])
def test_a_turn_ends_as_the_official_package_decides(official: Callable[[str], Any], texts: list[str]) -> None:
    empty = official("eval_checker.multi_turn_eval.multi_turn_utils").is_empty_execute_response
    assert ends_turn(texts) is empty(texts)
