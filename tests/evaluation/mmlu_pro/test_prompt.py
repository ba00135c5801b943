"""The official prompt of all 12,032 questions, and what goes where it does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from evaluation.generate import Question
from evaluation.mmlu_pro.data import CATEGORIES, Exemplar, MmluItem, MmluPro, read
from evaluation.mmlu_pro.prompt import fitting, prompt

ITEM = MmluItem("7", "What is 1 + 1?", ("1", "2", "3"), "B", 1, "math")
EXEMPLARS = [
    Exemplar(f"Exemplar {n}?", ("yes", "no"), f"Let's think step by step. {n}. The answer is (A).") for n in range(5)
]


@pytest.fixture(scope="module")
def known(shared_data: Path) -> MmluPro:
    return read(shared_data)


def text(question: Question) -> str:
    (message,) = question.messages
    assert (message.role, question.tools) == ("user", ())
    return message.content or ""


def test_the_text_of_a_prompt() -> None:
    assert text(prompt(ITEM, EXEMPLARS[:1])) == (
        "The following are multiple choice questions (with answers) about math. Think step by step and then output the "
        'answer in the format of "The answer is (X)" at the end.\n\n'
        "Question: Exemplar 0?\nOptions: A. yes\nB. no\nAnswer: Let's think step by step. 0. The answer is (A).\n\n"
        "Question: What is 1 + 1?\nOptions: A. 1\nB. 2\nC. 3\nAnswer: Let's think step by step.\n\n"
    )


def test_all_questions_render(known: MmluPro) -> None:
    count = 0
    for category in CATEGORIES:
        worked = "".join(f"Answer: {exemplar.reasoning}\n\n" for exemplar in known.exemplars[category])
        for item in known.questions[category]:
            shown = text(prompt(item, known.exemplars[category]))
            head, _, own = shown.rpartition(f"Question: {item.question}\nOptions: A. {item.options[0]}\n")
            assert f"(with answers) about {category}." in head
            assert own.endswith("Answer: Let's think step by step.\n\n")
            assert f"{item.answer}. {item.options['ABCDEFGHIJ'.index(item.answer)]}\n" in f"A. {item.options[0]}\n{own}"
            count += 1
        assert all(part in head for part in worked.split("\n\n") if part)
    assert count == 12_032


def room_for(letters: int) -> Callable[[Question], int]:
    """A model whose context holds so many letters."""
    return lambda question: max(0, letters - len(text(question)))


def test_the_last_exemplars_are_dropped_until_more_than_an_answer_is_left() -> None:
    lengths = [len(text(prompt(ITEM, EXEMPLARS[:count]))) for count in range(6)]
    for count in range(6):
        exact = lengths[count] + 100
        question, kept = fitting(ITEM, EXEMPLARS, room_for(exact + 1), 100)
        assert (kept, question) == (count, prompt(ITEM, EXEMPLARS[:count]))
        # As much room as an answer may take is not more than it: the official comparison is "less than".
        assert fitting(ITEM, EXEMPLARS, room_for(exact), 100)[1] == max(0, count - 1)


def test_a_question_too_long_by_itself_is_asked_without_exemplars() -> None:
    assert fitting(ITEM, EXEMPLARS, room_for(10), 100) == (prompt(ITEM, []), 0)


def test_where_nobody_knows_the_room_all_exemplars_stay() -> None:
    assert fitting(ITEM, EXEMPLARS, lambda question: None, 100) == (prompt(ITEM, EXEMPLARS), 5)


def test_a_question_keeps_what_looks_like_a_place_holder() -> None:
    item = MmluItem("8", "Is {0} in {x}?", ("{}", "no"), "A", 0, "computer science")
    assert "Question: Is {0} in {x}?\nOptions: A. {}\n" in text(prompt(item, []))


def test_options_that_fill_up_are_left_out(tmp_path: Path, shared_data: Path) -> None:
    """The hub's lists hold "N/A" where a question has fewer than ten options."""
    folder = tmp_path / "mmlu-pro"
    folder.mkdir()
    (folder / "validation.jsonl").write_bytes((shared_data / "mmlu-pro" / "validation.jsonl").read_bytes())
    (folder / "test.jsonl.gz").write_bytes((shared_data / "mmlu-pro" / "test.jsonl.gz").read_bytes())
    lines = (folder / "validation.jsonl").read_text("utf-8").splitlines()
    row = json.loads(lines[0])
    row["options"] = ["N/A", *row["options"][1:-1], "N/A"]
    (folder / "validation.jsonl").write_text("\n".join([json.dumps(row), *lines[1:]]), "utf-8")
    changed = read(tmp_path).exemplars[row["category"]][0]
    assert changed.options == tuple(row["options"][1:-1])
