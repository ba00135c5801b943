"""Reference answers, written as a model would, through parser, decoding, execution and the official checkers."""

from __future__ import annotations

import importlib.util

import pytest

from awpo.types import ToolCall
from evaluation.bfcl.averages import LIVE_AST, MULTI_TURN
from evaluation.bfcl.benchmark import gold_verdict
from evaluation.bfcl.data import read_category
from evaluation.bfcl.golds import completion_text, reference_calls, reference_turns
from evaluation.bfcl.package import INSTALL
from evaluation.bfcl.process import CheckerProcess
from evaluation.bfcl.versions import V3, V4

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason=f"needs: {INSTALL}")

# References that fail, and with them every sensible answer: they contradict the document of their own function (another
# name, a parameter it lacks, or that it requires and the reference doesn't know), allow no value at all, or hold
# values that the reader of Java makes of no text (numbers and truths in a list of "any"; a value beside the list of
# those allowed).
CONTRADICTORY = {
    "simple_363": "wrong_func_name",
    "live_simple_106-63-0": "type_error",
    "live_simple_112-68-0": "type_error",
    "live_multiple_862-181-3": "unexpected_param",
    "live_multiple_964-207-0": "missing_required",
    "java_36": "value_error:list/tuple",
    "java_64": "value_error:dict_value",
    "java_65": "value_error:list/tuple",
    "javascript_41": "wrong_func_name",
}


@pytest.mark.parametrize("category", [*V3.non_live_ast, *LIVE_AST])
def test_every_reference_of_one_turn_passes_but_those_that_contradict_themselves(
    checker: CheckerProcess, category: str
) -> None:
    """AU-Harness#31: scalars were never checked."""
    verdicts = {item.id: gold_verdict(checker, item) for item in read_category(category)}
    failed = {name: verdict for name, verdict in verdicts.items() if not verdict.valid}
    assert set(failed) == set(CONTRADICTORY) & set(verdicts)
    for name, verdict in failed.items():
        assert CONTRADICTORY[name] in verdict.error_type


@pytest.mark.parametrize("category", MULTI_TURN)
def test_references_of_several_turns_pass(checker: CheckerProcess, category: str) -> None:
    """A tenth of them; the slow test below has them all."""
    items = read_category(category)[::10]
    assert {item.id: verdict.reason for item in items if not (verdict := gold_verdict(checker, item)).valid} == {}


@pytest.mark.slow
@pytest.mark.parametrize("category", MULTI_TURN)
def test_all_references_of_several_turns_pass(category: str) -> None:
    with CheckerProcess() as checker:
        failed = {
            item.id: verdict.reason
            for item in read_category(category)
            if not (verdict := gold_verdict(checker, item)).valid
        }
        assert failed == {}
        assert checker.failures == 0


def test_every_reference_of_version_4_passes_but_those_that_contradict_themselves(checker_v4: CheckerProcess) -> None:
    """Its data has three of version 3's mended. The reference of web search and memory is the last words."""
    mended = {"simple_363", "javascript_41"}
    known = {name.replace("java_", "simple_java_") for name in set(CONTRADICTORY) - mended}
    failed = {}
    for category in (*V4.ast, *V4.agentic):
        found = {item.id: gold_verdict(checker_v4, item) for item in read_category(category, V4)}
        failed |= {name: verdict.error_type for name, verdict in found.items() if not verdict.valid}
    assert set(failed) == known
    for category in MULTI_TURN:
        items = read_category(category, V4)[::10]
        assert all(gold_verdict(checker_v4, item).valid for item in items)


def test_what_has_no_reference_is_refused() -> None:
    without = {category for category in V3.categories if read_category(category)[0].answer is None}
    assert without == {"irrelevance", "live_irrelevance", "live_relevance"}
    with pytest.raises(ValueError, match="no reference"):
        reference_calls(read_category("irrelevance")[0])


def test_references_become_calls() -> None:
    items = {item.id: item for category in ("java", "javascript", "simple") for item in read_category(category)}
    assert reference_calls(items["java_1"]) == [
        ToolCall(
            "SQLCompletionAnalyzer.makeProposalsFromObject",
            {
                "object": "Customers",
                "useShortName": "true",
                "params": 'new HashMap<String, Object>() {{ put("limit", 50); put("schemaFilter", "public"); }}',
            },
        )
    ]
    (lists,) = reference_calls(items["java_22"])
    assert lists.arguments["ids"] == "new ArrayList<Long>(Arrays.asList(101L, 202L, 303L))"
    assert reference_calls(items["javascript_1"])[0].arguments == {
        "listElement": "listElement"
    }  # the rest may be left out
    assert completion_text(reference_calls(items["simple_0"])) == (
        '<tool_call>\n{"name": "calculate_triangle_area", "arguments": {"base": 10, "height": 5}}\n</tool_call>'
    )


def test_values_without_names_are_matched_to_parameters() -> None:
    item = read_category("multi_turn_base")[0]
    assert item.answer is not None
    assert item.answer[2] == ["sort('final_report.pdf')"]
    assert reference_turns(item)[2] == [ToolCall("sort", {"file_name": "final_report.pdf"})]
