"""Which letter the official rules give for 200 answers, written by hand; what random credit they would give."""

from __future__ import annotations

import random

import pytest

from evaluation.mmlu_pro.extraction import extract, random_credit

# (answer, letter that the official rules give or "" for none), grouped by what is notable about them.
ASKED_FOR = [  # as the exemplars write it
    ("The answer is (A).", "A"),
    ("The answer is (J).", "J"),
    ("Let's think step by step. 2 + 2 = 4. The answer is (D).", "D"),
    ("The answer is (C)", "C"),
    ("So the answer is (F).\n", "F"),
    ("the answer is (E).", "E"),
    ("Therefore, the answer is (G).\n\nQuestion: What is next?", "G"),
    ("We refer to Wikipedia articles for help. The answer is (H).", "H"),
    ("The answer is (B)!", "B"),
    ("\n\nThe answer is (I).\n\n", "I"),
    ("A: Let's think step by step. The only even prime is 2. The answer is (C).", "C"),
    ("Thus the correct answer is (B).", "B"),
    ("The best answer is (E).", "E"),
    ("My final answer is (J).", "J"),
    ("The right answer is (A), since all others fail.", "A"),
]
WITHOUT_BRACKETS = [
    ("The answer is A.", "A"),
    ("The answer is A", "A"),
    ("the answer is J", "J"),
    ("So the answer is C, the third option.", "C"),
    ("The answer is D: 12 metres.", "D"),
    ("answer is B", "B"),
    ("I believe the answer is E because pressure falls.", "E"),
    ("The answer is F)", "F"),
    ("The answer is (G", "G"),
    ("The answer is H\n", "H"),
    ("the correct answer is I. The rest are wrong.", "I"),
    ("Hence answer is B.", "B"),
]
SEVERAL = [  # the first "answer is" decides
    ("The answer is (A). Wait, no: the answer is (B).", "A"),
    ("The answer is (C).\n\nQuestion: Another one?\nThe answer is (D).", "C"),
    ("At first the answer is (E) seems right, but the answer is (F).", "E"),
    ("The answer is (B) or the answer is (C).", "B"),
    ("The answer is (B) or (C).", "B"),
    ("The answer is (A, B).", "A"),
    ("The answer is A and D.", "A"),
    ("Answer: (C)\nThe answer is (D).", "D"),
    ("Answer: C\nSo the answer is (D).", "D"),
    ("Options A and B are out. The answer is (H).", "H"),
    ("The answer is not clear. The answer is (G).", "G"),
    ("If x > 0 the answer is (A), else the answer is (I); x = 3.", "A"),
    ("The answer is (J). The answer is (J). The answer is (J).", "J"),
]
CASE = [  # small letters are no letters, and "Answer is" is not "answer is"
    ("the answer is (a).", ""),
    ("the answer is c", ""),
    ("answer: b", ""),
    ("The Answer is (D).", "D"),
    ("The Answer is (D), not (E).", "E"),
    ("THE ANSWER IS (F).", "F"),
    ("THE ANSWER IS F. OPTION B FAILS.", "B"),
    ("ANSWER: G", "G"),
    ("Answer is H.", "H"),
    ("Answer Is A, B is wrong", "B"),
    ("the ANSWER is (C)", "C"),
    ("the answer Is (C) rather than B", "B"),
    ("(b)", ""),
    ("option j", ""),
]
BOLD = [  # bold marks are taken out first
    ("The answer is **(A)**.", "A"),
    ("**The answer is (B).**", "B"),
    ("The answer is **C**.", "C"),
    ("The **answer** is **(D)**.", "D"),
    ("The answer is **(E)**, not (F).", "E"),
    ("**Answer:** G", "G"),
    ("**Answer: H**", "H"),
    ("**Answer**: I", "I"),
    ("**Final answer:** **J**", "J"),
    ("### Answer: **A**", "A"),
    ("The answer is *B*.", "B"),
    ("The answer is *B*, C is close.", "C"),
    ("The answer is __D__.", ""),
    ("The answer is `E`.", "E"),
    ("The answer is `E` as F needs G.", "G"),
    ("**(F)**", "F"),
    ("The answer is ***(G)***.", "G"),
    ("The answer is ***(G)*** and never H.", "H"),
]
LATEX = [  # a box is no bracket, so the last letter alone decides
    (r"\boxed{A}", "A"),
    (r"The answer is \boxed{B}.", "B"),
    (r"The answer is \boxed{B}, whereas C fails.", "C"),
    (r"The answer is $\boxed{\text{D}}$.", "D"),
    (r"The answer is $(E)$.", "E"),
    (r"The answer is $(E)$, compare F.", "F"),
    (r"The answer is $E$.", "E"),
    (r"Answer: $\boxed{F}$", "F"),
    (r"Answer: \boxed{F} (G is larger)", "G"),
    (r"$\mathbf{G}$", "G"),
    (r"The final answer is: $\boxed{H}$", "H"),
    (r"\boxed{(I)}", "I"),
    (r"\boxed{42}", ""),
    (r"With $F = ma$ we get \boxed{J}", "J"),
    (r"\boxed{J} since $F = ma$", "F"),
    (r"$\text{answer is }(C)$", "C"),
    (r"The answer is (\text{A})", "A"),
]
COLON = [  # the second rule
    ("Answer: A", "A"),
    ("answer: B", "B"),
    ("Answer:C", "C"),
    ("Answer:   D", "D"),
    ("Answer:\nE", "E"),
    ("Answer:\n\n  F", "F"),
    ("Final Answer: G", "G"),
    ("Correct answer: H", "H"),
    ("My answer: I think J", "I"),
    ("Answer: J. The others fail, as A shows.", "J"),
    ("Answer: A, answer: B", "B"),
    ("Answer: A\nAnswer: B", "A"),
    ("Answer: Answer: B", "B"),
    ("Answer: (C)", "C"),
    ("Answer: (C) and not D", "D"),
    ("Answer: Let's think step by step. It is E.", "E"),
    ("Answer : F", "F"),
    ("Answer : F, unlike G", "G"),
    ("Answer - H", "H"),
    ("The answer: B is right, C is not", "B"),
]
WORDS = [  # the first two rules take a word's first letter
    ("The answer is Boron.", "B"),
    ("The answer is All of the above.", "A"),
    ("The answer is Increase, which is option C.", "I"),
    ("The answer is (Gravity).", "G"),
    ("The answer is Option D.", "D"),
    ("The answer is option D, not E.", "E"),
    ("The answer is None of these.", ""),
    ("The answer is Cannot be determined, option J.", "C"),
    ("Answer: Helium", "H"),
    ("Answer: Because of the heat, D.", "B"),
    ("Answer: option F", "F"),
    ("Answer: Zinc", ""),
    ("The answer is I am not sure.", "I"),
    ("The answer is Either A or B.", "E"),
    ('The answer is "C".', "C"),
    ("The answer is 'C' (D is a trap).", "D"),
    ("The answer is: E.", "E"),
    ("The answer is: E. Here F is wrong.", "F"),
    ("The answer is  (G).", "G"),
    ("The answer is  (G), two spaces, not H.", "H"),
    ("The answer is\n(A).", "A"),
    ("The answer is\n(A), as B fails.", "B"),
    ("The answer is ((D)).", "D"),
    ("The answer is [E].", "E"),
    ("The answer is [E] but F is near.", "F"),
]
LAST_LETTER = [  # the third rule
    ("A", "A"),
    ("(B)", "B"),
    ("C.", "C"),
    ("D)", "D"),
    ("Option E", "E"),
    ("I choose F.", "F"),
    ("It must be G\n", "G"),
    ("A is wrong, B is wrong, so it is H", "H"),
    ("It is H; A and B are wrong", "B"),
    ("I", "I"),
    ("We choose J. 12 metres", "J"),
    ("C is right. I am sure.", "I"),
    ("Choose D. A bird in the hand.", "A"),
    ("B, C and D", "D"),
    ("Choice A: 5 m/s", "A"),
    ("(C) The wave is reflected", "C"),
    ("C) The wave is reflected", "C"),
    ("The correct option is (D) 3.5", "D"),
    ("(A)(B)(C)", "C"),
    ("E=mc^2 gives option F, by E", "E"),
    ("x_A = 3, so it is C", "C"),
    ("It is C, with x_A = 3", "C"),
    ("Vitamin D", "D"),
    ("D-glucose", "D"),
    ("It's A's turn", "A"),
    ("non-A", "A"),
    ("F-test, so option 2", "F"),
    ("H2O", ""),
    ("option_B", ""),
]
OPTION_TEXT = [  # what was meant can be read by a person, not by the rules
    ("Unsafe practices, Distress, Fear, Serious", ""),
    ("The answer is 12 metres.", ""),
    ("The answer is 12 metres, which is option C.", "C"),
    ("It is the third option.", ""),
    ("The wave is reflected.", ""),
    ("The answer is the mitochondrion.", ""),
    ("The answer is both of them: (A) and (B).", "B"),
    ("42", ""),
    ("The result is 3.5 J of energy.", "J"),
]
BEYOND = [  # letters after J are none
    ("The answer is (K).", ""),
    ("The answer is (P).", ""),
    ("The answer is L", ""),
    ("Answer: Q", ""),
    ("The answer is (K), unless it is (B).", "B"),
    ("Answer: Z or C", "C"),
    ("X", ""),
    ("The answer is (K). The answer is (C).", "C"),
]
CUT_OFF = [
    ("", ""),
    (" \n", ""),
    ("Let's think step by step. The force on the", ""),
    ("Let's think step by step. We compare A with B, then", "B"),
    ("The answer is", ""),
    ("The answer is (", ""),
    ("The answer i", ""),
    ("So option C would give 3 and option D would gi", "D"),
    ("The answer is (\nC).", "C"),
    ("Answer:", ""),
    ("The answer is (D", "D"),
    ("Let's think step by", ""),
]
NO_ANSWER = [
    ("I don't know.", "I"),
    ("Sorry, no option fits.", ""),
    ("None of the options is right.", ""),
    ("It cannot be said.", ""),
    ("?", ""),
    ("As an AI model I cannot choose.", "I"),
    ("答案是C。", ""),  # what stands before the letter is a letter, too
    ("答案是：C。", "C"),
]
TABLE = [
    *ASKED_FOR,
    *WITHOUT_BRACKETS,
    *SEVERAL,
    *CASE,
    *BOLD,
    *LATEX,
    *COLON,
    *WORDS,
    *LAST_LETTER,
    *OPTION_TEXT,
    *BEYOND,
    *CUT_OFF,
    *NO_ANSWER,
]


