"""Tool parameters as JSON Schema, whatever words a source uses for types.

The rules, in the order in which they apply; the order of keys is kept:

1. A key that holds null is as good as absent, except `default`, `const`, and what stands inside `enum`. So is an
   empty type.
2. A type is read by `TYPE_WORDS`, in any case: JSON Schema's words, Python's ("str", "dict", "float") and others'
   ("HashMap", "long"). A word that is not in the table is an error that names it, never guessed; a list of types is
   read word by word. "any" is no type at all.
3. Containers in brackets become `items` ("List[int]", "list(str)", "Tuple[int, ...]") or `additionalProperties`
   ("Dict[str, int]"); "Union[int, str]" and "int | str" become both; "Literal['a']" an enum. What a schema says of
   itself wins over what its type's brackets say.
4. ", optional" after a type, "Optional[X]", "Union[X, None]" and "X | None" mark a parameter as optional: it is taken
   out of `required`. ", default ..." after a type is dropped.
5. `required` as true or false inside a parameter moves into the list of the object that holds the parameter.
6. All this holds at any depth: in `properties`, `items`, `anyOf` and the like.
7. Parameters are an object: a schema without `type` or `properties` gets them; nothing, null or an empty list is no
   parameters. A map from names to schemas becomes `properties`. Such a map says which parameters are required only
   where its types are Python's, which mark the others as optional: then those without mark and without default are
   `required`. Else the list is left out, because nothing in the source supports it: nothing is required. A `default`
   of "" in such a map means that there is none, and is dropped.
8. A list `required` beside the parameters, in the function itself, wins over what rule 7 guesses
   (`awpo.data.sources.base.read_tool`).
9. Other keys (description, enum, minimum, format, ..) stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from awpo.types import canonical_json

# Word in lower case -> JSON Schema type; "" is a value of any type.
TYPE_WORDS: dict[str, str] = {
    "string": "string",
    "str": "string",
    "text": "string",
    "char": "string",
    "date": "string",
    "datetime": "string",
    "time": "string",
    "url": "string",
    "uri": "string",
    "enum": "string",
    "bytes": "string",
    # A function can only be passed as text or by name.
    "callable": "string",
    "function": "string",
    "integer": "integer",
    "int": "integer",
    "long": "integer",
    "number": "number",
    "float": "number",
    "double": "number",
    "decimal": "number",
    "numeric": "number",
    "boolean": "boolean",
    "bool": "boolean",
    "object": "object",
    "dict": "object",
    "dictionary": "object",
    "mapping": "object",
    "map": "object",
    "hashmap": "object",
    "json": "object",
    "array": "array",
    "arraylist": "array",
    "list": "array",
    "tuple": "array",
    "set": "array",
    "ndarray": "array",
    "np.ndarray": "array",
    "numpy.ndarray": "array",
    "sequence": "array",
    "iterable": "array",
    "null": "null",
    "none": "null",
    "nonetype": "null",
    "any": "",
}

LONGEST_TYPE = 4096
"""Characters of a type in words, nested brackets and all; what is longer is none."""

# Types as only Python-style sources write them; such a source marks each optional parameter as such.
_PYTHON_TYPE = re.compile(r"(?:str|bool|any)(?:\W|$)|(?:list|dict|tuple|set|union|optional|callable)\[|.*,\s*optional")

_MAY_BE_NULL = ("default", "const")
_NESTED = ("items", "additionalProperties", "not", "contains")
_NESTED_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NESTED_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def _split_arguments(text: str, separator: str = ",") -> list[str]:
    """Splits at commas, or at another separator, outside brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "[(") - (character in "])")
        if depth < 0:
            raise ValueError(f"unbalanced brackets in the type {text[:60]!r}")
        if character == separator and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    if depth:
        raise ValueError(f"unbalanced brackets in the type {text[:60]!r}")
    return [*parts, current.strip()]


def parse_type(text: str) -> tuple[dict[str, Any], bool]:
    """A type as a source writes it -> (JSON Schema keywords, whether it is marked as optional).

    >>> parse_type("List[int], optional")
    ({'type': 'array', 'items': {'type': 'integer'}}, True)

    Raises ValueError for a word that is not in `TYPE_WORDS` or for brackets that do not match.
    """
    if len(text) > LONGEST_TYPE:
        raise ValueError(f"unknown type {text[:60]!r}")
    first, *marks = _split_arguments(text)
    optional = False
    for mark in marks:
        if mark.lower() == "optional":
            optional = True
        elif not mark.lower().startswith("default"):
            raise ValueError(f"unknown type {text[:60]!r}")
    schema, nullable = _parse_expression(first)
    return schema, optional or nullable


def _parse_expression(text: str) -> tuple[dict[str, Any], bool]:
    if len(either := _split_arguments(text, "|")) > 1:
        return _union([_parse_expression(part)[0] for part in either])
    opening = min((at for at in (text.find("["), text.find("(")) if at >= 0), default=-1)
    if opening < 0:
        word = TYPE_WORDS.get(text.strip().lower())
        if word is None:
            raise ValueError(f"unknown type {text[:60]!r}")
        return ({"type": word} if word else {}), False
    if text[-1] not in "])":
        raise ValueError(f"unknown type {text[:60]!r}")
    head, inner = text[:opening].strip().lower(), text[opening + 1 : -1].strip()
    if head == "callable":
        return {"type": "string"}, False
    arguments = _split_arguments(inner) if inner else []
    if head == "literal" and arguments:
        return {"type": "string", "enum": [argument.strip("'\"") for argument in arguments]}, False
    parsed = [_parse_expression(argument)[0] for argument in arguments if argument not in ("...", "")]
    if head == "optional" and len(parsed) == 1:
        return parsed[0], True
    if head == "union" and parsed:
        return _union(parsed)
    word = TYPE_WORDS.get(head)
    if word == "array":
        return ({"type": "array", "items": _any_of(parsed)} if parsed else {"type": "array"}), False
    if word == "object":
        values_schema = {"additionalProperties": parsed[1]} if len(parsed) == 2 and parsed[1] else {}
        return {"type": "object", **values_schema}, False
    raise ValueError(f"unknown type {text[:60]!r}")


