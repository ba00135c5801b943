"""Function documents as tools, as the package prepares them for models with native function calling.

The same steps as the package's pre-processing by language and `convert_to_tool` take, which
tests/evaluation/bfcl/test_tools.py compares document by document:
- a description says the language; in Java and JavaScript every parameter becomes a string whose description names
  its type in that language (the checker reads a value in that language's syntax out of the string);
- types become those of JSON Schema, and a parameter of type float says so.

Names keep their dots, as in the package's handler of local Qwen models with native function calling (which its
checker calls `underscore_to_dot` off). A document's `response`, the schema of what the function returns, is appended
to the description, as the package does for models whose tool format has no such field.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any

from awpo.types import Tool
from evaluation.bfcl.data import Document, Language

_LANGUAGE_HINTS = {
    "Python": " Note that the provided function is in Python 3 syntax.",
    "Java": " Note that the provided function is in Java 8 SDK syntax.",
    "JavaScript": " Note that the provided function is in JavaScript syntax.",
}
_LISTS = ("Array", "ArrayList", "array")

# The package's `GORILLA_TO_OPENAPI`, but for types that stay as they are; a type it doesn't know is a string.
_JSON_TYPES = {
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "tuple": "array",
    "dict": "object",
    **dict.fromkeys(("integer", "number", "string", "boolean", "array", "object")),
}


def tools(documents: Iterable[Document], language: Language, *, hint: bool = True) -> tuple[Tool, ...]:
    """The tools of an item. Raises KeyError for a document without name, description or parameters."""
    return tuple(tool(document, language, hint=hint) for document in documents)


def tool(document: Document, language: Language, *, hint: bool = True) -> Tool:
    """One document as a tool, which is left as it is; `hint` says whether its description names the language."""
    document = copy.deepcopy(document)
    description = document["description"] + (_LANGUAGE_HINTS[language] if hint else "")
    if "response" in document:
        description += f" The response field has the following schema: {json.dumps(document['response'])}"
    parameters = document["parameters"]
    if language != "Python":
        for parameter in parameters["properties"].values():
            _as_text(parameter, language)
    parameters["type"] = "object"
    parameters["properties"] = _properties(parameters["properties"])
    return Tool(document["name"], description, parameters)


def _as_text(parameter: dict[str, Any], language: Language) -> None:
    """Makes a parameter of Java or JavaScript a string that says what it is the text of."""
    declared = parameter["type"]
    if declared == "any":
        hint = f" This parameter can be of any type of {language} object in string representation."
    else:
        hint = f" This is {language} {declared} type parameter in string representation."
    if declared in _LISTS:
        elements = parameter.pop("items")["type"]
        hint += f" The list elements are of type {elements}; they are not in string representation."
    if language == "JavaScript" and declared == "dict" and "properties" in parameter:
        entries = json.dumps(parameter.pop("properties"))
        hint += f" The dictionary entries have the following schema; they are not in string representation. {entries}"
    parameter["description"] += hint
    parameter["type"] = "string"


def _properties(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _schema(parameter, named=True) for name, parameter in properties.items()}


def _schema(document: Mapping[str, Any], *, named: bool = False) -> dict[str, Any]:
    """A parameter's document as JSON Schema, in properties and items of any depth; `named` where it is a property."""
    result = dict(document)
    declared = str(document.get("type", "string"))
    if declared in _JSON_TYPES:
        result["type"] = _JSON_TYPES[declared] or declared
    else:
        result["type"] = "string"
    if named and declared == "float":
        result["format"] = "float"
        result["description"] = document.get("description", "") + " This is a float type value."
    if isinstance(document.get("properties"), Mapping):
        result["properties"] = _properties(document["properties"])
    if isinstance(document.get("items"), Mapping):
        result["items"] = _schema(document["items"])
    return result
