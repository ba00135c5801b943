"""What benchmarks and sources of completions say to each other: a question, how to sample, what came back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from awpo.chat import parse_completion
from awpo.events import Progress, silent
from awpo.types import Completion, Instance, Message, Tool, ToolCall, content_hash

Finish = Literal["stop", "length", "no_room", "failed"]


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that waits for an assistant's turn, and the tools on offer."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()

    @staticmethod
    def of(instance: Instance) -> Question:
        return Question(instance.prompt, instance.tools)

    @property
    def hash(self) -> str:
        """Content hash of messages and tools, 16 hex digits: equal questions are equal whoever is asked."""
        return content_hash([[tool.to_json() for tool in self.tools], [message.to_json() for message in self.messages]])


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a question is answered: `samples` draws at `temperature` (0: greedy), after one greedy answer more where
    `with_greedy` is set. `max_tokens` limits one answer; the first of the texts in `stop` ends it and is cut off."""

    samples: int = 1
    temperature: float = 0.0
    max_tokens: int = 160
    seed: int = 0
    with_greedy: bool = False
    stop: tuple[str, ...] = ()

    @property
    def answers(self) -> int:
        """The number of answers to each question."""
        return self.samples + self.with_greedy


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer: its text with the tags kept, and the tokens generated, the closing one included.

    `finish` tells why it ended: "stop" at an end token or a stop text, "length" at the limit, "no_room" where the
    prompt alone fills the model's context (text empty, 0 tokens), and "failed" where no answer came: `failure` says
    why, and the answer must not be scored. `seconds` is the time from asking to the last token; it takes no part in
    comparisons. `tool_calls` are the calls that an endpoint returned as structure, None where they stand in the text.
    """

    text: str
    tokens: int
    finish: Finish = "stop"
    prompt_tokens: int = 0
    seconds: float = field(default=0.0, compare=False)
    tool_calls: tuple[ToolCall, ...] | None = None
    failure: str = ""

    def completion(self) -> Completion:
        """The answer taken apart; structured calls stand for those in the text."""
        read = parse_completion(self.text)
        return read if self.tool_calls is None else replace(read, tool_calls=self.tool_calls)


class Generator(Protocol):
    """A source of answers: a checkpoint on this machine, or an endpoint."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """All that decides the answers beside question and sampling: the model's fingerprint, prompt format, thinking."""
        ...

    def answer(
        self, questions: Sequence[Question], sampling: Sampling, *, progress: Progress = silent
    ) -> list[list[Generated]]:
        """`sampling.answers` answers to each question, in the order of `questions`, the greedy one first.

        The same question twice in the list is two draws. A question that could not be asked has answers that are
        "failed"; an error that all other questions would meet, too, is raised as UserError. `progress` counts
        answers.
        """
        ...

    def room(self, question: Question) -> int | None:
        """The tokens that the model's context leaves for an answer, at least 0; None where nobody tells."""
        ...
