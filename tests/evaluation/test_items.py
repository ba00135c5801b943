"""Items survive the file, and rows of scores say what was counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from awpo.chat import parse_completion
from awpo.errors import UserError
from awpo.types import Message, ToolCall
from evaluation.generate import Generated, Question
from evaluation.items import (
    SINCE_ENDPOINTS,
    Item,
    by_kind,
    by_source,
    by_step,
    is_empty,
    make_item,
    read_items,
    score_rows,
    write_items,
)

ITEM = Item("held_out", "test_tools", "a", "d", "made", 0, 2, "call", -1, True, "text", 7, False)


def test_items_survive_the_file(tmp_path: Path) -> None:
    items = [ITEM, replace(ITEM, sample=3, correct=False, completion="é\x00🙂", finish="length", detail="why")]
    write_items(tmp_path / "items.parquet", items)
    assert read_items(tmp_path / "items.parquet") == items


def test_a_lone_surrogate_does_not_stop_the_write(tmp_path: Path) -> None:
    write_items(tmp_path / "items.parquet", [replace(ITEM, completion="a\ud800b")])
    assert read_items(tmp_path / "items.parquet")[0].completion == "a?b"


def test_a_foreign_table_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_items(tmp_path / "items.parquet")
    (tmp_path / "items.parquet").write_text("not parquet")
    with pytest.raises(UserError, match="not a table of items"):
        read_items(tmp_path / "items.parquet")


@pytest.mark.parametrize(
    ("text", "empty"),
    [
        ("", True),
        ("<think>\nI will do nothing.\n</think>\n\n", True),
        ("Hello", False),
        ('<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>', False),
        ("<tool_call>\n{broken\n</tool_call>", False),
    ],
)
def test_empty_means_neither_call_nor_reply(text: str, empty: bool) -> None:
    assert is_empty(parse_completion(text)) is empty


def test_rows_by_mode_and_group() -> None:
    """Two items of one dialogue: greedy 1 of 2; samples 8 of 8 and 2 of 8."""
    second = replace(ITEM, item_id="b", step=1, kind="reply", correct=False, empty=True, finish="length")
    items = [ITEM, second]
    items += [replace(ITEM, sample=n) for n in range(8)]
    items += [replace(second, sample=n, correct=n < 2, response_tokens=3) for n in range(8)]
    rows = {(row["mode"], row["group"]): row for row in score_rows(items, groupings=(by_step, by_kind), protocol="p")}
    assert set(rows) == {
        (mode, group)
        for mode in ("greedy", "sampled")
        for group in ("all", "step=0", "step=1", "kind=call", "kind=reply")
    }
    greedy, sampled = rows["greedy", "all"], rows["sampled", "all"]
    assert (greedy["accuracy"], greedy["items"], greedy["dialogues"]) == (0.5, 2, 1)
    assert (greedy["empty_rate"], greedy["cut_rate"], greedy["response_tokens"]) == (0.5, 0.5, 7.0)
    assert (greedy["low"], greedy["high"]) == (0.0, 1.0)  # of one dialogue nothing is known
    assert sampled["accuracy"] == pytest.approx((1 + 0.25) / 2)
    assert sampled["pass_at"] == {"1": pytest.approx(0.625), "8": 1.0}
    assert sampled["response_tokens"] == 5.0
    assert (sampled["low"], sampled["high"]) == (0.0, 1.0)  # one dialogue tells nothing of others
    assert "pass_at" not in greedy
    assert rows["sampled", "step=1"]["accuracy"] == 0.25
    assert greedy["protocol"] == "p"


def test_what_was_not_run_has_no_row() -> None:
    assert score_rows([]) == []
    assert {row["mode"] for row in score_rows([ITEM])} == {"greedy"}
    assert score_rows([replace(ITEM, sample=0)])[0]["pass_at"] == {"1": 1.0}  # pass@8 needs eight samples


def test_steps_are_listed_in_their_order() -> None:
    items = [replace(ITEM, item_id=str(step), step=step) for step in (10, 2, 0)]
    groups = [row["group"] for row in score_rows(items, groupings=(by_step,))]
    assert groups == ["all", "step=0", "step=2", "step=10"]


def test_an_item_of_an_answer_says_what_was_called_and_asked() -> None:
    question = Question((Message("user", "Weather in Oslo?"),))
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    answer = Generated(text, 9, prompt_tokens=31, seconds=0.5)
    names = {"benchmark": "b", "split": "s", "item_id": "i", "source": "made", "kind": "call"}
    item = make_item(question, answer, correct=True, **names)
    assert json.loads(item.calls) == [{"name": "weather", "arguments": {"city": "Oslo"}}]
    assert (item.prompt_hash, item.prompt_tokens, item.seconds) == (question.hash, 31, 0.5)
    assert (item.correct, item.empty, item.dialogue_id, item.error_type) == (True, False, "i", "")
    structured = replace(answer, text="", tool_calls=(ToolCall("weather", {"city": "Rome"}),))
    assert json.loads(make_item(question, structured, correct=True, **names).calls)[0]["arguments"] == {"city": "Rome"}


def test_a_failed_answer_has_no_verdict_and_its_row_says_partial() -> None:
    question = Question((Message("user", "?"),))
    failed = Generated("", 0, "failed", failure="the endpoint answered 500")
    item = make_item(
        question, failed, correct=False, benchmark="held_out", split="test_tools", item_id="z", source="m", kind="call"
    )
    assert (item.correct, item.error_type, item.detail) == (None, "request_failed", "the endpoint answered 500")
    (row,) = score_rows([ITEM, item])
    assert (row["accuracy"], row["items"], row["partial"], row["missing"]) == (1.0, 1, True, 1)
    assert score_rows([item]) == []
    assert "partial" not in score_rows([ITEM])[0]


def test_a_prompt_without_room_is_wrong_and_says_so_even_where_no_call_is_due() -> None:
    question = Question((Message("user", "?"),))
    full = Generated("", 0, "no_room", prompt_tokens=9000)
    item = make_item(
        question, full, correct=True, benchmark="held_out", split="test_tools", item_id="z", source="m", kind="reply"
    )
    assert (item.correct, item.error_type, item.prompt_tokens) == (False, "no_room", 9000)
    assert "fills the model's context" in item.detail
    (row,) = score_rows([ITEM, item])
    assert (row["accuracy"], row["items"], row["no_room"]) == (0.5, 2, 1)
    assert "no_room" not in score_rows([ITEM])[0]


def test_the_verdict_none_survives_the_file(tmp_path: Path) -> None:
    write_items(tmp_path / "items.parquet", [replace(ITEM, correct=None), ITEM])
    assert [item.correct for item in read_items(tmp_path / "items.parquet")] == [None, True]


def test_rows_by_source() -> None:
    items = [ITEM, replace(ITEM, item_id="b", source="other", correct=False)]
    assert {row["group"]: row["accuracy"] for row in score_rows(items, groupings=(by_source,))} == {
        "all": 0.5,
        "source=made": 1.0,
        "source=other": 0.0,
    }


def test_a_table_of_an_earlier_version_says_so_in_one_line(tmp_path: Path) -> None:
    write_items(tmp_path / "items.parquet", [ITEM])
    whole = pq.read_table(tmp_path / "items.parquet")
    earlier = [name for name in whole.column_names if name not in SINCE_ENDPOINTS]
    assert earlier[0] == "benchmark"
    assert earlier[-1] == "detail"
    pq.write_table(whole.select(earlier), tmp_path / "items.parquet")
    with pytest.raises(UserError, match=r"is of an earlier version .*evaluate again into another folder") as caught:
        read_items(tmp_path / "items.parquet")
    assert "\n" not in str(caught.value)
    pq.write_table(whole.select(["benchmark"]), tmp_path / "items.parquet")
    with pytest.raises(UserError, match="is not a table of items: no calls"):
        read_items(tmp_path / "items.parquet")
