"""Splits by dialogue."""

from __future__ import annotations

from collections import Counter

import pytest

from awpo.data import splits
from awpo.data.splits import assign_splits, split_of
from awpo.types import Dialogue, Split


def dialogue(name: str, split: Split | None = None) -> Dialogue:
    return Dialogue(name, "s", (), (), split)


def assigned(*dialogues: Dialogue) -> list[Split | None]:
    return [item.split for item in assign_splits(dialogues)]


def test_the_shares_are_those_documented() -> None:
    counts = Counter(split_of(f"dialogue {number}") for number in range(20_000))
    # Four standard deviations of a share of 5% over 20,000 draws are 0.6%.
    assert counts["test"] / 20_000 == pytest.approx(0.05, abs=0.006)
    assert counts["validation"] / 20_000 == pytest.approx(0.05, abs=0.006)


def test_a_split_depends_on_the_id_alone_and_never_changes() -> None:
    # Written down: a change of these would move dialogues between the splits of data sets that people have.
    known = {"a": "train", "b": "train", "d32": "validation", "d20": "test"}
    assert {name: split_of(name) for name in known} == known


@pytest.mark.parametrize("count", [3, 4, 10, 50])
def test_a_small_source_has_all_three(count: int) -> None:
    for source in range(30):
        dialogues = [dialogue(f"{source}/{number}") for number in range(count)]
        result = assigned(*dialogues)
        assert set(result) == {"train", "validation", "test"}
        assert assigned(*reversed(dialogues)) == result[::-1]  # the order of rows does not matter


def test_few_dialogues_are_moved() -> None:
    dialogues = [dialogue(f"dialogue {number}") for number in range(200)]
    assert {split_of(item.id) for item in dialogues} == {"train", "validation", "test"}
    assert assigned(*dialogues) == [split_of(item.id) for item in dialogues]


def test_two_dialogues_are_too_few_to_divide() -> None:
    assert assigned(dialogue("a"), dialogue("b")) == ["train", "train"]


def test_rows_of_one_dialogue_stay_together_and_count_as_one() -> None:
    rows = [dialogue(name) for name in "abab" * 10]
    assert assigned(*rows) == ["train"] * 40
    rows = [dialogue(name) for name in "abcabc" * 10]
    by_id = {name: {item.split for item in assign_splits(rows) if item.id == name} for name in "abc"}
    assert sorted(len(found) for found in by_id.values()) == [1, 1, 1]
    assert set().union(*by_id.values()) == {"train", "validation", "test"}


def test_the_sources_own_split_stays() -> None:
    own = [dialogue(str(number), "test_tools") for number in range(5)]
    assert assigned(*own) == ["test_tools"] * 5
    mixed = [dialogue("x", "validation"), dialogue("a"), dialogue("b"), dialogue("c")]
    result = assigned(*mixed)
    assert result[0] == "validation"
    assert sorted(filter(None, result[1:])) == ["test", "train", "train"]  # a validation split is there already


def test_a_large_source_is_not_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "SMALL_SOURCE", 10)
    drawn = 0

    def source() -> object:
        nonlocal drawn
        for number in range(100):
            drawn += 1
            yield dialogue(str(number))

    result = assign_splits(source())  # type: ignore[arg-type]
    next(result)
    assert drawn == 10
    assert [item.split for item in result] == [split_of(str(number)) for number in range(1, 100)]
