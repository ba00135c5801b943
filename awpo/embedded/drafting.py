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
from awpo.embedded.choices import Choices, Offer, Unsuitable, Values
from awpo.embedded.plans import PLANS, Plan
from awpo.embedded.values import COMPUTED, VALUES, Value
from awpo.types import Message, Split, Tool, ToolCall

LONGEST_REPLY = 10  # words


@dataclass(frozen=True, slots=True)
class Draft:
    """A dialogue before it has an id, and the templates that its user sentences were made from."""

    tools: tuple[Tool, ...]
    messages: tuple[Message, ...]
    templates: tuple[str, ...]


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
    last: tuple[ToolSpec, Values] | None = None
    choices: Choices = field(init=False)

    def __post_init__(self) -> None:
        self.choices = Choices(self.rng, self.split, self.catalogue)

    def write(self, plan: Plan) -> Draft:
        """Raises Unsuitable where the plan needs what the catalogue does not have."""
        for episode in plan.episodes:
            EPISODES[episode](self)
        self.choices.add_distractors()
        tools = [offer.tool() for offer in self.choices.offers.values()]
        self.rng.shuffle(tools)
        messages = self._first_steps(plan.steps)
        templates = tuple(template for place, template in self.templates if place < len(messages))
        return Draft(tuple(tools), messages, templates)

    # Episodes

    def single(self) -> None:
        """A request, its call, the result and a reply."""
        spec = self.choices.pick(lambda spec: bool(spec.requests.of(self.split)))
        values = self.choices.values(spec)
        self._say(self._choose(spec.requests), values)
        self._answer(spec, values, self._serve([(spec, values)]))

    def pair(self) -> None:
        """Two calls in one step: of one tool, or of two."""
        if self.rng.random() < 0.5:
            spec = self.choices.pick(lambda spec: bool(spec.pairs.of(self.split)))
            first = self.choices.values(spec)
            second = self.choices.values(spec, avoid=first)
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
        offer = self.choices.offer(chain.first)
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
        values = {**values, slot: self.choices.value(spec, slot, {values[slot]})}
        self._say(self._choose(self.catalogue.phrases["follow_up"]), {"value": values[slot]})
        self._answer(spec, values, self._serve([(spec, values)]))

    def no_tool(self) -> None:
        """A request for a tool that is not on offer."""
        spec = self.choices.pick(lambda spec: bool(spec.requests.of(self.split)), offer=False)
        self.choices.barred |= {spec.id, *spec.similar}
        self._say(self._choose(spec.requests), self.choices.values(spec))
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
            spec = self.choices.pick(lambda spec: bool(spec.requests.of(self.split)))
            values = self.choices.values(spec)
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
            if chain.requests.of(self.split) and self.choices.usable(chain.first) and self.choices.usable(chain.second)
        ]
        if not chains:
            raise Unsuitable("no chain is left")
        chain = self.rng.choice(chains)
        self.choices.offer(chain.first)
        self.choices.offer(chain.second)
        values = self.choices.values(chain.first)
        values |= {slot: value for slot, value in self.choices.values(chain.second).items() if slot != chain.slot}
        self._say(self._choose(chain.requests), values)
        return chain, values

    def _ask_without_a_value(self) -> tuple[ToolSpec, str, Values]:
        spec = self.choices.pick(lambda spec: any(phrasings.of(self.split) for phrasings in spec.missing.values()))
        slot = self.rng.choice([slot for slot, phrasings in spec.missing.items() if phrasings.of(self.split)])
        values = self.choices.values(spec)
        template = self._choose(spec.missing[slot])
        # A sentence may leave out more than `slot`; the user's answer can only give one value.
        if slots_of(template) != set(spec.parameters) - {slot}:
            raise Unsuitable("two values are missing")
        self._say(template, values)
        offer = self.choices.offer(spec)
        # Only here is the reason not to be had from the messages: two tools may lack a value.
        thought = f"The user gave no {offer.parameters[slot]} for {offer.name}, so I ask for it."
        self._assistant(spec.parameters[slot].ask, thought=thought)
        return spec, slot, values

    def _serve(self, wanted: Sequence[tuple[ToolSpec, Values]]) -> list[Values]:
        """The calls, all in one step, and their results."""
        offers = [self.choices.offer(spec) for spec, _ in wanted]
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

    def _tool_result(self, offer: Offer, result: Mapping[str, Value]) -> None:
        self.messages.append(Message("tool", json.dumps(result, ensure_ascii=False), name=offer.name))

    def _choose(self, phrasings: Phrasings) -> str:
        """A template that this split may use; noted in `templates`."""
        allowed = phrasings.of(self.split)
        if not allowed:
            raise Unsuitable("no phrasing for this split")
        template = self.rng.choice(allowed)
        self.templates.append((len(self.messages), template))
        return template

    def _first_steps(self, steps: int) -> tuple[Message, ...]:
        """The messages up to the assistant's `steps`-th."""
        places = [place for place, message in enumerate(self.messages) if message.role == "assistant"]
        return tuple(self.messages[: places[steps - 1] + 1])


EPISODES: Mapping[str, Callable[[Writer], None]] = {
    name: getattr(Writer, name) for name in sorted({episode for plan in PLANS for episode in plan.episodes})
}


def write_draft(rng: Random, split: Split, catalogue: Catalogue, plan: Plan, attempts: int = 100) -> Draft:
    """One dialogue of the plan. Raises ValueError where no draw of tools suits it."""
    for _ in range(attempts):
        try:
            return Writer(rng, split, catalogue).write(plan)
        except Unsuitable as reason:
            last = reason
    raise ValueError(f"no dialogue of {plan} for {split}: {last}")
