"""Version 4's memory categories: a model fills a memory in conversations, and is asked later for what it kept there.

As the package has it: each scenario's conversations are held one after the other, on the memory that the one before
left; every question then starts from the last of them, and what it changes is lost. A conversation opens with a
system message that tells the model of its role and shows what is always in its sight. A conversation that breaks off
(its history fills the context, its calls cannot be executed) leaves the memory as it was before it. The scenarios
are independent of each other, so that their n-th conversations are held at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from awpo.events import Progress, silent
from awpo.types import Message
from evaluation.bfcl.conversation import Conversation, converse
from evaluation.bfcl.data import BfclItem, read_sessions
from evaluation.bfcl.package import prompt_texts
from evaluation.bfcl.process import CheckerProcess, Memory, NoAnswer
from evaluation.generate import Generator, Sampling

EMPTY = "null"
"""The snapshot of a memory that nothing was ever written to."""
_ROLES, _TWO_PARTS, _ONE_PART = (
    "MEMORY_AGENT_SETTINGS",
    "MEMORY_BACKEND_INSTRUCTION_CORE_ARCHIVAL",
    "MEMORY_BACKEND_INSTRUCTION_UNIFIED",
)


def converse_with_memory(
    generator: Generator,
    items: Sequence[BfclItem],
    sampling: Sampling,
    checker: CheckerProcess,
    *,
    progress: Progress = silent,
) -> tuple[list[Conversation], dict[str, int]]:
    """The questions' conversations, and numbers about those in which the memories were filled, generated tokens among
    them: no item stands for these conversations.

    Where an answer in a scenario's conversations did not come, its questions have the ending "failed" without having
    been asked, since its memory is not what the model would have made it.
    """
    scenarios = list(dict.fromkeys(item.scenario for item in items))
    chains = {scenario: read_sessions(items[0].category, scenario, items[0].version) for scenario in scenarios}
    memories = dict.fromkeys(scenarios, EMPTY)
    failed: dict[str, Conversation] = {}
    held: list[Conversation] = []
    for number in range(max(map(len, chains.values()))):
        going = [chain[number] for name, chain in chains.items() if number < len(chain) and name not in failed]
        progress(0, len(items), f"conversations that fill memories, round {number + 1}")
        for session in converse(generator, [_opened(item, memories, checker) for item in going], sampling, checker):
            scenario = session.item.scenario
            held.append(session)
            if session.ending == "failed":
                failed[scenario] = session
            elif session.ending in ("done", "cut_off"):
                kept = _remember(session.item, checker, session.executed)
                memories[scenario] = kept.snapshot if kept else memories[scenario]
    asked = [_opened(item, memories, checker) for item in items if item.scenario not in failed]
    answered = iter(converse(generator, asked, sampling, checker, progress=progress))
    found = [_not_asked(item, failed[item.scenario]) if item.scenario in failed else next(answered) for item in items]
    numbers = {
        "memory_conversations": len(held),
        "memory_conversations_broken_off": sum(session.ending in ("no_room", "not_executed") for session in held),
        "memory_tokens": sum(answer.tokens for session in held for turn in session.answers for answer in turn),
    }
    return found, numbers


def _opened(item: BfclItem, memories: Mapping[str, str], checker: CheckerProcess) -> BfclItem:
    """An item that starts from its scenario's memory, with the system message about it."""
    (of_class,) = item.involved_classes
    item = dataclasses.replace(item, initial_config={of_class: {"snapshot": memories[item.scenario]}})
    texts = prompt_texts(item.version, (_ROLES, _TWO_PARTS, _ONE_PART))
    seen = _remember(item, checker)
    system = texts[_ONE_PART if item.category == "memory_rec_sum" else _TWO_PARTS].format(
        scenario_setting=texts[_ROLES][item.scenario], memory_content=seen.context if seen else ""
    )
    first, *rest = item.turns
    if first[0].role == "system":
        system, first = f"{system}\n\n{first[0].content}", first[1:]
    return dataclasses.replace(item, turns=((Message("system", system), *first), *rest))


def _remember(item: BfclItem, checker: CheckerProcess, executed: Sequence[Sequence[str]] = ()) -> Memory | None:
    """What an item's memory holds; None where the checkers' process gave no answer, which it counts as a failure."""
    try:
        return checker.remember(item, executed)
    except NoAnswer:
        return None


def _not_asked(item: BfclItem, broken: Conversation) -> Conversation:
    """The conversation of a question whose memory could not be filled, since a request for it failed."""
    conversation = Conversation(item)
    conversation.ending = "failed"
    conversation.answers[-1].append(broken.answers[-1][-1])
    return conversation
