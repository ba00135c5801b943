"""BFCL's items as our nouns, and the choice of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

from awpo.errors import UserError
from evaluation.bfcl import data, package
from evaluation.bfcl.averages import MULTI_TURN
from evaluation.bfcl.versions import V3, V4

needs_package = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason=f"needs: {package.INSTALL}")


@needs_package
def test_sizes_are_those_of_the_leaderboard() -> None:
    sizes = {category: len(data.read_category(category)) for category in V3.categories}
    assert len(sizes) == 17
    assert sum(sizes.values()) == 4441
    assert (sizes["simple"], sizes["java"], sizes["javascript"]) == (400, 100, 50)
    assert sizes["live_multiple"] == 1053
    assert {sizes[category] for category in MULTI_TURN} == {200}


@needs_package
@pytest.mark.parametrize("category", V3.single_turn)
def test_items_of_one_turn(category: str) -> None:
    items = data.read_category(category)
    assert len({item.id for item in items}) == len(items) > 0
    for item in items:
        assert (item.answer is None) == ("relevance" in category)
        assert item.kind == ("reply" if "irrelevance" in category else "call")
        (messages,) = item.turns
        assert messages[-1].role == "user"
        assert not item.held_out
        assert not item.multi_turn


@needs_package
@pytest.mark.parametrize("category", MULTI_TURN)
def test_items_of_several_turns_have_the_functions_of_their_classes(category: str) -> None:
    for item in data.read_category(category):
        assert item.multi_turn
        assert item.answer is not None
        # One item has a turn less than its reference: no model can pass it.
        assert len(item.turns) == len(item.answer) - (item.id == "multi_turn_base_154")
        names = [document["name"] for document in item.functions]
        assert len(set(names)) == len(names) > 0
        assert ("GorillaFileSystem" in item.involved_classes) == ("grep" in _all_names(item))
        for turn, messages in enumerate(item.turns):
            assert [message.role for message in messages] == ([] if turn in item.held_out else ["user"])


@needs_package
def test_held_out_functions_are_kept_back_until_their_turn() -> None:
    items = {item.id: item for item in data.read_category("multi_turn_miss_func")}
    assert all(len(item.held_out) == 1 for item in items.values())
    item = items["multi_turn_miss_func_3"]
    assert {turn: [document["name"] for document in found] for turn, found in item.held_out.items()} == {
        1: ["find", "ls"]
    }
    shown = {document["name"] for document in item.functions}
    assert "find" not in shown
    assert "cat" in shown
    whole = next(twin for twin in data.read_category("multi_turn_base") if twin.id == "multi_turn_base_3")
    assert {document["name"] for document in whole.functions} == shown | {"find", "ls"}


def _all_names(item: data.BfclItem) -> set[str]:
    held = [document for found in item.held_out.values() for document in found]
    return {document["name"] for document in (*item.functions, *held)}


@needs_package
def test_languages() -> None:
    assert {category: data.language(category) for category in ("simple", "live_simple", "multi_turn_base")} == (
        dict.fromkeys(("simple", "live_simple", "multi_turn_base"), "Python")
    )
    assert (data.language("java"), data.language("javascript")) == ("Java", "JavaScript")


@needs_package
def test_the_choice_is_seeded_and_grows_at_its_end() -> None:
    items = data.read_category("multiple")
    assert data.choose(items, 5, 0) == data.choose(items[::-1], 9, 0)[:5]
    assert data.choose(items, 5, 0) != data.choose(items, 5, 1)
    assert len(data.choose(items, 10_000, 0)) == len(data.choose(items, None, 0)) == len(items)


@pytest.mark.parametrize("version", [None, "2025.10.1"])
def test_a_missing_or_other_package_is_told_with_the_install_line(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    with pytest.raises(UserError, match=r"pip install --no-deps bfcl-eval==2025\.8\.6\.2"):
        data.read_category("simple")


@pytest.mark.usefixtures("v4")
def test_sizes_of_version_4() -> None:
    sizes = {category: len(data.read_category(category, V4)) for category in V4.categories}
    assert len(sizes) == 22
    assert sum(sizes.values()) == 5106
    assert (sizes["simple_python"], sizes["simple_java"], sizes["live_relevance"]) == (400, 100, 16)
    assert {sizes[category] for category in ("memory_kv", "memory_vector", "memory_rec_sum")} == {155}
    assert sizes["web_search_base"] == sizes["web_search_no_snippet"] == 100
    languages = [data.language(name) for name in V4.non_live_ast[:3]]
    assert languages == ["Python", "Java", "JavaScript"]


@pytest.mark.usefixtures("v4")
@pytest.mark.parametrize("category", V4.agentic)
def test_agentic_items_ask_for_an_answer_in_a_form(category: str) -> None:
    items = data.read_category(category, V4)
    assert len({item.id for item in items}) == len(items)
    for item in items:
        assert item.agentic
        assert not item.multi_turn
        assert item.id.startswith(f"{category}_")
        ((system, user),) = item.turns
        assert (system.role, user.role) == ("system", "user")
        assert "'answer'" in system.content
        assert item.answer
        assert item.functions


@pytest.mark.usefixtures("v4")
def test_every_scenario_has_conversations_that_fill_its_memory() -> None:
    scenarios = {item.scenario for item in data.read_category("memory_kv", V4)}
    lengths = {name: len(data.read_sessions("memory_kv", name, V4)) for name in scenarios}
    assert lengths == {"student": 10, "customer": 10, "finance": 7, "healthcare": 5, "notetaker": 5}
    first = data.read_sessions("memory_kv", "finance", V4)[0]
    assert first.involved_classes == ("MemoryAPI_kv",)
    assert all(turn[0].role == "user" for turn in first.turns)
