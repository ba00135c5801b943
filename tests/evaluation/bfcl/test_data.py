"""BFCL's documents as tools, and the choice of items."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import pytest

from awpo.errors import UserError
from evaluation.bfcl import data

needs_package = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason=f"needs: {data.INSTALL}")
JSON_TYPES = {"object", "array", "string", "integer", "number", "boolean"}


def test_types_become_json_schema_at_every_depth_and_nothing_else_changes() -> None:
    document = {
        "name": "geo.find",
        "description": "Finds",
        "parameters": {
            "type": "dict",
            "required": ["at"],
            "properties": {
                "at": {"type": "tuple", "items": {"type": "float"}, "description": "Where"},
                "filter": {"type": "dict", "properties": {"type": {"type": "any", "enum": ["a"], "default": "a"}}},
                "rows": {"type": "array", "items": {"type": "array", "items": {"type": "dict"}}},
                "free": {"description": "untyped"},
            },
        },
    }
    tool = data.tool(document)
    assert tool.name == "geo.find"  # the dot stays
    assert tool.parameters == {
        "type": "object",
        "required": ["at"],
        "properties": {
            "at": {"type": "array", "items": {"type": "number"}, "description": "Where"},
            "filter": {"type": "object", "properties": {"type": {"type": "string", "enum": ["a"], "default": "a"}}},
            "rows": {"type": "array", "items": {"type": "array", "items": {"type": "object"}}},
            "free": {"type": "string", "description": "untyped"},
        },
    }
    assert document["parameters"]["type"] == "dict"  # the checker gets the original


def schema_types(schema: dict[str, Any]) -> set[str]:
    found = {schema["type"]}
    for inner in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
        found |= schema_types(inner)
    return found


@needs_package
@pytest.mark.parametrize("category", data.CATEGORIES)
def test_every_item_of_a_category_is_an_instance_with_json_schema_tools(category: str) -> None:
    items = data.read_category(category)
    assert len({item.id for item in items}) == len(items) > 0
    for item in items:
        assert (item.answer is None) == ("relevance" in category)
        instance = item.instance()
        assert instance.prompt[-1].role == "user"
        assert [tool.name for tool in instance.tools] == [function["name"] for function in item.functions]
        for tool in instance.tools:
            assert schema_types(tool.parameters) <= JSON_TYPES


@needs_package
def test_sizes_are_those_of_the_leaderboard() -> None:
    sizes = {category: len(data.read_category(category)) for category in data.CATEGORIES}
    assert sum(sizes.values()) == 3491
    assert sizes["simple"] == 400
    assert sizes["live_multiple"] == 1053


@needs_package
def test_the_choice_is_seeded_and_grows_at_its_end() -> None:
    items = data.read_category("multiple")
    assert data.choose(items, 5, 0) == data.choose(items[::-1], 9, 0)[:5]
    assert data.choose(items, 5, 0) != data.choose(items, 5, 1)
    assert len(data.choose(items, 10_000, 0)) == len(items)


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
