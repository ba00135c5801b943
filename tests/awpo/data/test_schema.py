"""Types of many dialects become JSON Schema's."""

from __future__ import annotations

from typing import Any

import pytest

from awpo.data.schema import TYPE_WORDS, normalise_parameters, normalise_schema, parse_type

JSON_SCHEMA = {"string", "integer", "number", "boolean", "object", "array", "null", ""}


def test_the_table_knows_only_json_schema_types_and_lower_case_words() -> None:
    assert set(TYPE_WORDS.values()) == JSON_SCHEMA
    assert all(word == word.lower() for word in TYPE_WORDS)
    assert all(TYPE_WORDS[word] == word for word in JSON_SCHEMA - {""})


@pytest.mark.parametrize(
    ("text", "schema", "optional"),
    [
        ("dict", {"type": "object"}, False),
        ("float", {"type": "number"}, False),
        ("int, optional", {"type": "integer"}, True),
        ("str", {"type": "string"}, False),
        ("String", {"type": "string"}, False),
        ("any", {}, False),
        ("List", {"type": "array"}, False),
        ("List[int]", {"type": "array", "items": {"type": "integer"}}, False),
        ("list(str)", {"type": "array", "items": {"type": "string"}}, False),
        (
            "List[List[float]], optional",
            {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
            True,
        ),
        ("Tuple[float, float]", {"type": "array", "items": {"type": "number"}}, False),
        ("Tuple[int, ...]", {"type": "array", "items": {"type": "integer"}}, False),
        ("Tuple[str, int]", {"type": "array", "items": {"type": ["string", "integer"]}}, False),
        ("Set[str]", {"type": "array", "items": {"type": "string"}}, False),
        ("Dict[str, int]", {"type": "object", "additionalProperties": {"type": "integer"}}, False),
        ("Dict[str, Any]", {"type": "object"}, False),
        ("Union[int, float]", {"type": ["integer", "number"]}, False),
        ("Union[int, Any]", {}, False),
        (
            "Union[str, List[str]]",
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            False,
        ),
        ("Optional[str]", {"type": "string"}, True),
        ("Union[str, None]", {"type": "string"}, True),
        ("Callable[[float], float]", {"type": "string"}, False),
        ("Literal['a', 'b']", {"type": "string", "enum": ["a", "b"]}, False),
        ("str, optional, default 'a'", {"type": "string"}, True),
        ("list[str]", {"type": "array", "items": {"type": "string"}}, False),
        ("int | None", {"type": "integer"}, True),
        (
            "list[int | str] | dict",
            {"anyOf": [{"type": "array", "items": {"type": ["integer", "string"]}}, {"type": "object"}]},
            False,
        ),
        ("np.ndarray", {"type": "array"}, False),
    ],
)
def test_types(text: str, schema: dict[str, Any], optional: bool) -> None:
    assert parse_type(text) == (schema, optional)


@pytest.mark.parametrize(
    "text",
    ["", "strnig", "int, optinal", "List[", "List[int", "List]int[", "List[wizard]", "Wizard[int]", "int or str", "]"],
)
def test_words_that_are_not_in_the_table_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="type"):
        parse_type(text)


def test_a_schema_is_normalised_all_the_way_down_and_keeps_its_order() -> None:
    given = {
        "description": "Outer",
        "type": "dict",
        "properties": {
            "zeta": {"default": 3, "type": "int, optional"},
            "alpha": {"type": "list", "items": {"type": "dict", "properties": {"type": {"type": "str"}}}},
            "beta": {"anyOf": [{"type": "float"}, {"type": "None"}], "enum": [1.5, None]},
            "gamma": {"type": ["str", "int"]},
            "delta": True,
        },
        "required": ["zeta", "alpha"],
        "additionalProperties": False,
    }
    schema, optional = normalise_schema(given)
    assert not optional
    assert schema == {
        "description": "Outer",
        "type": "object",
        "properties": {
            "zeta": {"default": 3, "type": "integer"},
            "alpha": {"type": "array", "items": {"type": "object", "properties": {"type": {"type": "string"}}}},
            "beta": {"anyOf": [{"type": "number"}, {"type": "null"}], "enum": [1.5, None]},
            "gamma": {"type": ["string", "integer"]},
            "delta": True,
        },
        "required": ["alpha"],  # zeta was marked as optional
        "additionalProperties": False,
    }
    assert list(schema) == list(given)
    assert list(schema["properties"]) == ["zeta", "alpha", "beta", "gamma", "delta"]
    assert list(schema["properties"]["zeta"]) == ["default", "type"]
    assert normalise_schema(schema) == (schema, False)  # nothing more to do


