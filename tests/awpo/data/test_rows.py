"""Rows of every kind of file, and files that are not what they should be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from awpo.artifacts import IN_PROGRESS, MANIFEST
from awpo.data import rows as rows_module
from awpo.data.rows import Rows
from awpo.errors import UserError

VALUES: list[dict[str, Any]] = [
    {"n": number, "text": "é 早 😀" * number, "deep": [{"x": [1.5, None]}]} for number in range(20)
]


def values(path: Path) -> list[Any]:
    return [row.value for row in Rows(path)]


def write(path: Path, kind: str) -> Path:
    if kind == "array":
        path.write_text(json.dumps(VALUES, ensure_ascii=False, indent=1), "utf-8")
    elif kind == "escaped array":
        path.write_text("\n [" + ",\n".join(json.dumps(value) for value in VALUES) + "]\n\n", "utf-8")
    elif kind == "lines":
        path.write_text("\n\n".join(json.dumps(value, ensure_ascii=False) for value in VALUES), "utf-8")
    elif kind == "lines of Windows":
        path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(value).encode() for value in VALUES) + b"\r\n")
    else:
        pq.write_table(pa.Table.from_pylist(VALUES), path)
    return path


KINDS = ["array", "escaped array", "lines", "lines of Windows", "parquet"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zipped", [False, True])
def test_every_kind_gives_the_same_rows(tmp_path: Path, kind: str, zipped: bool) -> None:
    path = write(tmp_path / "data.anything", kind)  # told from the content, not from the name
    if zipped:
        path.write_bytes(gzip.compress(path.read_bytes()))
    rows = list(Rows(path))
    assert [row.value for row in rows] == VALUES
    assert [row.number for row in rows] == list(range(20))
    assert {row.fault for row in rows} == {None}
    assert {row.file for row in rows} == {"data.anything"}


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("kind", ["array", "escaped array"])
def test_an_array_is_read_in_pieces_wherever_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, kind: str
) -> None:
    monkeypatch.setattr(rows_module, "CHUNK", chunk)
    assert values(write(tmp_path / "data", kind)) == VALUES


def test_an_array_holds_other_values_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "CHUNK", 1)
    path = tmp_path / "data"
    path.write_text('[12, 345, "a", null, [1, 2], 67]')
    assert values(path) == [12, 345, "a", None, [1, 2], 67]


def test_a_folder_is_its_data_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text('[{"n": 2}]')
    (tmp_path / "a.jsonl").write_text('{"n": 0}\n{"n": 1}\n')
    for name in (MANIFEST, ".hidden.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    rows = Rows(tmp_path)
    assert [(row.file, row.number, row.value["n"]) for row in rows] == [
        ("a.jsonl", 0, 0),
        ("a.jsonl", 1, 1),
        ("b.json", 0, 2),
    ]
    assert rows.done == rows.total == (tmp_path / "a.jsonl").stat().st_size + (tmp_path / "b.json").stat().st_size


def test_progress_grows_to_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "CHUNK", 64)
    rows = Rows(write(tmp_path / "data", "array"))
    done = [rows.done for _ in rows]
    assert done == sorted(done)
    assert 0 < done[0] < rows.total
    assert rows.done == rows.total


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": ', "Expecting value"),
        (b'{"a": 1} {"b": 2}', "more text follows"),
        (b'{"a": 1, "a": 2}', "given twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\\ud800"}', "lone surrogate"),
        (b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
    ],
)
def test_a_broken_line_is_one_row_with_a_fault(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"n": 0}\n' + line + b'\n{"n": 2}\n')
    first, broken, last = Rows(path)
    assert (first.value, last.value, broken.value, broken.number) == ({"n": 0}, {"n": 2}, None, 1)
    assert broken.fault is not None
    assert reason in broken.fault


def test_a_faulty_row_of_an_array_does_not_hide_the_next(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    deep = '{"a": ' + "[" * 5000 + r'"]\"\\"' + "]" * 5000 + "}"
    faulty = ['{"a": NaN}', '{"a": 1, "a": 1}', r'{"a": "\ud800"}', deep, '{"a": [NaN, ' + "9" * 5000 + "]}"]
    path.write_text(f'[{", ".join(faulty)}, {{"n": 5}}]')
    rows = list(Rows(path))
    assert [row.fault is None for row in rows] == [False] * 5 + [True]
    assert rows[3].fault == "the value is nested too deeply"
    assert rows[5].value == {"n": 5}
    path.write_text(f'[{{"n": 0}}, {deep[:-3]}')
    with pytest.raises(UserError, match="row 1 is broken or cut off"):
        list(Rows(path))
    path.write_text(f"[{deep[:5020]}")
    with pytest.raises(UserError, match="row 0 is broken or cut off"):
        list(Rows(path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"  \n \n", "is empty"),
        (b"[]", "is an empty array"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is a binary file"),
        (b"name,age\nA,1\n", "begins with"),
        (b"[1, 2", "after row 1 comes 'the end of the file'"),
        (b'[{"a": 1}, {"a"', "row 1 is broken or cut off"),
        (b'[{"a": 1} {"a": 2}]', "after row 0 comes '{'"),
        (b'[{"a": 1},]', "row 1 is broken"),
        (b'[{"a": 1}] {"b": 2}', "text follows the array's end"),
        (b'[{"a": "\xff"}]', "not UTF-8"),
        (b"PAR1 and then nothing", "is not a whole parquet file"),
        (gzip.compress(b'{"n": 0}\n' * 1000, mtime=0)[:-12], "is not a whole gzip file"),
        (b"\x1f\x8b\x08 but not really", "is not a whole gzip file"),
    ],
)
def test_a_file_that_is_not_what_it_should_be(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(Rows(path))
    message = str(caught.value)
    assert reason in message
    assert str(path) in message
    assert "\n" not in message


def test_a_cut_off_row_does_not_swallow_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "CHUNK", 100)
    monkeypatch.setattr(rows_module, "LARGEST_VALUE", 1000)
    path = tmp_path / "data.json"
    path.write_text('[{"a": "' + "x" * 100_000)
    rows = Rows(path)
    with pytest.raises(UserError, match="row 0 is broken"):
        list(rows)
    assert rows.done < 10_000


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json does not exist"):
        Rows(tmp_path / "nowhere.json")
    with pytest.raises(UserError, match="holds no data file"):
        Rows(tmp_path)
    (tmp_path / "part").mkdir()
    with pytest.raises(UserError, match=r"holds no data file; .* it has folders, give one of them: part"):
        Rows(tmp_path)
    (tmp_path / "data.json").write_text("[1]")
    (tmp_path / IN_PROGRESS).write_text("fingerprint")
    with pytest.raises(UserError, match="unfinished stage"):
        Rows(tmp_path)


@pytest.mark.parametrize("target", ["nowhere.jsonl", "data.jsonl"])
def test_a_link_to_nothing_is_told_and_not_left_out(tmp_path: Path, target: str) -> None:
    (tmp_path / "first.jsonl").write_text('{"n": 0}\n')
    (tmp_path / "data.jsonl").symlink_to(target)  # the second is a link to itself
    with pytest.raises(UserError, match=r"data\.jsonl is a link to a file that is not there"):
        Rows(tmp_path)


def test_an_empty_and_a_truncated_parquet_file(tmp_path: Path) -> None:
    path = write(tmp_path / "data.parquet", "parquet")
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(UserError, match="not a whole parquet file"):
        list(Rows(path))
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), path)
    with pytest.raises(UserError, match="holds no rows"):
        list(Rows(path))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["id", "id"]), path)
    with pytest.raises(UserError, match="has two columns 'id'"):
        list(Rows(path))


def test_structs_that_mix_the_keys_of_all_rows_are_refused(tmp_path: Path) -> None:
    calls = [{"calls": [{"arguments": {"a": 1}}]}, {"calls": [{"arguments": {"b": 2}}]}]
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist(calls), path)  # both rows now have a and b
    with pytest.raises(UserError, match="'arguments' as a struct"):
        list(Rows(path))
