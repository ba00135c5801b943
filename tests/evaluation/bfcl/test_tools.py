"""Function documents as tools: worked out by hand, and document by document as the official package makes them."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import pytest

from evaluation.bfcl.data import read_category
from evaluation.bfcl.package import INSTALL
from evaluation.bfcl.tools import tool, tools
from evaluation.bfcl.versions import V3, V4

needs_package = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason=f"needs: {INSTALL}")


def test_types_become_json_schema_at_every_depth() -> None:
    document = {
        "name": "geo.find",
        "description": "Finds.",
        "parameters": {
            "type": "dict",
            "required": ["at"],
            "properties": {
                "at": {"type": "tuple", "items": {"type": "float"}, "description": "Where."},
                "filter": {"type": "dict", "properties": {"type": {"type": "any", "enum": ["a"], "default": "a"}}},
                "rows": {"type": "array", "items": {"type": "array", "items": {"type": "dict"}}},
                "free": {"description": "untyped"},
                "size": {"type": "float", "description": "How large."},
            },
        },
        "response": {"type": "dict"},
    }
    before = copy.deepcopy(document)
    made = tool(document, "Python")
    assert document == before  # the checker gets the original
    assert made.name == "geo.find"  # the dot stays
    assert made.description == (
        "Finds. Note that the provided function is in Python 3 syntax."
        ' The response field has the following schema: {"type": "dict"}'
    )
    assert made.parameters == {
        "type": "object",
        "required": ["at"],
        "properties": {
            "at": {"type": "array", "items": {"type": "number"}, "description": "Where."},
            "filter": {"type": "object", "properties": {"type": {"type": "string", "enum": ["a"], "default": "a"}}},
            "rows": {"type": "array", "items": {"type": "array", "items": {"type": "object"}}},
            "free": {"type": "string", "description": "untyped"},
            "size": {
                "type": "number",
                "format": "float",
                "description": "How large. This is a float type value.",
            },
        },
    }


@pytest.mark.parametrize("language", ["Java", "JavaScript"])
def test_parameters_of_other_languages_are_strings_that_say_their_type(language: Any) -> None:
    listed = {"type": "ArrayList" if language == "Java" else "array", "items": {"type": "String"}, "description": "L."}
    properties = {"any": {"type": "any", "description": "A."}, "list": listed}
    parameters = {"type": "dict", "properties": properties, "required": []}
    made = tool({"name": "f", "description": "F.", "parameters": parameters}, language)
    kind = listed["type"]
    assert made.parameters["properties"] == {
        "any": {
            "type": "string",
            "description": f"A. This parameter can be of any type of {language} object in string representation.",
        },
        "list": {
            "type": "string",
            "description": f"L. This is {language} {kind} type parameter in string representation. "
            "The list elements are of type String; they are not in string representation.",
        },
    }


@needs_package
@pytest.mark.parametrize("category", V3.categories)
def test_every_document_becomes_what_the_official_package_makes_of_it(
    official: Callable[[str], Any], category: str
) -> None:
    """But for dots in names; the style is that of an endpoint whose tools have no field for the response."""
    utils, style = official("model_handler.utils"), official("model_handler.model_style").ModelStyle.NOVITA_AI
    seen: set[str] = set()
    for item in read_category(category):
        for document in (*item.functions, *(held for found in item.held_out.values() for held in found)):
            text = json.dumps(document)
            if text in seen:
                continue
            seen.add(text)
            prepared = utils.func_doc_language_specific_pre_processing([json.loads(text)], category)
            (theirs,) = utils.convert_to_tool(prepared, utils.GORILLA_TO_OPENAPI, style)
            ours = tool(document, item.language)
            assert json.dumps(ours.to_json() | {"function": _dotless(ours.to_json()["function"])}) == json.dumps(theirs)
    assert seen


OFFICIAL_V4 = """
utils, package = official("model_handler.utils"), official("utils")
style, answer = official("constants.enums").ModelStyle.NOVITA_AI, {}
for category in asked:
    answer[category] = []
    rows = package.load_dataset_entry(category, include_prereq=False)
    for row in rows[:: 20 if "involved_classes" in rows[0] else 1]:
        held = [document for found in row.get("missed_function", {}).values() for document in found]
        answer[category].append(utils.convert_to_tool(row["function"] + held, utils.GORILLA_TO_OPENAPI, style))
"""


def test_those_of_version_4_too_without_a_hint_in_documents_held_out(ask_v4: Callable[[str, Any], Any]) -> None:
    """All of one turn; of several, where few classes' functions come again and again, every twentieth item's."""
    for category, theirs in ask_v4(OFFICIAL_V4, V4.categories).items():
        items = read_category(category, V4)
        items = items[:: 20 if items[0].involved_classes else 1]
        assert len(items) == len(theirs)
        for item, listed in zip(items, theirs, strict=True):
            held = [document for found in item.held_out.values() for document in found]
            made = (*tools(item.functions, item.language), *tools(held, item.language, hint=V4.held_out_hint))
            ours = [tool.to_json() for tool in made]
            assert [one | {"function": _dotless(one["function"])} for one in ours] == listed, item.id


def _dotless(function: dict[str, Any]) -> dict[str, Any]:
    return function | {"name": function["name"].replace(".", "_")}