def test_null_is_as_good_as_absent_except_where_it_is_a_value() -> None:
    given = {
        "type": "object",
        "description": None,
        "required": None,
        "properties": {
            "a": {"type": "string", "enum": None, "items": None, "default": None, "properties": None},
            "b": {"type": None, "const": None, "enum": ["x", None]},
            "c": {"type": ""},
        },
    }
    assert normalise_schema(given)[0] == {
        "type": "object",
        "properties": {"a": {"type": "string", "default": None}, "b": {"const": None, "enum": ["x", None]}, "c": {}},
    }


def test_required_inside_a_parameter_moves_to_the_list_of_its_object() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "str", "required": True}, "y": {"type": "int"}}}
    given = {
        "type": "object",
        "properties": {"a": {"type": "int", "required": True}, "b": {"required": False, "type": "int"}, "c": inner, "d": {"type": "int"}},
        "required": ["d", "b"],
    }  # fmt: skip
    assert normalise_parameters(given) == {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "integer"},
            "c": {
                "type": "object",
                "properties": {"x": {"type": "string"}, "y": {"type": "integer"}},
                "required": ["x"],
            },
            "d": {"type": "integer"},
        },
        "required": ["d", "a"],
    }
    # In a map, too, what is said wins over what types hint at.
    mapped = {"a": {"type": "str", "required": True, "default": "x"}, "b": {"type": "str"}}
    assert normalise_parameters(mapped)["required"] == ["a"]
    assert "required" not in normalise_parameters({"a": {"type": "str", "required": False}})


def test_what_a_schema_says_itself_wins_over_the_type_expression() -> None:
    assert normalise_schema({"type": "List[str]", "items": {"type": "int"}})[0] == {
        "type": "array",
        "items": {"type": "integer"},
    }


@pytest.mark.parametrize("nothing", [None, {}, []])
def test_no_parameters(nothing: Any) -> None:
    assert normalise_parameters(nothing) == {"type": "object", "properties": {}}


def test_a_schema_without_type_or_properties_gets_them() -> None:
    assert normalise_parameters({"properties": {"a": {"type": "int"}}}) == {
        "properties": {"a": {"type": "integer"}},
        "type": "object",
    }
    assert normalise_parameters({"type": "dict"}) == {"type": "object", "properties": {}}


def test_a_map_of_parameters_with_python_types_says_what_is_required() -> None:
    parameters = {
        "text": {"description": "The text.", "type": "str", "default": ""},
        "limit": {"description": "At most.", "type": "int, optional", "default": 10},
        "region": {"description": "Where.", "type": "str, optional", "default": ""},
    }
    assert normalise_parameters(parameters) == {
        "type": "object",
        "properties": {
            "text": {"description": "The text.", "type": "string"},
            "limit": {"description": "At most.", "type": "integer", "default": 10},
            "region": {"description": "Where.", "type": "string"},
        },
        "required": ["text"],
    }


def test_a_map_without_python_types_does_not_say_what_is_required() -> None:
    parameters = {"year": {"type": "float", "default": ""}, "name": {"type": "string", "default": "x"}}
    assert normalise_parameters(parameters) == {
        "type": "object",
        "properties": {"year": {"type": "number"}, "name": {"type": "string", "default": "x"}},
    }


def test_parameters_may_be_named_like_the_words_of_a_schema() -> None:
    parameters = {"type": {"type": "str", "default": ""}, "properties": {"type": "dict", "default": ""}}
    assert normalise_parameters(parameters)["properties"] == {
        "type": {"type": "string"},
        "properties": {"type": "object"},
    }


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ("text", "not an object"),
        ([1], "not an object"),
        ({"a": "int"}, "'a' is not described by an object"),
        ({"type": "array", "items": {}}, "of type 'array', not object"),
        ({"type": "object", "properties": {"a": 1}}, "must be an object"),
        ({"type": "object", "properties": {"a": {"type": 7}}}, "unknown type 7"),
        ({"type": "object", "required": [1]}, "must list names"),
    ],
)
def test_what_cannot_be_read_says_why(parameters: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        normalise_parameters(parameters)


def test_deep_schemas_take_linear_time() -> None:
    schema: dict[str, Any] = {"type": "str"}
    for _ in range(60):
        schema = {"type": "dict", "properties": {"a": schema}, "required": ["a"]}
    assert normalise_parameters(schema)["type"] == "object"  # evaluating each level twice would never end
