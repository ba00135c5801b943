"""The official checker in its process: reference answers pass, wrong ones fail, hostile ones do no harm."""

from __future__ import annotations

import copy
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from awpo.errors import UserError
from evaluation.bfcl.averages import LIVE_AST
from evaluation.bfcl.data import BfclItem, read_category
from evaluation.bfcl.golds import reference_calls
from evaluation.bfcl.package import INSTALL
from evaluation.bfcl.process import CheckerProcess, Verdict
from evaluation.bfcl.versions import V3

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason=f"needs: {INSTALL}")

Calls = list[dict[str, Any]]
AST = (*V3.non_live_ast, *LIVE_AST)
MODEL = "Qwen_Qwen3-0.6B-FC"


def check(checker: CheckerProcess, item: BfclItem, calls: Calls) -> Verdict:
    (verdict,) = checker.check([(item, calls)])
    return verdict


def reference(item: BfclItem) -> Calls:
    return [{call.name: call.arguments} for call in reference_calls(item)]


def other_name(calls: Calls) -> Calls:
    (name, arguments), *_ = calls[0].items()
    return [{name + "_": arguments}, *calls[1:]]


def extra_argument(calls: Calls) -> Calls:
    (name, arguments), *_ = calls[0].items()
    return [{name: arguments | {"no_such_parameter": 1}}, *calls[1:]]


def missing_arguments(calls: Calls) -> Calls:
    return [{name: {} for name in call} for call in calls]


def other_scalars(calls: Calls) -> Calls:
    """Every value replaced by another of its own type, so that only a check of values can tell."""

    def other(value: Any) -> Any:
        match value:
            case bool():
                return not value
            case int() | float():
                return value + 987654
            case str():
                return "otherwise " + value
            case list():
                return [other(inner) for inner in value] or ["otherwise"]
            case dict():
                return {key: other(inner) for key, inner in value.items()}
        return value

    return [{name: other(arguments) for name, arguments in call.items()} for call in calls]


def other_types(calls: Calls) -> Calls:
    """Every value wrapped in an object."""
    return [{name: {key: {"value": value} for key, value in args.items()} for name, args in c.items()} for c in calls]


def one_more(calls: Calls) -> Calls:
    return [*calls, copy.deepcopy(calls[0])]


def one_less(calls: Calls) -> Calls:
    return calls[1:]


WRONG = (other_name, extra_argument, missing_arguments, other_scalars, other_types, one_more, one_less)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
@pytest.mark.parametrize("category", AST)
def test_wrong_answers_fail(checker: CheckerProcess, category: str, wrong: Callable[[Calls], Calls]) -> None:
    """AU-Harness#31: scalars were never checked."""
    passed, tried = set(), 0
    for item in read_category(category)[:60]:
        calls = reference(item)
        if wrong(copy.deepcopy(calls)) != calls:  # a call without arguments has none to get wrong
            tried += 1
            if check(checker, item, wrong(calls)).valid:
                passed.add(item.id)
    assert tried >= min(15, len(read_category(category)))
    assert passed == set()


def test_known_mistakes_have_the_official_error_types(checker: CheckerProcess) -> None:
    def kind(item: BfclItem, calls: Calls) -> str:
        verdict = check(checker, item, calls)
        assert not verdict.valid
        assert verdict.error
        return verdict.error_type

    items = {item.id: item for item in (*read_category("simple"), *read_category("multiple"))}
    triangle = items["simple_0"]
    name = "calculate_triangle_area"
    right = {"base": 10, "height": 5}
    assert check(checker, triangle, [{name: right}]).valid
    assert kind(triangle, [{name: {"base": 10}}]) == "simple_function_checker:missing_required"
    assert kind(triangle, [{name: right | {"depth": 1}}]) == "simple_function_checker:unexpected_param"
    assert kind(triangle, [{name: right | {"base": "10"}}]) == "type_error:simple"
    assert kind(triangle, [{name: right | {"base": 11}}]) == "value_error:others"
    assert kind(triangle, [{name: right}, {name: right}]) == "simple_function_checker:wrong_count"
    assert kind(triangle, [{"area": right}]) == "simple_function_checker:wrong_func_name"
    assert kind(triangle, []) == "simple_function_checker:wrong_count"


def with_list_of(kind: str) -> BfclItem:
    """The first item whose function takes a list of this type with several values."""
    for item in read_category("simple"):
        properties = item.functions[0]["parameters"]["properties"]
        (arguments,) = (item.answer or [{}])[0].values()
        for name, options in arguments.items():
            listed = properties[name]["type"] == "array" and properties[name]["items"]["type"] == kind
            if listed and isinstance(options[0], list) and len(set(options[0])) > 1:
                return item
    raise AssertionError(kind)


def test_a_whole_number_in_a_list_of_floats_is_a_type_error(checker: CheckerProcess) -> None:
    """The checker takes a whole number for a float, but not within a list."""
    item = with_list_of("float")
    ((name, arguments),) = reference(item)[0].items()
    key = next(key for key, value in arguments.items() if isinstance(value, list))
    assert check(checker, item, [{name: arguments}]).valid
    whole = [round(value) for value in arguments[key]]
    verdict = check(checker, item, [{name: arguments | {key: whole}}])
    assert (verdict.valid, verdict.error_type) == (False, "type_error:nested")


