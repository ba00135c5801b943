"""Hammer's masking (arXiv 2410.04587): a model must go by what tools are said to do, not by what they are called.

A dialogue's tools get other names, so that only descriptions tell what they do:

- functions: each tool's name becomes 5 to 15 random characters, as in Hammer's own data (letters, digits, "_", ".");
- parameters: each parameter's name becomes 4 to 10 such characters;
- defaults: a default becomes another value, as do the arguments that equal it: a number grows by up to 4 or by less
  than 1, a text becomes 5 random characters;
- irrelevance: the tools that the right step calls are taken away, and the step becomes the reply that no tool fits
  (`NO_CALL_REPLY`); what follows it is cut off.

Names change in tools, calls and results alike. Inside texts (descriptions, messages, thoughts) only those names
change that can be no word of a language, such as get_weather or getWeather: "add" stays where it is a verb. In a
result that is JSON, keys that are parameters of the tool which gave it change, and values that are names of tools.

Where this differs from Hammer's script: one name for a parameter that several tools of a dialogue share; a default
changes only where no message mentions it (Hammer replaces it in the query), where its schema allows the new value,
and never a list, a truth value or one of an enum; the order of tools stays. Hammer masks two thirds of its rows, and
7.5k of its 67.5k are of the irrelevant kind: those are the shares of `MaskingConfig`.

Everything is a function of (seed, dialogue): no state, no order, so rows can be masked anywhere.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from awpo.data import strict_json
from awpo.data.settings import MaskingConfig
from awpo.data.sources.base import NO_CALL_REPLY
from awpo.data.validation import schema_allows
from awpo.types import Dialogue, Message, Tool, ToolCall

KINDS = ("irrelevance", "functions", "parameters", "defaults")
MARK = "+"
"""Stands between a source's label and each kind of mask: "xlam+functions+parameters"."""

_ALPHABET = string.ascii_uppercase + string.ascii_lowercase + "_." + string.digits
_FUNCTION_LENGTHS, _PARAMETER_LENGTHS, _TEXT_LENGTH = (5, 15), (4, 10), 5
# What no word of a language looks like: a sign or a digit inside, a capital after a small letter.
_TELLING = re.compile(r"[_.\-/\d]|[a-z][A-Z]|\S\s+\S")


def mask_dialogue(dialogue: Dialogue, config: MaskingConfig, *, last_step_only: bool = False) -> Dialogue:
    """The dialogue with the masks that fall to it; itself where none does or none can be applied.

    The kinds applied are added to the label of its source. `last_step_only` says that only its last step is to
    become an instance, so that this is the step to become irrelevant; else it is the first that calls.
    """
    draw = random.Random(f"{config.seed}\0{dialogue.id}")
    irrelevant, masked = draw.random() < config.irrelevance, draw.random() < config.share
    functions, parameters, defaults = (
        draw.random() < share and masked for share in (config.functions, config.parameters, config.defaults)
    )
    result, kinds = dialogue, []
    for kind, chosen, apply in (
        ("irrelevance", irrelevant, lambda given: without_right_tool(given, last_step_only=last_step_only)),
        # Before names change: a default is looked for in the texts as they are.
        ("defaults", defaults, lambda given: with_other_defaults(given, draw)),
        ("functions", functions, lambda given: rename(given, random_names(_function_names(given), given, draw, _FUNCTION_LENGTHS), {})),
        ("parameters", parameters, lambda given: rename(given, {}, random_names(_parameter_names(given), given, draw, _PARAMETER_LENGTHS))),
    ):  # fmt: skip
        if chosen and (changed := apply(result)) != result:
            result = changed
            kinds.append(kind)
    suffix = "".join(f"{MARK}{kind}" for kind in KINDS if kind in kinds)
    return replace(result, source=f"{dialogue.source}{suffix}") if suffix else dialogue


def kinds_of(source: str) -> tuple[str, ...]:
    """The kinds of masks that a source's label names."""
    return tuple(part for part in source.split(MARK)[1:] if part in KINDS)


