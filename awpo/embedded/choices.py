"""What is drawn for one dialogue of the embedded corpus: tools, the names that they go by in it, and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from awpo.embedded.catalogue import Catalogue, ToolSpec
from awpo.embedded.values import VALUES, Value
from awpo.types import Split, Tool, ToolCall

MOST_TOOLS = 4
USUAL_SHARE = 0.85  # of the tools go by their usual names; the others make reading the list of tools worth it
SAME_DOMAIN_SHARE = 0.5  # of tools drawn beside another one

Values = dict[str, Value]


class Unsuitable(Exception):
    """The plan cannot be followed with the tools drawn; another draw is made."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool under the names it has in one dialogue."""

    spec: ToolSpec
    name: str
    description: str
    parameters: Mapping[str, str]  # slot -> parameter name

    def tool(self) -> Tool:
        properties = {name: {"type": self.spec.parameters[slot].type} for slot, name in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(self.parameters.values())}
        return Tool(self.name, self.description, schema)

    def call(self, values: Values) -> ToolCall:
        return ToolCall(self.name, {name: values[slot] for slot, name in self.parameters.items()})


@dataclass
class Choices:
    """Draws of one dialogue; every one comes from `rng`."""

    rng: Random
    split: Split
    catalogue: Catalogue
    offers: dict[str, Offer] = field(default_factory=dict)
    barred: set[str] = field(default_factory=set)  # tools that must not be on offer
    domains: list[str] = field(default_factory=list)

    def usable(self, spec: ToolSpec) -> bool:
        """Whether the tool belongs to this split's tools, is new to the dialogue and unlike the others in it."""
        known = self.barred | set(self.offers)
        return spec.unseen == (self.split == "test_tools") and known.isdisjoint({spec.id, *spec.similar})

    def pick(self, suits: Callable[[ToolSpec], bool], *, offer: bool = True) -> ToolSpec:
        """A tool new to the dialogue, more often than not of a domain that is already in it."""
        fitting = [spec for spec in self.catalogue.tools if self.usable(spec) and suits(spec)]
        near = [spec for spec in fitting if spec.domain in self.domains]
        if near and self.rng.random() < SAME_DOMAIN_SHARE:
            fitting = near
        if not fitting:
            raise Unsuitable("no tool is left")
        spec = self.rng.choice(fitting)
        if offer:
            self.offer(spec)
        else:
            self.domains.append(spec.domain)
        return spec

    def offer(self, spec: ToolSpec) -> Offer:
        """The tool under the names that it has in this dialogue; drawn when it is first needed."""
        if spec.id not in self.offers:
            usual = self.rng.random() < USUAL_SHARE
            # One style for all parameters, so that "a" goes with "b" and "from" with "to".
            style = 0 if usual else self.rng.randrange(12)
            parameters = {
                slot: parameter.names[style % len(parameter.names)] for slot, parameter in spec.parameters.items()
            }
            name = spec.names[0] if usual else self.rng.choice(spec.names)
            description = spec.descriptions[0] if usual else self.rng.choice(spec.descriptions)
            self.offers[spec.id] = Offer(spec, name, description, parameters)
            self.domains.append(spec.domain)
        return self.offers[spec.id]

    def add_distractors(self) -> None:
        """Offers further tools, up to three or four in all and at least one."""
        if len(self.offers) >= MOST_TOOLS:
            raise Unsuitable("no room for a tool that is not needed")
        count = max(self.rng.choice((MOST_TOOLS - 1, MOST_TOOLS)), len(self.offers) + 1)
        while len(self.offers) < count:
            self.pick(lambda spec: True)

    def values(self, spec: ToolSpec, avoid: Mapping[str, Value] | None = None) -> Values:
        """A value for each slot, all different from each other and from those of `avoid`."""
        taken = set((avoid or {}).values())
        values: Values = {}
        for slot in spec.parameters:
            values[slot] = self.value(spec, slot, taken)
            taken.add(values[slot])
        return values

    def value(self, spec: ToolSpec, slot: str, taken: set[Value]) -> Value:
        return self.rng.choice([value for value in VALUES[spec.parameters[slot].kind] if value not in taken])