def test_the_order_within_a_list_counts(checker: CheckerProcess) -> None:
    item = with_list_of("integer")
    ((name, arguments),) = reference(item)[0].items()
    key = next(key for key, value in arguments.items() if isinstance(value, list))
    verdict = check(checker, item, [{name: arguments | {key: arguments[key][::-1]}}])
    assert (verdict.valid, verdict.error_type) == (False, "value_error:list/tuple")


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
@pytest.mark.parametrize("category", AST)
def test_verdicts_are_those_of_the_official_function(
    checker: CheckerProcess, official: Callable[[str], Any], category: str, wrong: Callable[[Calls], Calls]
) -> None:
    """Called here, in this process, on the same calls: validity, error type and message (AU-Harness#31)."""
    their_check = official("eval_checker.ast_eval.ast_checker").ast_checker
    for item in read_category(category)[:25]:
        calls = wrong(reference(item))
        theirs = their_check(copy.deepcopy(list(item.functions)), calls, item.answer, item.language, category, MODEL)
        ours = check(checker, item, calls)
        assert (ours.valid, ours.error_type) == (theirs["valid"], "" if theirs["valid"] else theirs["error_type"])
        assert ours.error == ("" if theirs["valid"] else str(theirs["error"])[:500])


@pytest.mark.parametrize(
    ("category", "called"), [("irrelevance", False), ("live_irrelevance", False), ("live_relevance", True)]
)
def test_relevance_is_whether_a_call_was_decoded(checker: CheckerProcess, category: str, called: bool) -> None:
    for item in read_category(category)[:20]:
        name = item.functions[0]["name"] if item.functions else "anything"
        assert check(checker, item, [{name: {}}]).valid is called
        assert check(checker, item, []).valid is not called


def test_order_does_not_matter_in_parallel_but_number_does(checker: CheckerProcess) -> None:
    item = read_category("parallel_multiple")[0]
    calls = reference(item)
    assert check(checker, item, calls[::-1]).valid
    assert not check(checker, item, calls + calls).valid


@pytest.fixture
def item() -> BfclItem:
    return read_category("simple")[0]


@pytest.mark.parametrize(
    "calls",
    [
        [{"calculate_triangle_area": {"base": [[]] * 50_000, "height": 5}}],
        [{"calculate_triangle_area": {"base": 10, "height": "9" * 1_000_000}}],
        [{"calculate_triangle_area": {"__class__": {"__init__": {}}, "base": 10, "height": 5}}],
        [{"calculate_triangle_area": {"base": "__import__('os').system('touch pwned')", "height": 5}}],
        [{"": {}}],
        [{"calculate_triangle_area": {}}] * 1000,
    ],
)
def test_odd_answers_are_wrong_and_harm_nothing(checker: CheckerProcess, item: BfclItem, calls: Calls) -> None:
    assert not check(checker, item, calls).valid
    assert check(checker, item, reference(item)).valid
    assert list(Path(checker._folder.name).rglob("pwned")) == []


def test_an_exception_of_the_checker_is_a_counted_wrong_answer(checker: CheckerProcess) -> None:
    """An unhashable or foreign value in an object makes the official code raise; here, a document without types."""
    before = checker.failures
    broken = BfclItem("x", "simple", (), ({"name": "f", "parameters": {}},), [{"f": {"a": [1]}}])
    verdict = check(checker, broken, [{"f": {"a": 1}}])
    assert (verdict.valid, verdict.error_type) == (False, "checker:KeyError")
    assert checker.failures == before + 1


def test_the_process_sees_no_secret_and_cannot_write_files(item: BfclItem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-do-not-leak")
    with CheckerProcess() as checker:
        _sees_no_secret(checker, item)


def _sees_no_secret(checker: CheckerProcess, item: BfclItem) -> None:
    check(checker, item, [])
    assert checker._process is not None
    environment = Path(f"/proc/{checker._process.pid}/environ").read_text()
    assert "sk-do-not-leak" not in environment
    assert "HOME=" + checker._folder.name in environment
    limits = Path(f"/proc/{checker._process.pid}/limits").read_text().splitlines()
    by_name = {line[:25].strip(): line[25:].split()[0] for line in limits[1:]}
    assert by_name["Max file size"] == "0"
    assert int(by_name["Max address space"]) <= 1 << 30


@pytest.mark.parametrize("size", [1, 1_000_000])  # the second fills the pipe
def test_a_silent_checker_is_ended_and_replaced(item: BfclItem, size: int) -> None:
    with CheckerProcess(item_seconds=0.2) as checker:
        check(checker, item, [])
        assert checker._process is not None
        stopped = checker._process.pid
        os.kill(stopped, signal.SIGSTOP)
        calls = [{"calculate_triangle_area": {"base": "9" * size}}]
        assert check(checker, item, calls).error_type == "checker:time_limit"
        assert check(checker, item, reference(item)).valid
        assert checker._process.pid != stopped
        assert checker.failures == 1


def test_a_dead_checker_is_replaced(checker: CheckerProcess, item: BfclItem) -> None:
    check(checker, item, [])
    assert checker._process is not None
    checker._process.kill()
    checker._process.wait()
    assert check(checker, item, reference(item)).error_type == "checker:ended"
    assert check(checker, item, reference(item)).valid


def test_the_process_ends_with_its_owner(item: BfclItem) -> None:
    with CheckerProcess() as checker:
        check(checker, item, [])
        running = checker._process
        assert running is not None
    assert running.poll() is not None
    assert not Path(checker._folder.name).exists()


def test_a_checker_that_cannot_start_is_a_user_error(item: BfclItem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with CheckerProcess() as checker, pytest.raises(UserError, match="cannot be started"):
        check(checker, item, [])
