"""Multi-turn conversations, step by step, as the package's `inference_multi_turn_FC` holds them.

A turn opens with the user's message and goes on, step by step, as long as the model calls functions: each call is
executed and its result goes back as a tool's message. A step without calls, or whose calls cannot be read, ends the
turn. A model that still calls after MOST_STEPS executed steps of one turn is cut off, and no later turn is held.

Three things of the package are not copied: with held-out functions it appends its hint about the language to the
documents already shown once more; it adds a message of calls that cannot be read to the history as calls, on which
its template then fails (here it is added as text); and where a cut-off happens in the last turn it only looks at the
outcome, as is done here too, although its comment says that the whole item fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from awpo.chat import render_target
from awpo.events import Progress, silent
from awpo.types import Message
from evaluation.bfcl.data import BfclItem
from evaluation.bfcl.decode import decoded_calls, ends_turn, executable, without_thought
from evaluation.bfcl.process import CheckerProcess, NoAnswer
from evaluation.bfcl.tools import tools
from evaluation.generate import Generated, Generator, Question, Sampling

MOST_STEPS = 20
"""A turn is cut off when more steps than this were executed, so that one more is; the package's MAXIMUM_STEP_LIMIT."""
MORE_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"
"""The user's message of a turn at which held-out functions join; the package's words."""

Ending = Literal["", "done", "cut_off", "no_room", "failed", "not_executed"]


class Conversation:
    """One item's conversation. Ask `question`, give the answer to `take`, until `ending` says how it ended.

    Endings: "done" after the last turn, "cut_off" at the limit of steps, "no_room" where the history fills the
    model's context, "failed" where an answer did not come, "not_executed" where the checker's process gave no results.
    `answers` holds the answers turn by turn, `steps` the executed calls turn by turn.
    """

    def __init__(self, item: BfclItem) -> None:
        self.item = item
        self.ending: Ending = ""
        self.problem = ""
        self.answers: list[list[Generated]] = []
        self.steps: list[list[list[str]]] = []
        self._messages: list[Message] = []
        self._tools = list(tools(item.functions, item.language))
        self._open_turn()

    @property
    def question(self) -> Question:
        return Question(tuple(self._messages), tuple(self._tools))

    @property
    def texts(self) -> list[list[str]]:
        """The answers as text, turn by turn."""
        return [[answer_text(answer) for answer in turn] for turn in self.answers]

    @property
    def executed(self) -> list[list[str]]:
        """The executed steps of all turns, one after the other."""
        return [step for turn in self.steps for step in turn]

    def take(self, answer: Generated, checker: CheckerProcess) -> None:
        """Adds an answer and what follows from it: results of its calls, the next turn, or the end."""
        self.answers[-1].append(answer)
        if answer.finish in ("no_room", "failed"):
            self.ending = "failed" if answer.finish == "failed" else "no_room"
            return
        completion = answer.completion()
        calls = decoded_calls(completion, self.item.version)
        made = completion.tool_calls if calls else ()
        content = completion.content
        if completion.calls_malformed and not made:
            content = without_thought(answer.text).strip()
        self._messages.append(Message("assistant", content, made, completion.thought))
        texts = executable(calls)
        if ends_turn(texts):
            self._open_turn()
            return
        try:
            results = checker.execute(self.item, texts, self.executed)
        except NoAnswer as error:
            self.ending, self.problem = "not_executed", str(error)
            return
        self.steps[-1].append(texts)
        self._messages += [Message("tool", result, name=call.name) for call, result in zip(made, results, strict=True)]
        if len(self.steps[-1]) > MOST_STEPS:
            self.ending = "cut_off"

    def _open_turn(self) -> None:
        turn = len(self.answers)
        if turn == len(self.item.turns):
            self.ending = "done"
            return
        self.answers.append([])
        self.steps.append([])
        if joining := self.item.held_out.get(turn):
            self._tools += tools(joining, self.item.language, hint=self.item.version.held_out_hint)
            self._messages.append(Message("user", MORE_FUNCTIONS))
        self._messages += self.item.turns[turn]


def answer_text(answer: Generated) -> str:
    """An answer as text, with the calls that an endpoint returned as structure written out."""
    if answer.tool_calls is None:
        return answer.text
    completion = answer.completion()
    return render_target(Message("assistant", completion.content, completion.tool_calls), completion.thought)


def converse(
    generator: Generator,
    items: Sequence[BfclItem],
    sampling: Sampling,
    checker: CheckerProcess,
    *,
    progress: Progress = silent,
) -> list[Conversation]:
    """Holds the conversations of all items at once, so that each round's questions are answered together.

    `progress` counts ended conversations.
    """
    conversations = [Conversation(item) for item in items]
    while going := [conversation for conversation in conversations if not conversation.ending]:
        progress(len(items) - len(going), len(items), "conversations")
        answers = generator.answer([conversation.question for conversation in going], sampling)
        for conversation, (answer,) in zip(going, answers, strict=True):
            conversation.take(answer, checker)
    progress(len(items), len(items), "conversations")
    return conversations
