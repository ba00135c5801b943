"""The official BFCL checkers behind standard input and output: `python -m evaluation.bfcl.checker`.

One JSON object a line in, one a line out. The first line out tells that the package could be imported, and what this
process has given up: {"isolation"}. A job is one of

- {"do": "check", "category", "language", "functions", "answer", "calls"}: the verdict on calls of one turn,
  [{name: {argument: value}}], empty where nothing could be decoded;
- {"do": "execute", "conversation", "item", "calls"}: executes steps of calls, as Python text, on the objects of a
  conversation and gives {"results": [text of each call of the last step]}; more steps than one are those that this
  process has not seen;
- {"do": "check_conversation", "conversation", "item", "answer", "calls"}: the verdict on all turns, each a list of
  steps of calls; the conversation's objects are dropped;

where "item" is {"id", "category", "initial_config", "involved_classes"}, and "calls" is JSON within a text. A verdict is {"valid", "error_type",
"error"}. Verdicts are those of the package's `ast_checker`, `is_empty_output` and `multi_turn_checker`, applied as its
`eval_runner` does; results those of its `execute_multi_turn_func_call`, which evaluates the text of the calls.

It runs in a process of its own (see `evaluation.bfcl.process`), because what it checks is hostile by default and the
package is not ours: an exception is a verdict of "not valid" that says so; `evaluation.bfcl.isolation` has the limits.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from collections.abc import Mapping
from typing import Any

import orjson

from evaluation.bfcl.isolation import isolate

LONGEST_ERROR = 500


class _NoModels(dict[str, Any]):
    """The registry of vendor models that the checker asks one thing: are dots in names written as underscores?"""

    def __missing__(self, name: str) -> Any:
        return types.SimpleNamespace(underscore_to_dot=False)


def load_official() -> types.SimpleNamespace:
    """The functions of the installed package that are used here.

    The package's model registry imports the clients of a dozen vendors; a stand-in takes its place first. Classes
    that calls act on are imported at once, before files are out of reach.
    """
    stand_in = types.ModuleType("bfcl_eval.constants.model_config")
    stand_in.MODEL_CONFIG_MAPPING = _NoModels()  # type: ignore[attr-defined]
    sys.modules[stand_in.__name__] = stand_in
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker, multi_turn_utils
    from bfcl_eval.utils import is_empty_output, is_function_calling_format_output

    for module in multi_turn_utils.CLASS_FILE_PATH_MAPPING.values():
        importlib.import_module(module)
    return types.SimpleNamespace(
        ast_checker=ast_checker,
        is_format=is_function_calling_format_output,
        is_empty=is_empty_output,
        execute=multi_turn_utils.execute_multi_turn_func_call,
        check_turns=multi_turn_checker.multi_turn_checker,
        instances=vars(multi_turn_utils),  # where the executor keeps them, by name
    )


class Checker:
    """The official functions, applied as in `ast_file_runner`, `relevance_file_runner` and `multi_turn_runner`."""

    def __init__(self) -> None:
        self.official = load_official()
        self.checks = 0

    def do(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one job. Raises whatever the package does."""
        match job["do"]:
            case "execute":
                return self.execute(job)
            case "check_conversation":
                return self.check_conversation(job)
        return self.check(job)

    def check(self, job: Mapping[str, Any]) -> dict[str, Any]:
        category, calls = job["category"], job["calls"]
        if "relevance" in category:
            called = not self.official.is_empty(calls)
            valid = called != ("irrelevance" in category)
            kind = "irrelevance_error:decoder_success" if called else "relevance_error:decoder_failed"
            return {"valid": valid, "error_type": "" if valid else kind, "error": ""}
        if not self.official.is_format(calls):
            return {"valid": False, "error_type": "ast_decoder:decoder_wrong_output_format", "error": ""}
        return _verdict(
            self.official.ast_checker(job["functions"], calls, job["answer"], job["language"], category, "local")
        )

    def execute(self, job: Mapping[str, Any]) -> dict[str, Any]:
        *earlier, last = job["calls"]
        for calls in earlier:
            self._execute(job, calls)
        return {"results": self._execute(job, last)}

    def _execute(self, job: Mapping[str, Any], calls: list[str]) -> list[str]:
        item = job["item"]
        results, _ = self.official.execute(
            calls,
            item["initial_config"],
            item["involved_classes"],
            job["conversation"],
            item["id"],
            long_context="long_context" in item["category"],
        )
        return list(results)

    def check_conversation(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Executes all turns anew beside the reference's, and compares states and results turn by turn."""
        item, turns, answer = job["item"], job["calls"], job["answer"]
        self._forget(f"{job['conversation']}_{item['id']}")
        if len(turns) != len(answer):
            error = f"{len(turns)} of {len(answer)} turns"
            return {"valid": False, "error_type": "multi_turn:force_terminated", "error": error}
        self.checks += 1
        name = f"check{self.checks}"
        try:
            return _verdict(self.official.check_turns(turns, answer, item, item["category"], name))
        finally:
            self._forget(name)

    def _forget(self, name: str) -> None:
        """Drops the objects that the executor keeps under names that begin so, which no other job will have."""
        for key in [key for key in self.official.instances if key.startswith(f"{name}_")]:
            del self.official.instances[key]


def _verdict(official: Mapping[str, Any]) -> dict[str, Any]:
    if official["valid"]:
        return {"valid": True, "error_type": "", "error": ""}
    error = str(official.get("error", official.get("error_message", "")))[:LONGEST_ERROR]
    return {"valid": False, "error_type": str(official.get("error_type", "")), "error": error}


def main() -> None:
    """Answers line by line until standard input ends. What the package or a model's text prints goes nowhere."""
    jobs = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    checker = Checker()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    answers.write(json.dumps({"isolation": isolate()}) + "\n")
    answers.flush()
    for line in jobs:
        try:
            job = orjson.loads(line)
            answer = checker.do(job | {"calls": json.loads(job["calls"])})
        except Exception as error:  # noqa: BLE001 -- the package raises whatever it likes on odd values
            name = type(error).__name__
            answer = {"valid": False, "error_type": f"checker:{name}", "error": str(error)[:LONGEST_ERROR]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
