"""Several evaluations against the first: over items, over seeds, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from scipy import stats

from awpo.artifacts import open_stage
from awpo.errors import UserError
from evaluation.comparison_tables import MCNEMAR, OVER_SEEDS, compare_all, differences_table, read_subjects
from evaluation.items import ITEMS, SCORES, Item, score_rows, write_items
from evaluation.statistics import mcnemar
from evaluation.text_tables import render

Write = Callable[..., str]


@pytest.fixture
def evaluation(tmp_path: Path) -> Write:
    """Writes a finished evaluation; `found` holds the greedy verdicts of each split as digits, "-" for none."""

    def write(name: str, samples: Sequence[int] = (-1,), **found: str) -> str:
        items = [
            Item("held_out", split, f"i{i}", f"d{i // 2}", "made", 0, 1, "call", sample, verdict, "x", 1, False)
            for split, digits in found.items()
            for i, digit in enumerate(digits)
            for sample in samples
            for verdict in [None if digit == "-" else digit == "1"]
        ]
        with open_stage(tmp_path / name, "evaluation", {}, {"max_completion_length": 8, "samples": 1}) as stage:
            write_items(stage.folder / ITEMS, items)
            rows = [row for split in found for row in score_rows([i for i in items if i.split == split])]
            (stage.folder / SCORES).write_text(json.dumps(rows))
            stage.finish()
        return str(tmp_path / name)

    return write


def test_all_against_the_first_with_holm_over_the_family(evaluation: Write) -> None:
    folders = [
        evaluation("sft", test="1100" * 10, tools="0" * 12),
        evaluation("grpo", test="1110" * 10, tools="1" * 12),
        evaluation("awpo", test="1111" * 10, tools="1" * 6 + "0" * 6),
    ]
    rows = compare_all(read_subjects(folders))
    assert [(row.subject, row.split) for row in rows] == [
        ("grpo", "test"),
        ("grpo", "tools"),
        ("awpo", "test"),
        ("awpo", "tools"),
    ]
    first = rows[0]
    assert (first.reference, first.first, first.second, first.difference) == ("sft", 0.5, 0.75, 0.25)
    assert (first.items, first.dialogues, first.seeds, first.test) == (40, 20, 1, MCNEMAR)
    assert first.low is not None
    assert first.high is not None
    assert first.low < 0.25 < first.high
    assert first.p == pytest.approx(mcnemar([1, 1, 0, 0] * 10, [1, 1, 1, 0] * 10, [i // 2 for i in range(40)]))
    p_values = sorted(row.p for row in rows if row.p is not None)
    smallest = min(rows, key=lambda row: row.p or 0)
    assert smallest.adjusted == pytest.approx(min(1.0, 4 * p_values[0]))
    assert all(row.adjusted is not None and row.p is not None and row.adjusted >= row.p for row in rows)


def test_seeds_of_one_method_are_compared_by_a_paired_t(evaluation: Write) -> None:
    before, after = ["1" * 10, "1" * 12 + "0" * 8, "1" * 8], ["1" * 14, "1" * 15, "1" * 13]
    folders = [
        evaluation(f"seed-{seed}/evaluation/{name}", test=digits[seed].ljust(20, "0"))
        for name, digits in (("sft", before), ("awpo", after))
        for seed in (2, 0, 1)
    ]
    [row] = compare_all(read_subjects(folders))
    shares = [[0.5, 0.6, 0.4], [0.7, 0.75, 0.65]]
    expected = stats.ttest_rel(shares[1], shares[0])
    assert (row.seeds, row.test, row.items) == (3, OVER_SEEDS, 60)
    assert row.difference == pytest.approx(0.2)
    assert row.p == pytest.approx(expected.pvalue)
    assert (row.low, row.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_seeds_are_paired_by_their_names_and_the_rest_is_told(evaluation: Write) -> None:
    folders = [evaluation("seed-1/sft", test="0011"), evaluation("seed-1/awpo", test="1111")]
    folders += [evaluation("seed-2/awpo", test="0000")]
    [row] = compare_all(read_subjects(folders))
    assert (row.seeds, row.difference, row.test) == (1, 0.5, MCNEMAR)
    assert row.note == "without a partner: seed-2"
    with pytest.raises(UserError, match="no seed in common"):
        compare_all(read_subjects([folders[0], folders[2]]))


def test_labels_are_told_apart_by_paths_where_names_do_not(evaluation: Write) -> None:
    one, two = evaluation("a/awpo", test="0011"), evaluation("b/awpo", test="0111")
    assert [subject.label for subject in read_subjects([one, two])] == [one, two]
    assert [subject.label for subject in read_subjects([f"first={one}", f"second={two}"])] == ["first", "second"]
    with pytest.raises(UserError, match="given twice"):
        read_subjects([one, one])
    with pytest.raises(UserError, match="two evaluations or more"):
        compare_all(read_subjects([one]))
    other = evaluation("seed-1/x/awpo", test="0011"), evaluation("seed-1/y/awpo", test="0011")
    with pytest.raises(UserError, match="both awpo with seed-1"):
        read_subjects([f"sft={one}", *other])
    with pytest.raises(UserError, match="not a finished evaluation"):
        read_subjects([f"x={Path(one).parent}"])


def test_a_split_that_one_did_not_run_has_no_numbers(evaluation: Write) -> None:
    whole, part = evaluation("sft", test="0011", tools="01"), evaluation("awpo", test="0111")
    rows = {row.split: row for row in compare_all(read_subjects([whole, part]))}
    assert rows["tools"].difference is None
    assert rows["tools"].p is None
    assert rows["tools"].note == f"not run in {part}"
    text = render([differences_table(list(rows.values()))], "markdown")
    assert f"not run in {part}".replace("_", r"\_") in text
    assert "| awpo | held\\_out | tools | greedy | – |" in text


def test_items_without_a_verdict_are_left_out_and_told(evaluation: Write) -> None:
    rows = compare_all(read_subjects([evaluation("sft", test="00-1"), evaluation("awpo", test="1-11")]))
    [row] = rows
    assert (row.items, row.missing, row.first, row.second) == (2, 2, 0.5, 1.0)
    assert any("2 items without a verdict" in note for note in differences_table(rows).notes)
    nothing = compare_all(read_subjects([evaluation("none", test="----"), evaluation("more", test="1111")]))
    assert (nothing[0].difference, nothing[0].note) == (None, "no item has a verdict in both")


def test_sampled_answers_have_an_interval_and_no_test(evaluation: Write) -> None:
    rows = compare_all(
        read_subjects([evaluation("sft", (-1, 0, 1), test="0011"), evaluation("awpo", (-1, 0, 1), test="0111")])
    )
    assert [(row.mode, row.p is None) for row in rows] == [("greedy", False), ("sampled", True)]
    assert rows[0].adjusted == rows[0].p  # a family of one
    assert "| awpo | held\\_out | test | sampled |" in render([differences_table(rows)], "markdown")
