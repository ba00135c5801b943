"""The data files of the embedded corpus: enough tools, no name twice, sentences of the promised length."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from awpo.embedded import catalogue as module
from awpo.embedded.catalogue import Phrasings, ToolSpec, load_catalogue, slots_of
from awpo.embedded.values import COMPUTED, VALUES, json_type

CATALOGUE = load_catalogue()
SEEN = [tool for tool in CATALOGUE.tools if not tool.unseen]
UNSEEN = [tool for tool in CATALOGUE.tools if tool.unseen]


def parameter_names(tools: list[ToolSpec]) -> set[str]:
    return {name for tool in tools for parameter in tool.parameters.values() for name in parameter.names}


def test_there_are_enough_tools_and_domains() -> None:
    assert len(SEEN) >= 40
    assert len({tool.domain for tool in SEEN}) >= 8
    assert len(UNSEEN) >= 8
    assert len([chain for chain in CATALOGUE.chains if not chain.unseen]) >= 12
    assert len([chain for chain in CATALOGUE.chains if chain.unseen]) >= 2


def test_no_tool_name_is_used_twice() -> None:
    counts = Counter(name for tool in CATALOGUE.tools for name in tool.names)
    assert [name for name, count in counts.items() if count > 1] == []


def test_unseen_tools_share_no_name_description_or_parameter_with_seen_ones() -> None:
    assert parameter_names(UNSEEN) & parameter_names(SEEN) == set()
    seen = {text for tool in SEEN for text in tool.descriptions}
    assert {text for tool in UNSEEN for text in tool.descriptions} & seen == set()


@pytest.mark.parametrize("tool", SEEN, ids=lambda tool: tool.id)
def test_a_seen_tool_has_enough_phrasings(tool: ToolSpec) -> None:
    assert len(tool.requests.known) >= 6
    assert len(tool.requests.held_out) >= 2
    assert set(tool.requests.known).isdisjoint(tool.requests.held_out)
    assert tool.missing, "no request without a value"
    for phrasings in tool.missing.values():
        assert phrasings.known
        assert phrasings.held_out
        assert set(phrasings.known).isdisjoint(phrasings.held_out)


@pytest.mark.parametrize("tool", CATALOGUE.tools, ids=lambda tool: tool.id)
def test_texts_are_short(tool: ToolSpec) -> None:
    for request in tool.requests.known + tool.requests.held_out:
        assert 2 <= len(request.split()) <= 14
    for description in tool.descriptions:
        assert 2 <= len(description.split()) <= 7
    for reply in tool.replies:
        longest = {
            slot: max(len(str(value).split()) for value in VALUES[p.kind]) for slot, p in tool.parameters.items()
        }
        longest |= {key: max(len(str(v).split()) for v in VALUES.get(kind, (0,))) for key, kind in tool.result.items()}
        assert len(reply.split()) + sum(longest[slot] - 1 for slot in slots_of(reply)) <= 10
    assert 1 <= len(tool.parameters) <= 3
    assert 1 <= len(tool.result) <= 2
    assert all(parameter.ask.endswith("?") for parameter in tool.parameters.values())


def test_a_chain_fits_the_types_of_both_tools() -> None:
    for chain in CATALOGUE.chains:
        given, wanted = json_type(chain.first.result[chain.result_key]), chain.second.parameters[chain.slot].type
        assert given == wanted or (given, wanted) == ("integer", "number"), chain


def test_lists_of_values_have_one_type_and_no_value_twice() -> None:
    for kind, values in VALUES.items():
        assert len({type(value) for value in values}) == 1, kind
        assert len(set(values)) == len(values), kind
        assert all(value == value.strip() and "\n" not in value for value in values if isinstance(value, str)), kind


def test_computed_results_are_right() -> None:
    assert COMPUTED["sum"]({"first": 12, "second": 30}) == 42
    assert COMPUTED["product"]({"first": 12, "second": 1.5}) == 18
    assert COMPUTED["product"]({"first": 5, "second": 0.5}) == 2.5
    assert COMPUTED["root"]({"number": 144}) == 12
    assert COMPUTED["length"]({"value": 2, "source": "kilometers", "target": "meters"}) == 2000
    assert COMPUTED["percentage"]({"percent": 5, "whole": 80}) == 4
    assert COMPUTED["quotient"]({"dividend": 36, "divisor": 8}) == 4.5


def test_a_template_with_a_wrong_slot_is_refused() -> None:
    tool = SEEN[0]
    with pytest.raises(ValueError, match="exactly the slots"):
        module._check_tool(replace(tool, requests=Phrasings(("What is the weather in {town}?",))))
    slot = next(iter(tool.missing))
    with pytest.raises(ValueError, match="must lack"):
        module._check_tool(replace(tool, missing={slot: Phrasings((f"Weather in {{{slot}}}",))}))
    with pytest.raises(ValueError, match="neither argument nor result"):
        module._check_tool(replace(tool, replies=("It is {nothing}.",)))
    with pytest.raises(ValueError, match="no list of values"):
        module._check_tool(replace(tool, result={"sky": "nowhere"}, replies=("Done.",)))
