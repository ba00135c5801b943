"""Writes one dialogue of the embedded corpus: a plan of episodes, each a request and what it leads to.

Which tool is called, whether one is called at all and how many calls go into one step depends on the wording and
on the tools on offer; the values themselves are copied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from awpo.embedded.catalogue import Catalogue, Chain, Phrasings, ToolSpec, slots_of
from awpo.embedded.values import COMPUTED, VALUES, Value
from awpo.types import Message, Split, Tool, ToolCall

MOST_TOOLS = 4
LONGEST_REPLY = 10  # words
USUAL_SHARE = 0.85  # of the tools go by their usual names; the others make reading the list of tools worth it
SAME_DOMAIN_SHARE = 0.5  # of tools drawn beside another one

Values = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Plan:
    """Episodes in order, of which the first `steps` assistant messages are kept; `weight` in percent of dialogues."""

    weight: float
    steps: int
    episodes: tuple[str, ...]


PLANS = (
    Plan(15, 1, ("single",)),
    Plan(12, 1, ("pair",)),
    Plan(3, 1, ("triple",)),
    Plan(7, 1, ("question",)),
    Plan(6, 1, ("no_tool",)),
    Plan(2, 1, ("small_talk",)),
    Plan(6, 2, ("single",)),
    Plan(4, 2, ("pair",)),
    Plan(4, 2, ("question",)),
    Plan(9, 2, ("chain",)),
    Plan(3, 2, ("ordered",)),
    Plan(2.5, 2, ("failed_chain",)),
    Plan(0.5, 2, ("dismissed",)),
    Plan(1, 2, ("no_tool", "single")),
    Plan(6, 3, ("chain",)),
    Plan(3, 3, ("ordered",)),
    Plan(2, 3, ("question",)),
    Plan(3, 3, ("single", "follow_up")),
    Plan(1, 3, ("single", "thanks")),
    Plan(1, 3, ("failed_chain", "single")),
    Plan(2.5, 4, ("single", "chain")),
    Plan(2, 4, ("chain", "pair")),
    Plan(1, 4, ("pair", "chain")),
    Plan(2, 5, ("single", "chain")),
    Plan(1, 5, ("question", "follow_up")),
    Plan(0.5, 4, ("question", "thanks")),
)


@dataclass(frozen=True, slots=True)
class Draft:
    """A dialogue before it has an id, and the templates that its user sentences were made from."""

    tools: tuple[Tool, ...]
    messages: tuple[Message, ...]
    templates: tuple[str, ...]


class Unsuitable(Exception):
    """The plan cannot be followed with the tools drawn; another draw is made."""


@dataclass(frozen=True, slots=True)
class _Offer:
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


def as_clause(template: str) -> str:
    """A sentence as part of a longer one: no capital at its start (save "I") and no mark at its end."""
    clause = template.rstrip(".?!")
    return clause if clause.startswith(("I ", "I'")) else clause[:1].lower() + clause[1:]


@dataclass
class Writer:
    """Writes one dialogue; every choice comes from `rng`."""

    rng: Random
    split: Split
    catalogue: Catalogue
    messages: list[Message] = field(default_factory=list)
    templates: list[tuple[int, str]] = field(default_factory=list)  # with the place of their message
    offers: dict[str, _Offer] = field(default_factory=dict)
    barred: set[str] = field(default_factory=set)  # tools that must not be on offer
    domains: list[str] = field(default_factory=list)
    last: tuple[ToolSpec, Values] | None = None

    def write(self, plan: Plan) -> Draft:
        """Raises Unsuitable where the plan needs what the catalogue does not have."""
        for episode in plan.episodes:
            EPISODES[episode](self)
        self._add_distractors()
        tools = [offer.tool() for offer in self.offers.values()]
        self.rng.shuffle(tools)
        messages = self._first_steps(plan.steps)
        templates = tuple(template for place, template in self.templates if place < len(messages))
        return Draft(tuple(tools), messages, templates)

    # Episodes

    def single(self) -> None:
        """A request, its call, the result and a reply."""
        spec = self._pick(lambda spec: bool(spec.requests.of(self.split)))
        values = self._values(spec)
        self._say(self._choose(spec.requests), values)
        self._answer(spec, values, self._serve([(spec, values)]))

    def pair(self) -> None:
        """Two calls in one step: of one tool, or of two."""
        if self.rng.random() < 0.5:
            spec = self._pick(lambda spec: bool(spec.pairs.of(self.split)))
            first = self._values(spec)
            second = self._values(spec, avoid=first)
            both = {**first, **{f"{slot}_2": value for slot, value in second.items()}}
            self._say(self._choose(spec.pairs), both)
            served = [(spec, first), (spec, second)]
        else:
            served = self._join("joined", 2)
        self._answer_several(served, self._serve(served))

    def triple(self) -> None:
        """Three calls of three tools in one step."""
        served = self._join("joined_three", 3)
        self._answer_several(served, self._serve(served))

    def ordered(self) -> None:
        """Two calls, the second after the first's result."""
        first, second = self._join("ordered", 2)
        self._serve([first])
        self._answer(*second, self._serve([second]))

    def chain(self) -> None:
        """Two calls, the second with a value from the first's result."""
        chain, values = self._ask_for_chain()
        result = self._serve([(chain.first, values)])
        values = {**values, chain.slot: result[0][chain.result_key]}
        self._answer(chain.second, values, self._serve([(chain.second, values)]))

    def failed_chain(self) -> None:
        """A chain that ends early: its first call finds nothing."""
        chain, values = self._ask_for_chain()
        offer = self._offer(chain.first)
        self._assistant(calls=(offer.call(values),))
        self._tool_result(offer, {"error": self.rng.choice(("not found", "no match"))})
        value = values[next(iter(chain.first.parameters))]
        self._assistant(self.rng.choice(self.catalogue.replies["failure"]).format(value=value))

    def question(self) -> None:
        """A request that lacks a value: the assistant asks, the user gives it, the call follows."""
        spec, slot, values = self._ask_without_a_value()
        self._say(self._choose(self.catalogue.phrases["supply"]), {"value": values[slot]})
        self._answer(spec, values, self._serve([(spec, values)]))

    def dismissed(self) -> None:
        """A request that lacks a value, and which the user then drops."""
        self._ask_without_a_value()
        self._talk("dismissal")

    def follow_up(self) -> None:
        """The request before, once more with another value."""
        if self.last is None:
            raise Unsuitable("nothing to follow up")
        spec, values = self.last
        kinds = [parameter.kind for parameter in spec.parameters.values()]
        slots = [slot for slot, parameter in spec.parameters.items() if kinds.count(parameter.kind) == 1]
        if not slots:
            raise Unsuitable("another value could stand for either parameter")
        slot = self.rng.choice(slots)
        values = {**values, slot: self._value(spec, slot, {values[slot]})}
        self._say(self._choose(self.catalogue.phrases["follow_up"]), {"value": values[slot]})
        self._answer(spec, values, self._serve([(spec, values)]))

    def no_tool(self) -> None:
        """A request for a tool that is not on offer."""
        spec = self._pick(lambda spec: bool(spec.requests.of(self.split)), offer=False)
        self.barred |= {spec.id, *spec.similar}
        self._say(self._choose(spec.requests), self._values(spec))
        self._assistant(self.rng.choice(self.catalogue.replies["no_tool"]))

    def small_talk(self) -> None:
        self._talk("small_talk")

    def thanks(self) -> None:
        self._talk("thanks")

    # Parts of episodes

    def _talk(self, topic: str) -> None:
        self._say(self._choose(self.catalogue.phrases[topic]), {})
        self._assistant(self.rng.choice(self.catalogue.replies[topic]))

    def _join(self, how: str, count: int) -> list[tuple[ToolSpec, Values]]:
        """Several requests in one sentence."""
        served: list[tuple[ToolSpec, Values]] = []
        clauses: dict[str, str] = {}
        mark = "."
        for name in "abc"[:count]:
            spec = self._pick(lambda spec: bool(spec.requests.of(self.split)))
            values = self._values(spec)
            template = self._choose(spec.requests)
            clauses[name] = as_clause(template).format(**values)
            mark = "?" if template.endswith("?") else "."
            served.append((spec, values))
        sentence = self._choose(self.catalogue.phrases[how]).format(**clauses)
        self.messages.append(Message("user", sentence[0].upper() + sentence[1:] + mark))
        return served

    def _ask_for_chain(self) -> tuple[Chain, Values]:
        chains = [
            chain
            for chain in self.catalogue.chains
            if chain.requests.of(self.split) and self._usable(chain.first) and self._usable(chain.second)
        ]
        if not chains:
            raise Unsuitable("no chain is left")
        chain = self.rng.choice(chains)
        self._offer(chain.first)
        self._offer(chain.second)
        values = self._values(chain.first)
        values |= {slot: value for slot, value in self._values(chain.second).items() if slot != chain.slot}
        self._say(self._choose(chain.requests), values)
        return chain, values

    def _ask_without_a_value(self) -> tuple[ToolSpec, str, Values]:
        spec = self._pick(lambda spec: any(phrasings.of(self.split) for phrasings in spec.missing.values()))
        slot = self.rng.choice([slot for slot, phrasings in spec.missing.items() if phrasings.of(self.split)])
        values = self._values(spec)
        template = self._choose(spec.missing[slot])
        # A sentence may leave out more than `slot`; the user's answer can only give one value.
        if slots_of(template) != set(spec.parameters) - {slot}:
            raise Unsuitable("two values are missing")
        self._say(template, values)
        offer = self._offer(spec)
        # Only here is the reason not to be had from the messages: two tools may lack a value.
        thought = f"The user gave no {offer.parameters[slot]} for {offer.name}, so I ask for it."
        self._assistant(spec.parameters[slot].ask, thought=thought)
        return spec, slot, values

    def _serve(self, wanted: Sequence[tuple[ToolSpec, Values]]) -> list[Values]:
        """The calls, all in one step, and their results."""
        offers = [self._offer(spec) for spec, _ in wanted]
        self._assistant(calls=tuple(offer.call(values) for offer, (_, values) in zip(offers, wanted, strict=True)))
        results = []
        for offer, (spec, values) in zip(offers, wanted, strict=True):
            result: Values = {
                key: COMPUTED[kind[1:]](values) if kind.startswith("=") else self.rng.choice(VALUES[kind])
                for key, kind in spec.result.items()
            }
            self._tool_result(offer, result)
            results.append(result)
        self.last = wanted[-1]
        return results

    def _reply(self, spec: ToolSpec, values: Values, result: Values) -> str:
        return self.rng.choice(spec.replies).format(**{**values, **result})

    def _answer(self, spec: ToolSpec, values: Values, results: Sequence[Values]) -> None:
        self._assistant(self._reply(spec, values, results[0]))

    def _answer_several(self, served: Sequence[tuple[ToolSpec, Values]], results: Sequence[Values]) -> None:
        text = " ".join(
            self._reply(spec, values, result) for (spec, values), result in zip(served, results, strict=True)
        )
        if len(text.split()) > LONGEST_REPLY:
            text = self.rng.choice(self.catalogue.replies["several"])
        self._assistant(text)

    def _say(self, template: str, values: Mapping[str, Value]) -> None:
        self.messages.append(Message("user", template.format(**values)))

    def _assistant(
        self, content: str | None = None, calls: tuple[ToolCall, ...] = (), thought: str | None = None
    ) -> None:
        self.messages.append(Message("assistant", content, calls, thought))

    def _tool_result(self, offer: _Offer, result: Mapping[str, Value]) -> None:
        self.messages.append(Message("tool", json.dumps(result, ensure_ascii=False), name=offer.name))

    # Choices

    def _choose(self, phrasings: Phrasings) -> str:
        """A template that this split may use; noted in `templates`."""
        allowed = phrasings.of(self.split)
        if not allowed:
            raise Unsuitable("no phrasing for this split")
        template = self.rng.choice(allowed)
        self.templates.append((len(self.messages), template))
        return template

    def _usable(self, spec: ToolSpec) -> bool:
        """Whether the tool belongs to this split's tools, is new to the dialogue and unlike the others in it."""
        known = self.barred | set(self.offers)
        return spec.unseen == (self.split == "test_tools") and known.isdisjoint({spec.id, *spec.similar})

    def _pick(self, suits: Callable[[ToolSpec], bool], *, offer: bool = True) -> ToolSpec:
        """A tool new to the dialogue, more often than not of a domain that is already in it."""
        fitting = [spec for spec in self.catalogue.tools if self._usable(spec) and suits(spec)]
        near = [spec for spec in fitting if spec.domain in self.domains]
        if near and self.rng.random() < SAME_DOMAIN_SHARE:
            fitting = near
        if not fitting:
            raise Unsuitable("no tool is left")
        spec = self.rng.choice(fitting)
        if offer:
            self._offer(spec)
        else:
            self.domains.append(spec.domain)
        return spec

    def _offer(self, spec: ToolSpec) -> _Offer:
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
            self.offers[spec.id] = _Offer(spec, name, description, parameters)
            self.domains.append(spec.domain)
        return self.offers[spec.id]

    def _add_distractors(self) -> None:
        """Offers further tools, up to three or four in all and at least one."""
        if len(self.offers) >= MOST_TOOLS:
            raise Unsuitable("no room for a tool that is not needed")
        count = max(self.rng.choice((MOST_TOOLS - 1, MOST_TOOLS)), len(self.offers) + 1)
        while len(self.offers) < count:
            self._pick(lambda spec: True)

    def _values(self, spec: ToolSpec, avoid: Mapping[str, Value] | None = None) -> Values:
        """A value for each slot, all different from each other and from those of `avoid`."""
        taken = set((avoid or {}).values())
        values: Values = {}
        for slot in spec.parameters:
            values[slot] = self._value(spec, slot, taken)
            taken.add(values[slot])
        return values

    def _value(self, spec: ToolSpec, slot: str, taken: set[Value]) -> Value:
        return self.rng.choice([value for value in VALUES[spec.parameters[slot].kind] if value not in taken])

    def _first_steps(self, steps: int) -> tuple[Message, ...]:
        """The messages up to the assistant's `steps`-th."""
        places = [place for place, message in enumerate(self.messages) if message.role == "assistant"]
        return tuple(self.messages[: places[steps - 1] + 1])


EPISODES: Mapping[str, Callable[[Writer], None]] = {
    name: getattr(Writer, name) for name in sorted({episode for plan in PLANS for episode in plan.episodes})
}


def draw_plan(rng: Random) -> Plan:
    """A plan, drawn by weight."""
    return rng.choices(PLANS, [plan.weight for plan in PLANS])[0]


def write_draft(rng: Random, split: Split, catalogue: Catalogue, plan: Plan, attempts: int = 100) -> Draft:
    """One dialogue of the plan. Raises ValueError where no draw of tools suits it."""
    for _ in range(attempts):
        try:
            return Writer(rng, split, catalogue).write(plan)
        except Unsuitable as reason:
            last = reason
    raise ValueError(f"no dialogue of {plan} for {split}: {last}")