def _function_names(dialogue: Dialogue) -> list[str]:
    return list(dict.fromkeys(tool.name for tool in dialogue.tools))


def _parameter_names(dialogue: Dialogue) -> list[str]:
    return list(dict.fromkeys(name for tool in dialogue.tools for name in _properties(tool)))


def _properties(tool: Tool) -> Mapping[str, Any]:
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def random_names(
    names: Collection[str], dialogue: Dialogue, draw: random.Random, lengths: tuple[int, int]
) -> dict[str, str]:
    """Another name for each, none twice and none that a tool or parameter of the dialogue has."""
    used = {*_function_names(dialogue), *_parameter_names(dialogue)}
    chosen: dict[str, str] = {}
    for name in names:
        while (new := "".join(draw.choices(_ALPHABET, k=draw.randint(*lengths)))) in used:
            pass
        used.add(new)
        chosen[name] = new
    return chosen


# Names


def _in_text(names: Mapping[str, str]) -> Callable[[str], str]:
    """Replaces in a text those of the names that are no words."""
    telling = sorted((name for name in names if _TELLING.search(name)), key=len, reverse=True)
    if not telling:
        return lambda text: text
    pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, telling))})(?!\w)")
    return lambda text: pattern.sub(lambda match: names[match[0]], text)


def rename(dialogue: Dialogue, functions: Mapping[str, str], parameters: Mapping[str, str]) -> Dialogue:
    """The dialogue with functions and parameters renamed throughout."""
    text = _in_text({**parameters, **functions})
    own: dict[str, dict[str, str]] = {}
    for tool in dialogue.tools:  # two may have one name
        own.setdefault(tool.name, {}).update(
            (name, parameters[name]) for name in _properties(tool) if name in parameters
        )

    def call(given: ToolCall) -> ToolCall:
        names = own.get(given.name, {})
        arguments = {names.get(name, name): value for name, value in given.arguments.items()}
        return ToolCall(functions.get(given.name, given.name), arguments)

    def message(given: Message) -> Message:
        content = given.content
        if content is not None and given.role == "tool":
            content = _rename_in_result(content, functions, own.get(given.name or "", {}), text)
        elif content is not None:
            content = text(content)
        return replace(
            given,
            content=content,
            tool_calls=tuple(map(call, given.tool_calls)),
            thought=text(given.thought) if given.thought else given.thought,
            name=functions.get(given.name, given.name) if given.name else given.name,
        )

    tools = tuple(
        _rename_tool(tool, functions.get(tool.name, tool.name), own[tool.name], text) for tool in dialogue.tools
    )
    return replace(dialogue, tools=tools, messages=tuple(map(message, dialogue.messages)))


def _rename_tool(tool: Tool, name: str, names: Mapping[str, str], text: Callable[[str], str]) -> Tool:
    parameters = {key: _describe(value, text) for key, value in tool.parameters.items()}
    if "properties" in parameters:
        properties = _properties(Tool(name, "", parameters))
        parameters["properties"] = {names.get(key, key): value for key, value in properties.items()}
    if isinstance(parameters.get("required"), list):
        parameters["required"] = [names.get(key, key) for key in parameters["required"]]
    return Tool(name, text(tool.description), parameters)


def _describe(schema: Any, text: Callable[[str], str]) -> Any:
    """A schema with names in its descriptions replaced, at any depth."""
    if isinstance(schema, dict):
        return {
            key: text(value) if key == "description" and isinstance(value, str) else _describe(value, text)
            for key, value in schema.items()
        }
    return [_describe(part, text) for part in schema] if isinstance(schema, list) else schema


