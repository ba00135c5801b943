"""From a completion to what the checkers take, as the package's handler of Qwen models with native calling does.

There, the blocks `<tool_call>\\n..\\n</tool_call>` behind the last `</think>` are read as JSON, and a block that is no
JSON object makes all calls of the completion void. Here `awpo.chat.parse_completion` reads them. The two differ where a
completion breaks the format; docs/benchmarks.md has the list, and tests/evaluation/bfcl/test_decode.py compares them.
"""

from __future__ import annotations

import re
from typing import Any

from awpo.chat import THINK_END
from awpo.types import Completion
from evaluation.bfcl.versions import V3, Version

Calls = list[dict[str, Any]]

_NAME = re.compile(r"[a-z]\w*", re.ASCII | re.IGNORECASE)
_PARAMETER = re.compile(r"[a-z_]\w*", re.ASCII | re.IGNORECASE)


def decoded_calls(completion: Completion, version: Version = V3) -> Calls:
    """The calls as [{name: {argument: value}}]; in version 3 none where one of them cannot be read."""
    if completion.calls_malformed and version.all_calls_or_none:
        return []
    return [{call.name: call.arguments} for call in completion.tool_calls]


def without_thought(text: str) -> str:
    """What stands behind a completion's thought, as the package's handler cuts it."""
    return text.rpartition(THINK_END)[2].lstrip("\n") if THINK_END in text else text


def executable(calls: Calls) -> list[str]:
    """Calls as the Python text that the executor evaluates, as the package's `convert_to_function_call` writes it.

    The package writes names and parameters as they come, so that what a model calls a name is code to the executor.
    Here one that is no name of ASCII letters (private and dotted ones are none: no tool has such a name there), or has
    such a parameter, becomes a text that fails when evaluated and runs nothing: what is left are calls by name with
    literal arguments. Which names there are then is the checkers' process's matter.
    """
    return [
        _text(name, arguments) if _is_plain(name, arguments) else f"{name[:100]!r}()"
        for call in calls
        for name, arguments in call.items()
    ]


def _is_plain(name: str, arguments: dict[str, Any]) -> bool:
    """Whether a call's text would call what it names, and do nothing else."""
    return bool(_NAME.fullmatch(name)) and all(map(_PARAMETER.fullmatch, arguments))


def _text(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({','.join(f'{key}={value!r}' for key, value in arguments.items())})"


def ends_turn(texts: list[str]) -> bool:
    """Whether a step of a conversation calls nothing, as the package's `is_empty_execute_response` decides."""
    return not texts or texts == [""]
