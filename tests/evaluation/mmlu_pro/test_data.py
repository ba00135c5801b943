"""MMLU-Pro's files: the whole set, its forms, and what is refused."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from awpo.errors import UserError
from evaluation.mmlu_pro.data import CATEGORIES, MmluPro, read


@pytest.fixture(scope="module")
def known(shared_data: Path) -> MmluPro:
    return read(shared_data)


@pytest.fixture
def copied(shared_data: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "mmlu-pro"
    folder.mkdir()
    for name in ("test.jsonl.gz", "validation.jsonl"):
        shutil.copyfile(shared_data / "mmlu-pro" / name, folder / name)
    return folder


def test_the_set_is_whole(known: MmluPro) -> None:
    sizes = {category: len(items) for category, items in known.questions.items()}
    assert list(sizes) == list(CATEGORIES)
    assert sum(sizes.values()) == 12_032
    # arXiv 2406.01574, figure 3, and the card of the set
    assert (sizes["math"], sizes["history"], sizes["other"]) == (1351, 381, 924)
    assert {len(found) for found in known.exemplars.values()} == {5}
    ids = [item.id for items in known.questions.values() for item in items]
    assert len(set(ids)) == 12_032


def test_the_letter_is_the_index_but_for_one_question(known: MmluPro) -> None:
    differ = [
        (item.id, item.answer, item.answer_index)
        for items in known.questions.values()
        for item in items
        if "ABCDEFGHIJ"[item.answer_index] != item.answer
    ]
    assert differ == [("3983", "C", 1)]


def test_exemplars_reason_up_to_their_answer(known: MmluPro) -> None:
    for found in known.exemplars.values():
        for exemplar in found:
            assert exemplar.reasoning.startswith("Let's think step by step.")
            assert "The answer is (" in exemplar.reasoning


def test_the_hubs_parquet_reads_as_the_same_set(known: MmluPro, copied: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub" / "mmlu-pro" / "data"
    hub.mkdir(parents=True)
    for split, content in (
        ("test", gzip.decompress((copied / "test.jsonl.gz").read_bytes())),
        ("validation", (copied / "validation.jsonl").read_bytes()),
    ):
        rows = [json.loads(line) for line in content.splitlines()]
        for row in rows:
            row.setdefault("question_id", 0)
            row["options"] += ["N/A"] * (10 - len(row["options"]))
        pq.write_table(pa.Table.from_pylist(rows), hub / f"{split}-00000-of-00001.parquet")
    assert read(tmp_path / "hub").digest == known.digest


def test_another_text_is_another_set(known: MmluPro, copied: Path) -> None:
    path = copied / "validation.jsonl"
    path.write_text(path.read_text("utf-8").replace("symmetric group", "cyclic group", 1), "utf-8")
    assert read(copied.parent).digest != known.digest


def test_a_part_of_the_set_is_refused(copied: Path) -> None:
    lines = (copied / "validation.jsonl").read_text("utf-8").splitlines()
    (copied / "validation.jsonl").write_text("\n".join(lines[:-1]), "utf-8")
    with pytest.raises(UserError, match="does not hold 5 exemplars of each category"):
        read(copied.parent)
    (copied / "validation.jsonl").write_text("\n".join(lines), "utf-8")
    with gzip.open(copied / "test.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = file.readlines()
    with gzip.open(copied / "test.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(rows[:100])
    with pytest.raises(UserError, match="holds 100 questions, not MMLU-Pro's 12032"):
        read(copied.parent)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", "KeyError"),
        ("not json", "JSONDecodeError"),
        ('{"question_id": 1, "question": "q", "options": []}', "0 options"),
    ],
)
def test_rows_of_something_else_are_told_in_one_line(copied: Path, line: str, said: str) -> None:
    with gzip.open(copied / "test.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(line)
    with pytest.raises(UserError, match="rows that are not MMLU-Pro's") as raised:
        read(copied.parent)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