def _rename_in_result(
    content: str, functions: Mapping[str, str], names: Mapping[str, str], text: Callable[[str], str]
) -> str:
    try:
        value = strict_json.parse(content)
    except ValueError:
        value = None
    if not isinstance(value, (dict, list)):
        return functions.get(content, text(content))

    def key_of(key: str, held: Any) -> str:
        # {"name": the tool's} is a label, whatever the tool's parameters are called
        label = isinstance(held, str) and held in functions
        return key if label else names.get(key, key)

    def renamed(part: Any) -> Any:
        if isinstance(part, dict):
            return {key_of(key, held): renamed(held) for key, held in part.items()}
        if isinstance(part, list):
            return [renamed(held) for held in part]
        return functions.get(part, text(part)) if isinstance(part, str) else part

    changed = renamed(value)
    return content if changed == value else strict_json.dump(changed, spaced=True)


# Defaults


def with_other_defaults(dialogue: Dialogue, draw: random.Random) -> Dialogue:
    """The dialogue with each default changed that no message mentions, and with it the arguments that equal it."""
    said = "\n".join(message.content or "" for message in dialogue.messages)
    tools, changes = [], {}
    for tool in dialogue.tools:
        properties = dict(_properties(tool))
        for name, schema in properties.items():
            new = _other_default(schema, said, draw)
            used = [call.arguments[name] for call in _calls(dialogue, tool.name) if name in call.arguments]
            # A value that equals the default only as text could be meant or not.
            if new is None or any(
                str(value) == str(schema["default"]) and not _equal(value, schema["default"]) for value in used
            ):
                continue
            changes[tool.name, name] = (schema["default"], new)
            properties[name] = {**schema, "default": new}
            if isinstance(schema.get("description"), str):
                parts = _mention(schema["default"]).split(schema["description"])
                properties[name]["description"] = str(new).join(parts)
        tools.append(replace(tool, parameters={**tool.parameters, "properties": properties}) if properties else tool)
    if not changes:
        return dialogue

    def call(given: ToolCall) -> ToolCall:
        arguments = dict(given.arguments)
        for name, value in arguments.items():
            old, new = changes.get((given.name, name), (None, None))
            if old is not None and _equal(value, old):
                arguments[name] = new
        return ToolCall(given.name, arguments)

    messages = (replace(message, tool_calls=tuple(map(call, message.tool_calls))) for message in dialogue.messages)
    return replace(dialogue, tools=tuple(tools), messages=tuple(messages))


def _calls(dialogue: Dialogue, name: str) -> list[ToolCall]:
    return [call for message in dialogue.messages for call in message.tool_calls if call.name == name]


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _mention(value: Any) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(str(value))}(?!\w)", re.IGNORECASE)


def _other_default(schema: Any, said: str, draw: random.Random) -> Any:
    """Another default for a parameter, None where it has none that may change."""
    default = schema.get("default") if isinstance(schema, Mapping) else None
    if default is None or default == "":
        return None
    if isinstance(default, bool) or not isinstance(default, (int, float, str)) or _mention(default).search(said):
        return None
    new: Any
    if isinstance(default, int):
        new = default + draw.randint(1, 4)
    elif isinstance(default, float):
        new = round(default + draw.random(), 4)
    else:
        new = "".join(draw.choices(_ALPHABET, k=_TEXT_LENGTH))
    return new if new != default and schema_allows(new, schema) else None


# Irrelevance


def without_right_tool(dialogue: Dialogue, *, last_step_only: bool = False) -> Dialogue:
    """The dialogue up to a step that calls, without the tools it calls, and a reply that no tool fits in its place.

    The dialogue itself where no step calls, no tool would be left, or what comes before calls one of them.
    """
    messages = dialogue.messages
    position = len(messages) - 1 if last_step_only else next((i for i, m in enumerate(messages) if m.tool_calls), -1)
    if position < 0 or not messages[position].tool_calls:
        return dialogue
    removed = {call.name for call in messages[position].tool_calls}
    tools = tuple(tool for tool in dialogue.tools if tool.name not in removed)
    before = messages[:position]
    if not tools or any(call.name in removed for message in before for call in message.tool_calls):
        return dialogue
    return replace(dialogue, tools=tools, messages=(*before, Message("assistant", NO_CALL_REPLY)))
