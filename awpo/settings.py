"""What all settings are: immutable, with every unknown key refused by the name of the nearest known one."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from awpo.errors import UserError


class Settings(BaseModel):
    """Base of all settings: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"threads"})
    """Keys that say how the work is done, and not what comes of it."""

    def identity(self) -> dict[str, Any]:
        """What the result depends on, as JSON values: work of the same identity is the same work."""
        return self.model_dump(mode="json", exclude=set(self.WITHOUT_EFFECT))

    @classmethod
    def read(cls, values: dict[str, Any], where: str) -> Self:
        """Checks `values`; raises UserError with one line for the first thing wrong. `where` names their origin."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            errors = error.errors()
            # A required key that is misspelt is missing and unknown: the second says more.
            first = next((found for found in errors if found["type"] == "extra_forbidden"), errors[0])
            key = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                known = cls._fields_at(first["loc"][:-1])
                near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise UserError(f"{where}: unknown key {key!r}{hint}") from None
            if first["type"] == "value_error":  # a check of ours: its message has the numbers
                message = first["msg"].removeprefix("Value error, ")
                raise UserError(f"{where}: {f'{key}: ' if key else ''}{message}") from None
            raise UserError(f"{where}: {key or 'settings'}: {first['msg']} (got {first.get('input')!r:.200})") from None

    @classmethod
    def _fields_at(cls, location: tuple[str | int, ...]) -> list[str]:
        """The keys known at a place in nested settings, such as ("policy", "judge")."""
        for name in location:
            field = cls.model_fields.get(str(name))
            inner = [field.annotation, *get_args(field.annotation)] if field else []
            cls = next((kind for kind in inner if isinstance(kind, type) and issubclass(kind, Settings)), cls)
        return list(cls.model_fields)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping from a file; UserError where it is missing, unreadable or not a mapping."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8; give the path of a YAML file") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that does not exist
        mark = getattr(error, "problem_mark", None)
        at = f" in line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{path} is not YAML{at}: {reason}; mend it") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold a mapping of keys to values")
    return values
