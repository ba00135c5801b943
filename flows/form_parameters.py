"""Parameters of a run that came from a deployment: a form, an API call, a schedule. They are not to be trusted.

What a person gives on the command line may name any file that the person may read or write. A form's parameters are
somebody else's: their paths must lie in folders that the worker's owner allows, and their addresses be those of endpoints
that it knows, each with the variable of the key that belongs there. Without that a form could overwrite files of the worker,
read others into results, or send one provider's key to a host of its choice. docs/security.md
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from awpo.config import EndpointConfig
from awpo.endpoint import is_local
from awpo.endpoint_presets import endpoint_presets, read_endpoint
from awpo.errors import UserError
from tasks.layout import runs_root

ROOTS = "AWPO_ROOTS"
"""Environment variable of a worker: folders, separated by ":", that parameters may name beside the usual ones."""
ENDPOINTS = "AWPO_ENDPOINTS"
"""Environment variable of a worker: endpoints, separated by commas, that parameters may name beside those of the presets:
https://HOST[:PORT] or https://HOST[:PORT]=VARIABLE, where VARIABLE holds the key for it."""
DEFAULT_VARIABLE = str(EndpointConfig.model_fields["api_key_variable"].default)


@dataclass(frozen=True)
class Allowed:
    """What parameters may name: folders, resolved, and (origin, variable of the key) of endpoints elsewhere."""

    roots: tuple[Path, ...]
    endpoints: frozenset[tuple[str, str]]

    @classmethod
    def here(cls) -> Allowed:
        """Of this worker: the runs folder, its working folder, the presets, and what its environment adds."""
        told = [part for part in os.environ.get(ROOTS, "").split(os.pathsep) if part.strip()]
        roots = (runs_root(), Path.cwd(), *(Path(part.strip()) for part in told))
        presets = [read_endpoint(name) for name in endpoint_presets()]
        pairs = {(_origin(one.base_url), one.api_key_variable) for one in presets}
        for part in os.environ.get(ENDPOINTS, "").split(","):
            address, _, variable = part.strip().partition("=")
            if address:
                _check_entry(address)
                pairs.add((_origin(address), variable or DEFAULT_VARIABLE))
        return cls(tuple(root.resolve() for root in roots), frozenset(pairs))

    @property
    def variables(self) -> frozenset[str]:
        return frozenset({DEFAULT_VARIABLE} | {variable for _, variable in self.endpoints})


def _check_entry(address: str) -> None:
    """Raises UserError where an address of `ENDPOINTS` names no server: it would let through what names none either."""
    try:
        parts = urlsplit(address)
        named = parts.scheme.lower() in ("http", "https") and bool(parts.hostname)
    except ValueError:
        named = False
    if not named:
        raise UserError(f"{_line(address)} in {ENDPOINTS} names no server; write https://HOST[:PORT]=VARIABLE")


def check_parameters() -> None:
    """Raises UserError where this run came from a deployment and a parameter names what the worker does not allow.

    Does nothing outside of a run of a deployment. To be called first in a flow.
    """
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context and context.flow_run and context.flow_run.deployment_id:
        check(context.parameters or {}, Allowed.here())


def check(parameters: Mapping[str, Any], allowed: Allowed) -> None:
    """Raises UserError naming the first of the parameters that is not allowed."""
    try:
        leaves = list(_leaves(parameters, ()))
    except RecursionError:
        raise UserError("the parameters are nested too deeply; give flatter ones") from None
    for place, value in leaves:
        name = _line(".".join(place))
        if isinstance(value, Mapping):
            _check_endpoint(name, value, allowed)
        elif value.lower().startswith(("http://", "https://")):
            _check_address(name, value, allowed)
        else:
            _check_path(name, value, allowed.roots)


def _leaves(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every text in nested parameters with its place, and every endpoint as a mapping."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, Mapping):
        if "base_url" in value:
            yield place, value
        for key, inner in value.items():
            if key != "base_url":
                yield from _leaves(inner, (*place, str(key)))
    elif isinstance(value, str | os.PathLike):
        yield place, os.fspath(value)
    elif isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*place, str(index)))


def _check_endpoint(name: str, values: Mapping[str, Any], allowed: Allowed) -> None:
    address, variable = str(values["base_url"]), str(values.get("api_key_variable", DEFAULT_VARIABLE))
    if is_local(_host(name, address)):
        if variable not in allowed.variables:
            raise UserError(
                f"{name}.api_key_variable = {variable!r:.100} is no endpoint's on this worker; its owner may name one in {ENDPOINTS}"
            )
    elif (_origin(address), variable) not in allowed.endpoints:
        raise UserError(
            f"{name}: the key in {_line(variable)} is not for {_line(_origin(address))}; the worker's owner may allow it by "
            f"{ENDPOINTS}={_line(_origin(address))}={_line(variable)}"
        )


def _check_address(name: str, value: str, allowed: Allowed) -> None:
    known = {origin for origin, _ in allowed.endpoints}
    if not is_local(_host(name, value)) and _origin(value) not in known:
        raise UserError(
            f"{name}: {_line(_origin(value))} is no server that this worker knows; its owner may allow it by {ENDPOINTS}"
        )


def _check_path(name: str, value: str, roots: Sequence[Path]) -> None:
    """Any text may be taken for a path somewhere, so each must be one inside the roots: names and words are."""
    if value.startswith("~"):
        raise UserError(f"{name} = {_line(value)} begins with ~, which is not a folder here; give the whole path")
    try:
        place = Path(value).resolve()
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, links in a circle: nothing can be opened there
        return
    if not any(place.is_relative_to(root) for root in roots):
        raise UserError(
            f"{name} = {_line(value)} lies outside of the folders that a run from a form may use "
            f"({', '.join(map(str, roots))}); the worker's owner may add one by {ROOTS}"
        )


def _line(text: str) -> str:
    """A text as messages show it: one line, not too long."""
    return " ".join(text[:200].split())


def _host(name: str, address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:  # brackets that are no IPv6 address
        raise UserError(f"{name} = {_line(address)} is no address; give one such as https://host:8000/v1") from None


def _origin(address: str) -> str:
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}".lower()
