"""Whether a call fits the schema of its tool, and if not, why: one of a small set of reasons, for counting.

Checked are what sources of tool calls use of JSON Schema: `type`, `enum`, `const`, `properties`, `required`,
`additionalProperties`, `items`, `anyOf`, `oneOf`, `allOf`, the bounds of numbers, and of the lengths of texts and
lists. What else a schema says (`format`, `pattern`, `$ref`, ..) is not checked: it lets everything pass.

One thing is stricter than JSON Schema: a call may only name parameters that the tool has, unless the schema itself
speaks of others in `additionalProperties` or `patternProperties`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from awpo.types import Tool, ToolCall

Reason = Literal[
    "unknown parameter", "missing parameter", "null for a value", "wrong type", "not an allowed value", "out of bounds"
]


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a call doesn't fit, and where: `where` is a path such as "stops[2].city"."""

    reason: Reason
    where: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.where}" + (f" ({self.detail})" if self.detail else "")


def call_faults(call: ToolCall, tool: Tool) -> Iterator[Fault]:
    """What is wrong with a call, in the order of its arguments; missing parameters last."""
    schema = tool.parameters
    properties = schema.get("properties")
    closed = "additionalProperties" not in schema and not schema.get("patternProperties")
    if closed and isinstance(properties, Mapping):
        for name in call.arguments:
            if name not in properties:
                yield Fault("unknown parameter", name)
    yield from _faults(call.arguments, schema, "")


def first_fault(call: ToolCall, tool: Tool) -> Fault | None:
    """The first of `call_faults`, None where the call fits."""
    if _fits_plainly(call.arguments, tool.parameters):
        return None
    return next(call_faults(call, tool), None)


_TYPES: dict[str, frozenset[type]] = {
    "string": frozenset({str}),
    "integer": frozenset({int}),
    "number": frozenset({int, float}),
    "boolean": frozenset({bool}),
    "object": frozenset({dict}),
    "array": frozenset({list}),
    "null": frozenset({type(None)}),
}
_PLAIN = frozenset(
    (
        "type",
        "description",
        "title",
        "default",
        "format",
        "example",
        "examples",
        "enum",
        "items",
        "properties",
        "required",
    )
)


def _fits_plainly(value: Any, schema: Any) -> bool:
    """Whether a value fits for sure; false where that takes the rules of `call_faults`, which cost several times more.

    Of a schema with other keys than those most sources use nothing is said here, nor of a value that is of its type
    in a wider sense only, as 1.0 is an integer.
    """
    if type(schema) is not dict or type(word := schema.get("type")) is not str:
        return False
    if type(value) not in _TYPES.get(word, ()) or not schema.keys() <= _PLAIN:
        return False
    if "enum" in schema and not (type(value) is str and type(schema["enum"]) is list and value in schema["enum"]):
        return False
    if type(value) is list:
        return "items" not in schema or all(_fits_plainly(item, schema["items"]) for item in value)
    if type(value) is not dict:
        return True
    properties, required = schema.get("properties"), schema.get("required", [])
    if type(properties) is not dict or type(required) is not list or not all(name in value for name in required):
        return False
    return all(name in properties and _fits_plainly(part, properties[name]) for name, part in value.items())


def schema_allows(value: Any, schema: Any) -> bool:
    """Whether a value fits a schema."""
    return next(_faults(value, schema, ""), None) is None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _has_type(value: Any, word: str) -> bool:
    if word == "integer":
        return _is_number(value) and (isinstance(value, int) or value.is_integer())
    if word == "number":
        return _is_number(value)
    kinds: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "boolean": (bool,),
        "object": (dict,),
        "array": (list,),
        "null": (type(None),),
    }
    return isinstance(value, kinds.get(word, (object,)))


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0, true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    return bool(one == other)


def _faults(value: Any, schema: Any, where: str) -> Iterator[Fault]:
    if schema is False:
        yield Fault("unknown parameter", where, "nothing is allowed")
    if not isinstance(schema, Mapping):
        return
    words = schema.get("type")
    kinds = [words] if isinstance(words, str) else words if isinstance(words, list) else []
    if kinds and not any(_has_type(value, word) for word in kinds):
        shown = f"{' or '.join(map(str, kinds))} expected, not {value!r:.60}"
        yield Fault("null for a value" if value is None else "wrong type", where, shown)
        return
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(allowed, list) and not any(_same(value, one) for one in allowed):
        yield Fault("not an allowed value", where, f"{value!r:.60}")
    yield from _bounds(value, schema, where)
    if isinstance(value, dict):
        yield from _object_faults(value, schema, where)
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from _faults(item, schema["items"], f"{where}[{index}]")
    yield from _combined(value, schema, where)


def _object_faults(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> Iterator[Fault]:
    prefix = f"{where}." if where else ""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    others = schema.get("additionalProperties", True)
    for name, part in value.items():
        if name in properties:
            yield from _faults(part, properties[name], f"{prefix}{name}")
        elif not schema.get("patternProperties"):
            yield from _faults(part, others, f"{prefix}{name}")
    required = schema.get("required")
    for name in required if isinstance(required, list) else ():
        if name not in value:
            yield Fault("missing parameter", f"{prefix}{name}")


def _combined(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[Fault]:
    for part in _schemas(schema, "allOf"):
        yield from _faults(value, part, where)
    for key in ("anyOf", "oneOf"):
        options = [next(_faults(value, part, where), None) for part in _schemas(schema, key)]
        fitting = options.count(None)
        if options and fitting == 0:
            first = options[0]
            assert first is not None
            yield first
        elif key == "oneOf" and fitting > 1:
            yield Fault("not an allowed value", where, f"fits {fitting} of the schemas of oneOf")


def _schemas(schema: Mapping[str, Any], key: str) -> list[Any]:
    parts = schema.get(key)
    return parts if isinstance(parts, list) else []


def _bounds(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[Fault]:
    size: Any
    if _is_number(value):
        size, lowest, highest = value, "minimum", "maximum"
    elif isinstance(value, str):
        size, lowest, highest = len(value), "minLength", "maxLength"
    elif isinstance(value, list):
        size, lowest, highest = len(value), "minItems", "maxItems"
    else:
        return
    low, high = schema.get(lowest), schema.get(highest)
    under, over = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if (_is_number(low) and size < low) or (_is_number(high) and size > high):
        yield Fault("out of bounds", where, f"{size} is not in [{low}, {high}]")
    elif _is_number(value) and ((_is_number(under) and size <= under) or (_is_number(over) and size >= over)):
        yield Fault("out of bounds", where, f"{size} is not in ({under}, {over})")