def _union(parsed: list[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Either of several; null among them marks the whole as optional."""
    options = [option for option in parsed if option != {"type": "null"}]
    return _any_of(options or parsed), len(options) < len(parsed)


def _any_of(options: list[dict[str, Any]]) -> dict[str, Any]:
    distinct = list({canonical_json(option): option for option in options}.values())
    if len(distinct) == 1:
        return distinct[0]
    if {} in distinct:
        return {}
    if all(set(option) == {"type"} for option in distinct):
        return {"type": [option["type"] for option in distinct]}
    return {"anyOf": distinct}


def normalise_schema(schema: Any) -> tuple[Any, bool]:
    """One schema with its types in JSON Schema's words, all the way down -> (schema, marked as optional).

    Raises ValueError, with the reason, where it cannot be read as a schema.
    """
    if isinstance(schema, bool):  # JSON Schema's "anything" and "nothing"
        return schema, False
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be an object, not {schema!r:.60}")
    result: dict[str, Any] = {}
    optional, marked, demanded = False, set[str](), list[str]()
    for key, value in schema.items():
        if (value is None and key not in _MAY_BE_NULL) or (key == "type" and value == ""):
            continue
        if key == "required" and isinstance(value, bool):
            optional = optional or not value  # whoever holds this parameter asks for it, see below
        elif key == "type":
            if isinstance(value, str) and (word := TYPE_WORDS.get(value.lower())):  # nearly always
                result["type"] = word
                continue
            if isinstance(value, str):
                parsed, is_marked = parse_type(value)
                optional = optional or is_marked
            elif isinstance(value, list) and all(isinstance(word, str) for word in value):
                parsed = _any_of([parse_type(word)[0] for word in value])
            else:
                raise ValueError(f"unknown type {value!r:.60}")
            result.update({name: part for name, part in parsed.items() if name == "type" or name not in schema})
        elif key in _NESTED and isinstance(value, dict):
            result[key] = normalise_schema(value)[0]
        elif key in _NESTED_LISTS and isinstance(value, list):
            result[key] = [normalise_schema(part)[0] for part in value]
        elif key in _NESTED_MAPS and isinstance(value, dict):
            parts = {name: normalise_schema(part) for name, part in value.items()}
            result[key] = {name: part for name, (part, _) in parts.items()}
            if key == "properties":
                marked |= {name for name, (_, is_marked) in parts.items() if is_marked}
                demanded += [name for name, part in value.items() if _demands(part) is True]
        elif key == "required" and isinstance(value, list) and not all(isinstance(name, str) for name in value):
            raise ValueError("'required' must list names")
        else:
            result[key] = value
    if (marked and isinstance(result.get("required"), list)) or demanded:
        listed = result.get("required")
        names = [*(listed if isinstance(listed, list) else ()), *demanded]
        result["required"] = [name for name in dict.fromkeys(names) if name not in marked]
    return result, optional


def _demands(schema: Any) -> bool | None:
    """What a parameter says of itself in `required`, None where it says nothing."""
    said = schema.get("required") if isinstance(schema, dict) else None
    return said if isinstance(said, bool) else None


def _is_schema(parameters: Mapping[str, Any]) -> bool:
    """Whether this is a schema of an object; else it is a map of parameters, which may itself have one named 'type'."""
    kind, properties = parameters.get("type"), parameters.get("properties")
    if isinstance(kind, str):
        return True
    return kind is None and isinstance(properties, dict) and not isinstance(properties.get("type"), str)


def normalise_parameters(parameters: Any) -> dict[str, Any]:
    """The parameters of a tool as a JSON Schema of type object.

    `parameters` is such a schema, or a map from parameter names to schemas, or nothing; rule 7 has what becomes of
    each. Raises ValueError, with the reason.
    """
    if parameters is None or parameters == {} or parameters == []:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise ValueError("the parameters are not an object")
    if _is_schema(parameters):
        schema, _ = normalise_schema(parameters)
        if schema.setdefault("type", "object") != "object":
            raise ValueError(f"the parameters are of type {schema['type']!r}, not object")
        schema.setdefault("properties", {})
        return dict(schema)
    properties: dict[str, Any] = {}
    required: list[str] = []
    python = any(_PYTHON_TYPE.match(str(_type_of(given)).lower()) for given in parameters.values())
    explicit = any(_demands(given) is not None for given in parameters.values())
    for name, given in parameters.items():
        if not isinstance(given, dict):
            raise ValueError(f"the parameter {name!r} is not described by an object")
        schema, optional = normalise_schema(given)
        if schema.get("default") == "":
            del schema["default"]
        properties[name] = schema
        if _demands(given) if explicit else not optional and "default" not in schema:
            required.append(name)
    says = python or explicit
    return {"type": "object", "properties": properties, **({"required": required} if says and required else {})}


def _type_of(schema: Any) -> Any:
    return schema.get("type", "") if isinstance(schema, dict) else ""
