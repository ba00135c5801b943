"""Which letter an answer gives, by the official rules, and the official fallback where it gives none.

TIGER-AI-Lab/MMLU-Pro at f418b116db00b065c2aea046518d8fcf74d39872: evaluate_from_api.py and evaluate_from_local.py have
the same three rules, tried in order; evaluate_from_api.py takes bold marks (`**`) out of the answer first, as here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

LETTERS = "ABCDEFGHIJ"
SEED = 12345
"""The seed of the official scripts' random letters."""

_ANSWER_IS = re.compile(r"answer is \(?([A-J])\)?")
_ANSWER = re.compile(r"[aA]nswer:(?=\s*([A-J]))")
_LETTER = re.compile(r"\b[A-J]\b")


def extract(text: str) -> tuple[str, str] | None:
    """(letter, rule) of an answer, or None where no rule finds one. The rules, with their oddities:

    1. "answer is": the first `answer is X` or `answer is (X)`, X from A to J in capitals. X may begin a word
       ("the answer is Boron" gives B).
    2. "answer:": on the first line that has `answer: X`, or `Answer: X`, the last of them; X may begin a word, too, and
       may stand on the next line.
    3. "letter": the last of A to J that stands by itself, be it the article "A" or the pronoun "I".
    """
    text = text.replace("**", "")
    if found := _ANSWER_IS.search(text):
        return found[1], "answer is"
    if letter := _after_answer(text):
        return letter, "answer:"
    letters = _LETTER.findall(text)
    return (letters[-1], "letter") if letters else None


def _after_answer(text: str) -> str | None:
    """The letter of rule 2. The official pattern begins with `.*`, which takes quadratic time on a long line."""
    letter, line_end = None, -1
    for found in _ANSWER.finditer(text):
        if letter is None:
            line_end = text.find("\n", found.start())
        elif 0 <= line_end < found.start():
            break
        letter = found[1]
    return letter


def random_credit(unparsed: Iterable[Sequence[tuple[int, int]]]) -> list[int]:
    """How many unparsed answers evaluate_from_local.py would count as right, category by category.

    `unparsed` holds per category, in alphabetical order, (number of options, answer_index) of each unparsed answer in
    the data's order. An index is drawn uniformly for each; the script scores every category twice with one generator
    and reports the second time.
    """
    generator = random.Random(SEED)
    credit = []
    for category in unparsed:
        for _ in range(2):
            hits = sum(generator.randint(0, options - 1) == index for options, index in category)
        credit.append(hits)
    return credit
