"""The reference answers of BFCL as what a model would have to write.

A reference names accepted values; the first is taken, and a parameter that may be left out is left out. In Java and
JavaScript every argument is a string that holds the value in that language's syntax, as the tools ask for.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from awpo.chat import render_target
from awpo.types import Message, ToolCall
from evaluation.bfcl.data import BfclItem, Document, Language

# What a list's element type is called in Java; any other keeps its name.
_JAVA_ELEMENTS = {"integer": "int", "any": "Object"}
_JAVA_BOXES = {"integer": "Integer", "long": "Long", "any": "Object"}


def completion_text(calls: Sequence[ToolCall]) -> str:
    """The text of a completion that makes these calls, in the layout of Qwen3's template."""
    return render_target(Message("assistant", "", tool_calls=tuple(calls)), None)


def reference_calls(item: BfclItem) -> list[ToolCall]:
    """The calls of a single-turn item's reference. Raises ValueError where the category has no references."""
    if item.answer is None or item.multi_turn or item.agentic:
        raise ValueError(f"{item.id} has no reference of one turn")
    documents = {document["name"]: document for document in item.functions}
    return [
        ToolCall(name, _arguments(accepted, documents.get(name, item.functions[0]), item.language))
        for call in item.answer
        for name, accepted in call.items()
    ]


def reference_turns(item: BfclItem) -> list[list[ToolCall]]:
    """The calls of a multi-turn item's reference, turn by turn; a turn without calls expects none.

    Raises ValueError where a call is not one of constants alone, or has more values than its function parameters.
    """
    documents = [*item.functions, *(document for found in item.held_out.values() for document in found)]
    order = {document["name"]: list(document["parameters"]["properties"]) for document in documents}
    return [[_parsed(text, order) for text in turn] for turn in item.answer or []]


def final_words(item: BfclItem) -> str:
    """The last words of an agentic item, with the first accepted answer, in the form that the question asks for."""
    answer = (item.answer or [""])[0]
    return str({"answer": answer, "context": "It was looked up."})


def _parsed(text: str, order: Mapping[str, Sequence[str]]) -> ToolCall:
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"not a call of a function by its name: {text}")
    arguments = dict(zip(order[call.func.id], call.args, strict=False))
    if len(arguments) != len(call.args):
        raise ValueError(f"more values than {call.func.id} has parameters: {text}")
    arguments |= {keyword.arg or "": keyword.value for keyword in call.keywords}
    return ToolCall(call.func.id, {name: ast.literal_eval(value) for name, value in arguments.items()})


def _arguments(accepted: Mapping[str, Any], document: Document, language: Language) -> dict[str, Any]:
    properties = document["parameters"]["properties"]
    chosen = {
        name: _first(options)
        for name, options in accepted.items()
        if "" not in options or name in document["parameters"]["required"]
    }
    if language == "Python":
        return chosen
    return {name: _text(value, properties.get(name, {}), language) for name, value in chosen.items()}


def _first(options: Sequence[Any]) -> Any:
    """The first accepted value. An object, alone or in a list, holds accepted values in turn."""
    value = next((option for option in options if option != ""), "")
    if isinstance(value, list):
        return [_object(inner) if isinstance(inner, dict) else inner for inner in value]
    return _object(value) if isinstance(value, dict) else value


def _object(accepted: Mapping[str, Any]) -> dict[str, Any]:
    """An object's first accepted values; a value that stands without its list is the only one."""
    listed = {key: options if isinstance(options, list) else [options] for key, options in accepted.items()}
    return {key: _first(options) for key, options in listed.items() if "" not in options}


def _text(value: Any, parameter: Mapping[str, Any], language: Language) -> str:
    """A value as the text of a Java or JavaScript expression for a parameter of the declared type."""
    declared = parameter.get("type", "any")
    if isinstance(value, str):
        return value  # a string's own text, or the name of a variable
    if language == "JavaScript":
        return f"{value}n" if declared == "Bigint" else json.dumps(value, ensure_ascii=False)
    return _java(value, declared, parameter.get("items", {}).get("type", "any"))


def _java(value: Any, declared: str, elements: str = "any") -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case int() | float():
            return f"{value}{ {'long': 'L', 'float': 'f'}.get(declared, '') }"
        case list() if declared == "Array":
            # The checker keeps the quotes of an array's strings and then finds them unequal: none may be written.
            inner = ", ".join(e if isinstance(e, str) else _java(e, elements) for e in value)
            return f"new {_JAVA_ELEMENTS.get(elements, elements)}[]{{{inner}}}"
        case list():
            inner = ", ".join(_java(element, elements) for element in value)
            return f"new ArrayList<{_JAVA_BOXES.get(elements, elements)}>(Arrays.asList({inner}))"
        case dict():
            puts = " ".join(f'put("{key}", {_java(inner, "any")});' for key, inner in value.items())
            return f"new HashMap<String, Object>() {{{{ {puts} }}}}"
    raise ValueError(f"no Java text for {value!r}")
