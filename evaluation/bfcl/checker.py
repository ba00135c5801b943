"""The official BFCL checkers behind standard input and output: `python -m evaluation.bfcl.checker`.

One JSON object a line in, one a line out. The first line out tells that the package could be imported, and what this
process has given up, and whose release it is: {"isolation", "release"}. A job is one of

- {"do": "check", "category", "language", "functions", "answer", "calls"}: the verdict on calls of one turn,
  [{name: {argument: value}}], empty where nothing could be decoded;
- {"do": "execute", "conversation", "item", "calls"}: executes steps of calls, as Python text, on the objects of a
  conversation and gives {"results": [text of each call of the last step]}; more steps than one are those that this
  process has not seen;
- {"do": "remember", "conversation", "item", "calls"}: executes steps that this process has not seen, and gives what
  the conversation's memory holds: {"context": what is shown of it to the model, "snapshot": all of it as JSON}; the
  conversation's objects are dropped;
- {"do": "check_conversation", "conversation", "item", "answer", "calls"}: the verdict on all turns, each a list of
  steps of calls; the conversation's objects are dropped;
- {"do": "check_reply", "conversation", "item", "answer", "calls"}: the verdict on the last words of an agentic item,
  which "calls" is here, None where there were none; the conversation's objects are dropped;

where "item" is {"id", "category", "initial_config", "involved_classes"}, and "calls" is JSON within a text. A verdict
is {"valid", "error_type", "error"}. Verdicts are those of the package's `ast_checker`, `is_empty_output`,
`multi_turn_checker` and `agentic_checker`, applied as its `eval_runner` does; results those of its
`execute_multi_turn_func_call`, which evaluates the text of the calls.

Version 4's memories keep what they hold in files between conversations. Files are out of reach here: the snapshot that
a conversation starts from stands in its "initial_config" instead, and the one it leaves is answered to "remember".

It runs in a process of its own (see `evaluation.bfcl.process`), because what it checks is hostile by default and the
package is not ours: an exception is a verdict of "not valid" that says so; `evaluation.bfcl.isolation` has the limits.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import types
from collections.abc import Mapping
from typing import Any

import orjson

from evaluation.bfcl.isolation import isolate

LONGEST_ERROR = 500
NOT_RUN = ("WebSearchAPI", "MemoryAPI_vector")
"""Classes of version 4 that are not imported: they need a network, a key and an encoder's weights."""

_CLASSES = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
_MEMORY_FIELDS = ("core_memory", "archival_memory", "memory")


class _NoModels(dict[str, Any]):
    """The registry of vendor models that the checker asks one thing: are dots in names written as underscores?"""

    def __missing__(self, name: str) -> Any:
        return types.SimpleNamespace(underscore_to_dot=False)


def load_official() -> types.SimpleNamespace:
    """The functions of the installed package that are used here.

    The package's model registry imports the clients of a dozen vendors; a stand-in takes its place first. Classes
    that calls act on are imported at once, before files are out of reach. What only version 4 has is None in version 3.
    """
    stand_in = types.ModuleType("bfcl_eval.constants.model_config")
    stand_in.MODEL_CONFIG_MAPPING = _NoModels()  # type: ignore[attr-defined]
    sys.modules[stand_in.__name__] = stand_in
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker, multi_turn_utils
    from bfcl_eval.utils import is_empty_output, is_function_calling_format_output

    for name, module in multi_turn_utils.CLASS_FILE_PATH_MAPPING.items():
        if name not in NOT_RUN:
            importlib.import_module(module)
    held = vars(multi_turn_utils)
    held["eval"] = functools.partial(_evaluate, held)
    check_reply, languages = None, None
    if importlib.util.find_spec("bfcl_eval.eval_checker.agentic_eval"):  # version 4
        check_reply = importlib.import_module("bfcl_eval.eval_checker.agentic_eval.agentic_checker").agentic_checker
        languages = importlib.import_module("bfcl_eval.constants.enums").Language
        _without_files(importlib.import_module(f"{_CLASSES}.memory_api_metaclass").MemoryAPI)
    return types.SimpleNamespace(
        ast_checker=ast_checker,
        is_format=is_function_calling_format_output,
        is_empty=is_empty_output,
        execute=multi_turn_utils.execute_multi_turn_func_call,
        check_turns=multi_turn_checker.multi_turn_checker,
        check_reply=check_reply,
        languages=languages,
        instances=vars(multi_turn_utils),  # where the executor keeps them, by name
    )


def _evaluate(held: Mapping[str, Any], text: str) -> Any:
    """What a call in `text` gives, in place of the executor's `eval`, to which all of its module would be at hand: the
    objects of conversations are, of all that the module has `held`, and neither modules nor builtins."""
    return eval(text, {"__builtins__": {}, **{name: held[name] for name in held if name.endswith("_instance")}})  # noqa: S307 - of that alone


def _without_files(memory: Any) -> None:
    """Makes the package's memories start from a snapshot in their configuration, not from one in a file."""

    def prepare(self: Any, initial_config: Mapping[str, Any]) -> Any:
        return json.loads(initial_config["snapshot"])

    memory._prepare_snapshot = prepare


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
            case "remember":
                return self.remember(job)
            case "check_conversation":
                return self.check_conversation(job)
            case "check_reply":
                return self.check_reply(job)
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
        languages, language = self.official.languages, job["language"]
        if languages is not None:
            language = languages(language.lower())
        return _verdict(self.official.ast_checker(job["functions"], calls, job["answer"], language, category, "local"))

    def execute(self, job: Mapping[str, Any]) -> dict[str, Any]:
        *earlier, last = job["calls"]
        for calls in earlier:
            self._execute(job, calls)
        results, _ = self._execute(job, last)
        return {"results": list(results)}

    def remember(self, job: Mapping[str, Any]) -> dict[str, Any]:
        for calls in job["calls"]:
            self._execute(job, calls)
        _, involved = self._execute(job, [])
        (memory,) = involved.values()
        held = {name: value for name, value in vars(memory).items() if name in _MEMORY_FIELDS}
        self._forget(f"{job['conversation']}_{job['item']['id']}")
        return {"context": memory._dump_core_memory_to_context(), "snapshot": json.dumps(held)}

    def _execute(self, job: Mapping[str, Any], calls: list[str]) -> tuple[list[str], dict[str, Any]]:
        """Results of a step's calls, and the objects they acted on by class."""
        item = job["item"]
        found: tuple[list[str], dict[str, Any]] = self.official.execute(
            calls,
            item["initial_config"],
            item["involved_classes"],
            job["conversation"],
            item["id"],
            long_context="long_context" in item["category"],
        )
        return found

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

    def check_reply(self, job: Mapping[str, Any]) -> dict[str, Any]:
        self._forget(f"{job['conversation']}_{job['item']['id']}")
        if not job["calls"]:
            return {"valid": False, "error_type": "agentic:no_last_message", "error": ""}
        return _verdict(self.official.check_reply(job["calls"], job["answer"]))

    def _forget(self, name: str) -> None:
        """Drops the objects that the executor keeps under names that begin so, which no other job will have."""
        name = re.sub("[-./:]", "_", name)  # as version 4 names them; those of version 3 have none of these
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
    release = importlib.metadata.version("bfcl-eval")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    answers.write(json.dumps({"isolation": isolate(), "release": release}) + "\n")
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