def test_the_table_has_200_answers() -> None:
    assert len(TABLE) == len({text for text, _ in TABLE}) == 200


@pytest.mark.parametrize(("text", "letter"), TABLE)
def test_the_letter_of_an_answer(text: str, letter: str) -> None:
    found = extract(text)
    assert (found[0] if found else "") == letter


def test_the_rule_is_named() -> None:
    assert extract("The answer is (A).") == ("A", "answer is")
    assert extract("Answer: A") == ("A", "answer:")
    assert extract("(A)") == ("A", "letter")


@pytest.mark.parametrize(
    ("text", "letter"), [("A b " * 100_000, "A"), ("no answer: none, " * 100_000 + "Answer: C", "C")], ids=["3", "2"]
)
def test_the_rules_take_time_in_proportion_to_a_line(text: str, letter: str) -> None:
    """As published, the patterns of rules 2 and 3 look through the line again from each place: minutes on these."""
    found = extract(text)
    assert found is not None
    assert found[0] == letter


def test_random_credit_is_drawn_twice_per_category_from_one_seed() -> None:
    """The official order: all draws of a category, again all of it, then the next one; the second time counts."""
    unparsed = [[(10, 3)] * 40, [], [(4, 0), (9, 8), (3, 1)] * 20]
    draws = random.Random(12345)
    expected = []
    for category in unparsed:
        first = [draws.randint(0, options - 1) for options, _ in category]
        second = [draws.randint(0, options - 1) for options, _ in category]
        assert not category or first != second
        expected.append(sum(drawn == index for drawn, (_, index) in zip(second, category, strict=True)))
    assert random_credit(unparsed) == expected
    assert 0 < expected[0] < 40
    assert random_credit([]) == []


def test_random_credit_leaves_the_global_generator_alone() -> None:
    random.seed(1)
    before = random.getstate()
    random_credit([[(10, 3)]])
    assert random.getstate() == before
