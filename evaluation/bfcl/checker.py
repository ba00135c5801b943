"""The official BFCL checker behind standard input and output: `python -m evaluation.bfcl.checker`.

One JSON object a line in: {"category", "functions", "answer", "calls"}, where `calls` is what the model called,
[{name: {argument: value}}], empty where nothing could be decoded. One a line out: {"valid", "error_type",
"error"}. The verdict is that of the package's own `ast_checker`, or in the (ir)relevance categories of its
`is_empty_output`, as in its `eval_runner`. Model text is data here as there: nothing of it is evaluated.

It runs in a process of its own (see `evaluation.bfcl.process`), because what it checks is hostile by default
and the package is not ours: an exception is a verdict of "not valid" that says so, memory and files are limited.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import types
from typing import Any

MEMORY_BYTES = 1 << 30
CPU_SECONDS = 3600
LONGEST_ERROR = 500


class _NoModels(dict[str, Any]):
    """The registry of vendor models that the checker asks one thing: are dots in names written as underscores?"""

    def __missing__(self, name: str) -> Any:
        return types.SimpleNamespace(underscore_to_dot=False)


def load_official() -> tuple[Any, Any, Any]:
    """`ast_checker`, `is_function_calling_format_output` and `is_empty_output` of the installed package.

    The package's model registry imports the clients of a dozen vendors; a stand-in takes its place first.
    """
    stand_in = types.ModuleType("bfcl_eval.constants.model_config")
    stand_in.MODEL_CONFIG_MAPPING = _NoModels()  # type: ignore[attr-defined]
    sys.modules[stand_in.__name__] = stand_in
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
    from bfcl_eval.utils import is_empty_output, is_function_calling_format_output

    return ast_checker, is_function_calling_format_output, is_empty_output


def limit_resources() -> None:
    """No file may grow, no core be dumped, memory and processor time are bounded."""
    for what, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


class Checker:
    """The official functions, applied as `eval_runner.ast_file_runner` and `relevance_file_runner` do."""

    def __init__(self) -> None:
        self.ast_checker, self.is_format, self.is_empty = load_official()

    def check(self, job: dict[str, Any]) -> dict[str, Any]:
        category, calls = job["category"], job["calls"]
        if "relevance" in category:
            called = not self.is_empty(calls)
            valid = called != ("irrelevance" in category)
            kind = "irrelevance_error:decoder_success" if called else "relevance_error:decoder_failed"
            return {"valid": valid, "error_type": "" if valid else kind, "error": ""}
        if not self.is_format(calls):
            return {"valid": False, "error_type": "ast_decoder:decoder_wrong_output_format", "error": ""}
        verdict = self.ast_checker(job["functions"], calls, job["answer"], "Python", category, "local")
        error = "" if verdict["valid"] else str(verdict.get("error"))[:LONGEST_ERROR]
        return {
            "valid": bool(verdict["valid"]),
            "error_type": "" if verdict["valid"] else str(verdict.get("error_type", "")),
            "error": error,
        }


def main() -> None:
    """Answers line by line until standard input ends. Whatever the package prints goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    checker = Checker()
    limit_resources()
    for line in sys.stdin:
        try:
            verdict = checker.check(json.loads(line))
        except Exception as error:  # noqa: BLE001 -- the package raises whatever it likes on odd values
            name = type(error).__name__
            verdict = {"valid": False, "error_type": f"checker:{name}", "error": str(error)[:LONGEST_ERROR]}
        answers.write(json.dumps(verdict) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
