"""What all settings are: immutable, with every unknown key refused by the name of the nearest known one."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from awpo.errors import UserError

MOST_THREADS = 1024
SEEDS = 2**32  # numpy takes none beyond


def _switch(value: Any) -> Any:
    """YAML reads a bare `on` as true and `off` as false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]


class Settings(BaseModel):
    """Base of all settings: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"threads"})
    """Keys that say how the work is done, and not what comes of it."""
    ADDED: ClassVar[frozenset[str]] = frozenset()
    """Keys that earlier versions did not have, and whose default value is what they did: results of then are known by
    identities without them."""

    def identity(self) -> dict[str, Any]:
        """What the result depends on, as JSON values: work of the same identity is the same work."""
        found = self.model_dump(mode="json", exclude=set(self.WITHOUT_EFFECT) | self.added_as_before())
        inner = {name: getattr(self, name) for name in found}
        return found | {name: value.identity() for name, value in inner.items() if isinstance(value, Settings)}

    def added_as_before(self) -> set[str]:
        """The keys of `ADDED` that have no effect beyond what earlier versions did."""
        fields = type(self).model_fields
        return {
            name
            for name in self.ADDED
            if _effect(getattr(self, name)) == _effect(fields[name].get_default(call_default_factory=True))
        }

    @classmethod
    def read(cls, values: dict[str, Any], where: str) -> Self:
        """Checks `values`; raises UserError with one line for the first thing wrong. `where` names their origin."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError(f"{where}: {cls._told(error.errors())}") from None

    @classmethod
    def _told(cls, errors: list[Any]) -> str:
        """The first thing wrong, in words of a settings file and not of Python."""
        # A required key that is misspelt is missing and unknown: the second says more.
        first = next((found for found in errors if found["type"] == "extra_forbidden"), errors[0])
        place = _place(first)
        key = ".".join(map(str, place))
        if first["type"] == "extra_forbidden":
            known = list(cls._fields_at(place[:-1]))
            near = difflib.get_close_matches(str(place[-1]), known, n=1)
            return f"unknown key {key[:200]!r}; " + (
                f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            )
        if first["type"] == "missing":
            field = cls._fields_at(place[:-1]).get(str(place[-1]))
            meaning = f" ({field.description})" if field and field.description else ""
            return f"{key} is missing{meaning}; give it"
        if first["type"] == "value_error":  # a check of ours: its message has the numbers
            message = str(first["msg"]).removeprefix("Value error, ")
            return f"{key}: {message}" if key else message
        wanted, given = _wanted(first, errors), first.get("input")
        if not wanted:
            return f"{key or 'settings'}: {first['msg']} (got {_shown(given)})"
        expected = re.findall(r"'([^']*)'", str(first.get("ctx", {}).get("expected", "")))
        near = difflib.get_close_matches(given, expected, n=1) if isinstance(given, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        shown = "empty" if given is None else _shown(given)
        return f"{key or 'settings'}: must be {wanted}, not {shown}{hint}"

    @classmethod
    def _fields_at(cls, location: tuple[str | int, ...]) -> dict[str, FieldInfo]:
        """The fields by key at a place in nested settings, such as ("policy", "judge")."""
        for name in location:
            field = cls.model_fields.get(str(name))
            inner = [field.annotation, *get_args(field.annotation)] if field else []
            cls = next((kind for kind in inner if isinstance(kind, type) and issubclass(kind, Settings)), cls)
        return cls.model_fields


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        return "a number of too many digits"


def _effect(value: Any) -> Any:
    return value.identity() if isinstance(value, Settings) else value


# What pydantic's kinds of errors ask for.
_WANTED = {
    "int_": "a whole number",
    "float_": "a number",
    "finite_number": "a finite number",
    "bool_": "true or false",
    "string_": "text",
    "model_": "a mapping of keys to values",
    "dict_": "a mapping of keys to values",
    "tuple_": "a list",
    "list_": "a list",
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "less than {lt:g}",
    "literal_error": "{expected}",
}


def _place(error: Any) -> tuple[str | int, ...]:
    """Where in the settings an error is; pydantic also names the kind of a value that may be of several."""
    *outer, last = error["loc"] or ("",)
    known = [part for part in outer if not (isinstance(part, str) and "[" in part)]
    own = error["type"] == "extra_forbidden"  # then the last is a key as it was given, whatever stands in it
    return tuple([*known, last] if last != "" and (own or not (isinstance(last, str) and "[" in last)) else known)


def _wanted(first: Any, errors: list[Any]) -> str:
    """What may stand where `first` is wrong, all kinds together; empty for an error that is not known here."""
    found = []
    for error in errors:
        if _place(error) == _place(first):
            text = next((text for start, text in _WANTED.items() if error["type"].startswith(start)), "")
            found.append(text.format(**error.get("ctx", {})))
    return " or ".join(found) if all(found) else ""


LARGEST_TEXT = 2**20
"""Characters of a settings file; PyYAML needs some ten seconds for so many."""
DEEPEST, MOST_VALUES = 64, 100_000
"""How deeply the values of a settings file may be nested, and how many it may have."""


class _Loader(yaml.SafeLoader):
    """YAML without repeated keys, of which PyYAML takes the last and says nothing."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        self.depth += 1
        if self.depth > DEEPEST:
            told = f"its values are nested more than {DEEPEST} deep"
            raise yaml.MarkedYAMLError(problem=told, problem_mark=self.peek_event().start_mark)
        node: yaml.Node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (first := lines.get((key.tag, key.value))) is not None:
                told = f"the key {key.value[:200]!r} stands there again, first in line {first}"
                raise yaml.MarkedYAMLError(problem=told, problem_mark=key.start_mark)
            lines[key.tag, key.value] = key.start_mark.line + 1
        return node


def load_yaml(text: str) -> Any:
    """The value of a YAML text. Raises yaml.YAMLError where it is none, or a mapping has a key twice."""
    if len(text) > LARGEST_TEXT:
        raise yaml.YAMLError(f"it has {len(text)} characters, more than {LARGEST_TEXT}")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _expanded(node, {})
        return loader.construct_document(node)
    except (LookupError, AttributeError, OverflowError) as error:  # of PyYAML, for tags such as `!!bool maybe`
        raise yaml.YAMLError(f"a value is not what its tag says ({type(error).__name__}: {error})") from None
    finally:
        loader.dispose()


def _expanded(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for, aliases written out. Raises yaml.YAMLError for more than MOST_VALUES.

    A few lines of aliases of aliases stand for billions, which whoever copies or prints them would find out.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = MOST_VALUES  # an alias of what it stands in has no end
        inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_expanded(part, known) for part in inner)
    if known[id(node)] >= MOST_VALUES:
        told = f"with its aliases written out it has more than {MOST_VALUES} values"
        raise yaml.MarkedYAMLError(problem=told, problem_mark=node.start_mark)
    return known[id(node)]


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping from a file; UserError where it is missing, unreadable, not a mapping, or has a key twice."""
    try:
        values = load_yaml(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8; give the path of a YAML file") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that does not exist
        mark = getattr(error, "problem_mark", None)
        at = f" in line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{path} is not YAML{at}: {reason[:300]}; mend it") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold a mapping of keys to values")
    return values


def preset_path(folder: Path, name_or_path: str, what: str) -> Path:
    """The file of a preset in `folder` by its name, or a YAML file by its path; UserError where there is neither.

    `what` is what a preset is, for the message.
    """
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name_or_path in known:
        return folder / f"{name_or_path}.yaml"
    if os.path.isfile(name_or_path):  # unlike Path.is_file, also where a name is too long to be one
        return Path(name_or_path)
    near = difflib.get_close_matches(name_or_path, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"presets: {', '.join(known)}; or a YAML file's path"
    raise UserError(f"no {what} {name_or_path!r}; {hint}")
