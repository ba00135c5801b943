"""The official prompt: one user message with five worked exemplars of the category and the question.

Text as in evaluate_from_api.py of TIGER-AI-Lab/MMLU-Pro (commit f418b116db00b065c2aea046518d8fcf74d39872), the script
for chat models. Where it doesn't fit, exemplars are dropped as in evaluate_from_local.py, which is for raw prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from awpo.types import Message
from evaluation.generate import Question
from evaluation.mmlu_pro.data import Exemplar, MmluItem
from evaluation.mmlu_pro.extraction import LETTERS

EXEMPLARS = 5
_THINK = "Let's think step by step."
_TASK = (
    "The following are multiple choice questions (with answers) about {}. Think step by step and then output the "
    'answer in the format of "The answer is (X)" at the end.\n\n'
)


def prompt(item: MmluItem, exemplars: Sequence[Exemplar]) -> Question:
    """The question with these exemplars before it."""
    worked = "".join(_block(exemplar.question, exemplar.options, exemplar.reasoning) for exemplar in exemplars)
    return Question((Message("user", _TASK.format(item.category) + worked + _block(item.question, item.options)),))


def _block(question: str, options: Sequence[str], reasoning: str = _THINK) -> str:
    lines = "".join(f"{LETTERS[index]}. {option}\n" for index, option in enumerate(options))
    return f"Question: {question}\nOptions: {lines}Answer: {reasoning}\n\n"


def fitting(
    item: MmluItem, exemplars: Sequence[Exemplar], room: Callable[[Question], int | None], max_tokens: int
) -> tuple[Question, int]:
    """The prompt with the most exemplars, at most five, that leaves room for an answer, and their number.

    As in the official script the last exemplar goes first, and the room must be more than `max_tokens`. Where even
    none leaves it, the prompt has none (the official script would never end); where nobody knows the room, all.
    """
    for count in range(min(EXEMPLARS, len(exemplars)), -1, -1):
        question = prompt(item, exemplars[:count])
        left = room(question)
        if left is None or left > max_tokens:
            break
    return question, count
