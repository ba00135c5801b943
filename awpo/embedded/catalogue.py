"""The tools of the embedded corpus, read from the data files in `domains/` and checked.

A domain file holds `tools` (by name) and `chains`. A tool has aliases, descriptions, parameters (names to choose
from, the list of its values, the question for it), requests (`held_out`: those kept for the split
test_phrasings), `pairs` (two calls of the tool in one sentence; the second value of a slot is `{slot_2}`),
`missing` (requests without one parameter), a result and short replies. A chain is a request that needs a first
tool for an argument of the second. Tools marked `unseen` are those of the split test_tools.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from awpo.embedded.values import COMPUTED, VALUES, json_type
from awpo.settings import load_yaml


@dataclass(frozen=True, slots=True)
class Phrasings:
    """Sentences with `{slots}`; the held-out ones appear in the split test_phrasings and nowhere else."""

    known: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()

    def of(self, split: str) -> tuple[str, ...]:
        return self.held_out if split == "test_phrasings" else self.known


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter: the names it may go by, the list its values come from, and the question for it."""

    names: tuple[str, ...]
    kind: str
    type: str
    ask: str


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """Everything known of a tool. The first of `names` identifies it."""

    domain: str
    unseen: bool
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: Mapping[str, Parameter]
    requests: Phrasings
    pairs: Phrasings
    missing: Mapping[str, Phrasings]
    result: Mapping[str, str]
    replies: tuple[str, ...]
    similar: tuple[str, ...]

    @property
    def id(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Chain:
    """A request that takes two calls: `result_key` of the first tool's result is the second's argument `slot`."""

    first: ToolSpec
    second: ToolSpec
    result_key: str
    slot: str
    requests: Phrasings

    @property
    def unseen(self) -> bool:
        return self.first.unseen


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All tools, chains and the phrasings that belong to no tool."""

    tools: tuple[ToolSpec, ...]
    chains: tuple[Chain, ...]
    phrases: Mapping[str, Phrasings]
    replies: Mapping[str, tuple[str, ...]]


def slots_of(template: str) -> set[str]:
    """The names of the slots in a template."""
    return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def _phrasings(known: Iterable[str] | None, held_out: Iterable[str] | None) -> Phrasings:
    return Phrasings(tuple(known or ()), tuple(held_out or ()))


def _tool(domain: str, name: str, raw: Mapping[str, Any]) -> ToolSpec:
    parameters = {
        slot: Parameter(
            tuple(values["names"]), values["values"], values.get("type") or json_type(values["values"]), values["ask"]
        )
        for slot, values in raw["parameters"].items()
    }
    missing, held_out = raw.get("missing", {}), raw.get("missing_held_out", {})
    return ToolSpec(
        domain=domain,
        unseen=bool(raw.get("unseen")),
        names=(name, *raw["aliases"]),
        descriptions=tuple(raw["descriptions"]),
        parameters=parameters,
        requests=_phrasings(raw["requests"], raw.get("held_out")),
        pairs=_phrasings(raw.get("pairs"), raw.get("pairs_held_out")),
        missing={slot: _phrasings(missing.get(slot), held_out.get(slot)) for slot in parameters if slot in missing},
        result=dict(raw["result"]),
        replies=tuple(raw["replies"]),
        similar=tuple(raw.get("similar", ())),
    )


def _chain(raw: Mapping[str, Any], tools: Mapping[str, ToolSpec]) -> Chain:
    ((result_key, slot),) = raw["link"].items()
    requests = _phrasings(raw["requests"], raw.get("held_out"))
    return Chain(tools[raw["first"]], tools[raw["second"]], result_key, slot, requests)


def _check_slots(where: str, templates: Iterable[str], wanted: set[str]) -> None:
    for template in templates:
        if template.startswith("{") or slots_of(template) != wanted:
            raise ValueError(
                f"{where}: {template!r} must begin with a word and have exactly the slots {sorted(wanted)}"
            )


def _check_tool(tool: ToolSpec) -> None:
    slots = set(tool.parameters)
    _check_slots(tool.id, tool.requests.known + tool.requests.held_out, slots)
    for slot, phrasings in tool.missing.items():
        for template in phrasings.known + phrasings.held_out:
            if slot in slots_of(template) or not slots_of(template) <= slots:
                raise ValueError(f"{tool.id}: {template!r} must lack {slot} and name only {sorted(slots)}")
    _check_slots(
        tool.id, tool.pairs.known + tool.pairs.held_out, {f"{slot}{end}" for slot in slots for end in ("", "_2")}
    )
    for reply in tool.replies:
        if not slots_of(reply) <= slots | set(tool.result):
            raise ValueError(f"{tool.id}: the reply {reply!r} names what is neither argument nor result")
    for kind in tool.result.values():
        if kind not in VALUES and kind.removeprefix("=") not in COMPUTED:
            raise ValueError(f"{tool.id}: no list of values {kind!r}")


def _check_chain(chain: Chain) -> None:
    where = f"{chain.first.id} -> {chain.second.id}"
    wanted = set(chain.first.parameters) | (set(chain.second.parameters) - {chain.slot})
    if set(chain.first.parameters) & (set(chain.second.parameters) - {chain.slot}):
        raise ValueError(f"{where}: both tools have a slot of the same name")
    if chain.result_key not in chain.first.result or chain.slot not in chain.second.parameters:
        raise ValueError(f"{where}: the link names no result or no parameter")
    _check_slots(where, chain.requests.known + chain.requests.held_out, wanted)


@functools.cache
def load_catalogue() -> Catalogue:
    """Reads and checks all data files, domains in order of name. Raises ValueError where one is inconsistent."""
    root = resources.files("awpo.embedded")
    tools: dict[str, ToolSpec] = {}
    chains: list[Chain] = []
    for path in sorted((root / "domains").iterdir(), key=lambda item: item.name):
        if not path.name.endswith(".yaml"):
            continue
        raw = load_yaml(path.read_text("utf-8"))
        domain = path.name.removesuffix(".yaml")
        tools |= {name: _tool(domain, name, values) for name, values in raw["tools"].items()}
        chains += [_chain(values, tools) for values in raw.get("chains", ())]
    for tool in tools.values():
        _check_tool(tool)
    for chain in chains:
        _check_chain(chain)
    shared = load_yaml((root / "phrases.yaml").read_text("utf-8"))
    replies = {name: tuple(values) for name, values in shared.pop("replies").items()}
    phrases = {name: _phrasings(values["known"], values["held_out"]) for name, values in shared.items()}
    return Catalogue(tuple(tools.values()), tuple(chains), phrases, replies)
