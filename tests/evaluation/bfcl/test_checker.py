"""The official checker in its process: reference answers pass, wrong ones fail, hostile ones do no harm."""

from __future__ import annotations

import copy
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from awpo.errors import UserError
from evaluation.bfcl import process
from evaluation.bfcl.data import CATEGORIES, INSTALL, LIVE_AST, NON_LIVE_AST, BfclItem, read_category
from evaluation.bfcl.process import CheckerProcess

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason=f"needs: {INSTALL}")

Calls = list[dict[str, Any]]
AST = (*NON_LIVE_AST, *LIVE_AST)


@pytest.fixture
def checker() -> Iterator[CheckerProcess]:
    with CheckerProcess() as running:
        yield running


def acceptable(options: list[Any]) -> Any:
    """The first acceptable value of a parameter. An object, alone or in a list, holds lists of options in turn."""
    value = next((option for option in options if option != ""), "")
    if isinstance(value, list):
        return [chosen(inner) if isinstance(inner, dict) else inner for inner in value]
    return chosen(value) if isinstance(value, dict) else value


def chosen(options: dict[str, list[Any]]) -> dict[str, Any]:
    return {key: next(value for value in values if value != "") for key, values in options.items() if "" not in values}


def reference_calls(item: BfclItem) -> Calls:
    """The calls of the reference, without the arguments that it lets one leave out."""
    assert item.answer is not None
    required = {function["name"]: function["parameters"]["required"] for function in item.functions}
    return [
        {
            name: {
                key: acceptable(options)
                for key, options in arguments.items()
                if "" not in options or key in required[name]
            }
        }
        for call in item.answer
        for name, arguments in call.items()
    ]


# References that contradict the document of their own function (another name, a parameter it lacks or that it
# requires and the reference doesn't know) or allow no value at all: no answer to these passes, whoever gives it.
CONTRADICTORY = {
    "simple_363",
    "live_simple_106-63-0",
    "live_simple_112-68-0",
    "live_multiple_862-181-3",
    "live_multiple_964-207-0",
}


@pytest.mark.parametrize("category", AST)
def test_every_reference_answer_passes(checker: CheckerProcess, category: str) -> None:
    items = read_category(category)
    failed = {item.id for item in items if not checker.check(item, reference_calls(item))["valid"]}
    assert failed == CONTRADICTORY & {item.id for item in items}
    assert checker.failures == 0


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
                return value + " otherwise"
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
    passed, tried = set(), 0
    for item in read_category(category)[:60]:
        calls = reference_calls(item)
        if wrong(copy.deepcopy(calls)) != calls:  # a call without arguments has none to get wrong
            tried += 1
            if checker.check(item, wrong(calls))["valid"]:
                passed.add(item.id)
    assert tried >= min(15, len(read_category(category)))
    assert passed == set()


@pytest.mark.parametrize(
    ("category", "called"), [("irrelevance", False), ("live_irrelevance", False), ("live_relevance", True)]
)
def test_relevance_is_whether_a_call_was_decoded(checker: CheckerProcess, category: str, called: bool) -> None:
    for item in read_category(category)[:20]:
        name = item.functions[0]["name"] if item.functions else "anything"
        assert checker.check(item, [{name: {}}])["valid"] is called
        assert checker.check(item, [])["valid"] is not called


def test_order_does_not_matter_in_parallel_but_number_does(checker: CheckerProcess) -> None:
    item = read_category("parallel_multiple")[0]
    calls = reference_calls(item)
    assert checker.check(item, calls[::-1])["valid"]
    assert not checker.check(item, calls + calls)["valid"]


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
    assert not checker.check(item, calls)["valid"]
    assert checker.check(item, reference_calls(item))["valid"]
    assert list(Path(checker._folder.name).rglob("pwned")) == []


def test_an_exception_of_the_checker_is_a_counted_wrong_answer(checker: CheckerProcess) -> None:
    """An unhashable or foreign value in an object makes the official code raise; here, a document without types."""
    broken = BfclItem("x", "simple", (), ({"name": "f", "parameters": {}},), [{"f": {"a": [1]}}])
    verdict = checker.check(broken, [{"f": {"a": 1}}])
    assert (verdict["valid"], verdict["error_type"]) == (False, "checker:KeyError")
    assert checker.failures == 1


def test_the_process_sees_no_secret_and_cannot_write_files(
    checker: CheckerProcess, item: BfclItem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-do-not-leak")
    checker.check(item, [])
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
        checker.check(item, [])
        assert checker._process is not None
        stopped = checker._process.pid
        os.kill(stopped, signal.SIGSTOP)
        calls = [{"calculate_triangle_area": {"base": "9" * size}}]
        assert checker.check(item, calls)["error_type"] == "checker:time_limit"
        assert checker.check(item, reference_calls(item))["valid"]
        assert checker._process.pid != stopped
        assert checker.failures == 1


def test_a_dead_checker_is_replaced(checker: CheckerProcess, item: BfclItem) -> None:
    checker.check(item, [])
    assert checker._process is not None
    checker._process.kill()
    checker._process.wait()
    assert checker.check(item, reference_calls(item))["error_type"] == "checker:ended"
    assert checker.check(item, reference_calls(item))["valid"]


def test_the_process_ends_with_its_owner(item: BfclItem) -> None:
    with CheckerProcess() as checker:
        checker.check(item, [])
        running = checker._process
        assert running is not None
    assert running.poll() is not None
    assert not Path(checker._folder.name).exists()


def test_a_checker_that_cannot_start_is_a_user_error(item: BfclItem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.sys, "executable", "/bin/false")
    with CheckerProcess() as checker, pytest.raises(UserError, match="cannot be started"):
        checker.check(item, [])


def test_all_categories_are_covered_here() -> None:
    assert set(AST) | {"irrelevance", "live_irrelevance", "live_relevance"} == set(CATEGORIES)
