"""From a completion to what the checkers take, as the package's handler of Qwen models with native calling does.

There, the blocks `<tool_call>\\n..\\n</tool_call>` behind the last `</think>` are read as JSON, and a block that is no
JSON object makes all calls of the completion void. Here `awpo.chat.parse_completion` reads them. The two differ where a
completion breaks the format; docs/benchmarks.md has the list, and tests/evaluation/bfcl/test_decode.py compares them.
"""

from __future__ import annotations

from typing import Any

from awpo.types import Completion

Calls = list[dict[str, Any]]


def decoded_calls(completion: Completion) -> Calls:
    """The calls as [{name: {argument: value}}]; none where one of them cannot be read."""
    if completion.calls_malformed:
        return []
    return [{call.name: call.arguments} for call in completion.tool_calls]


def executable(calls: Calls) -> list[str]:
    """Calls as the Python text that the executor evaluates, as the package's `convert_to_function_call` writes it."""
    return [
        f"{name}({','.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for call in calls
        for name, arguments in call.items()
    ]


def ends_turn(texts: list[str]) -> bool:
    """Whether a step of a conversation calls nothing, as the package's `is_empty_execute_response` decides."""
    return not texts or texts == [""]
