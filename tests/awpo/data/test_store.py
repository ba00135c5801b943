"""Instances on disk: exact round trips, bounded memory, and files that are not what they should be."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awpo.artifacts import IN_PROGRESS
from awpo.data import store
from awpo.data.store import count_instances, iterate_instances, read_instances, write_instances
from awpo.errors import UserError
from awpo.types import Instance, Message, Tool, ToolCall

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
MAYBE = st.none() | TEXT
MESSAGE = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=MAYBE,
    tool_calls=st.lists(st.builds(ToolCall, TEXT, OBJECT), max_size=2).map(tuple),
    thought=MAYBE,
    name=MAYBE,
)
INSTANCE = st.builds(
    Instance,
    source=TEXT,
    dialogue_id=TEXT,
    step=st.integers(0, 2**31 - 1),
    steps=st.integers(1, 2**31 - 1),
    split=st.sampled_from(["train", "validation", "test", "test_phrasings", "test_tools"]),
    tools=st.lists(st.builds(Tool, TEXT, TEXT, OBJECT), max_size=2).map(tuple),
    prompt=st.lists(MESSAGE, max_size=3).map(tuple),
    target=MESSAGE,
    rationale=MAYBE,
)


def instance(number: int = 0, **changes: Any) -> Instance:
    base = Instance(
        source="s",
        dialogue_id=f"d{number}",
        step=0,
        steps=1,
        split="train",
        tools=(Tool("t", "A tool.", {"type": "object", "properties": {"zeta": {}, "alpha": {}}}),),
        prompt=(Message("user", f"question {number}"),),
        target=Message("assistant", None, (ToolCall("t", {"zeta": 1, "alpha": 2}),)),
    )
    return replace(base, **changes, id="")


@given(st.lists(INSTANCE, max_size=4))
@settings(max_examples=60, deadline=None)
def test_everything_comes_back_as_it_was(instances: list[Instance]) -> None:
    with tempfile.TemporaryDirectory() as name:
        assert write_instances(Path(name), instances) == len(instances)
        read = read_instances(Path(name))
        assert read == instances
        # repr tells apart what == does not: 1 and 1.0, 0.0 and -0.0, the order of keys.
        assert repr(read) == repr(instances)


def test_keys_keep_the_order_the_source_gave_them(tmp_path: Path) -> None:
    write_instances(tmp_path, [instance()])
    (read,) = read_instances(tmp_path)
    assert list(read.target.tool_calls[0].arguments) == ["zeta", "alpha"]
    assert list(read.tools[0].parameters["properties"]) == ["zeta", "alpha"]


def test_the_id_is_stored_not_made_anew(tmp_path: Path) -> None:
    write_instances(tmp_path, [replace(instance(), id="0123456789abcdef")])
    assert read_instances(tmp_path)[0].id == "0123456789abcdef"


@pytest.mark.parametrize(
    "bad",
    [
        instance(prompt=(Message("user", "\ud800"),)),
        instance(dialogue_id="\udfff"),
        instance(rationale="\ud800"),
        instance(target=Message("assistant", None, (ToolCall("t", {"x": float("nan")}),))),
        instance(target=Message("assistant", None, (ToolCall("t", {"x": float("inf")}),))),
    ],
)
def test_refuses_what_no_file_can_hold(tmp_path: Path, bad: Instance) -> None:
    with pytest.raises(UserError, match="cannot be stored"):
        write_instances(tmp_path, [instance(), bad])
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_is_interrupted_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    def broken() -> Iterator[Instance]:
        yield instance()
        raise RuntimeError("the power went")

    with pytest.raises(RuntimeError, match="the power went"):
        write_instances(tmp_path, broken())
    assert list(tmp_path.iterdir()) == []


def test_many_instances_lie_in_several_shards_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROWS_PER_SHARD", 4)
    instances = [instance(number) for number in range(10)]
    write_instances(tmp_path, instances)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"instances-0000{n}.parquet" for n in range(3)]
    assert read_instances(tmp_path) == instances
    assert count_instances(tmp_path) == 10
    assert read_instances(tmp_path / "instances-00001.parquet") == instances[4:8]
    write_instances(tmp_path, instances[:3])
    assert read_instances(tmp_path) == instances[:3]


def test_row_groups_are_bounded_by_rows_and_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROWS_PER_GROUP", 4)
    write_instances(tmp_path / "rows", [instance(number) for number in range(10)])
    metadata = pq.read_metadata(tmp_path / "rows" / "instances-00000.parquet")
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [4, 4, 2]
    monkeypatch.setattr(store, "BYTES_PER_GROUP", 3000)
    large = [instance(number, prompt=(Message("user", "x" * 2000),)) for number in range(5)]
    write_instances(tmp_path / "bytes", large)
    metadata = pq.read_metadata(tmp_path / "bytes" / "instances-00000.parquet")
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [2, 2, 1]


def test_writing_and_reading_are_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROWS_PER_GROUP", 2)
    monkeypatch.setattr(store, "ROWS_PER_SHARD", 4)
    seen_on_disk = []

    def watching() -> Iterator[Instance]:
        for number in range(9):
            seen_on_disk.append(len(list(tmp_path.glob("instances-*.parquet"))))
            yield instance(number)

    write_instances(tmp_path, watching())
    assert seen_on_disk == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    reading = iterate_instances(tmp_path)
    assert next(reading).dialogue_id == "d0"
    (tmp_path / "instances-00002.parquet").write_bytes(b"no longer a shard")  # not opened before its turn
    assert [next(reading).dialogue_id for _ in range(7)] == [f"d{number}" for number in range(1, 8)]
    with pytest.raises(UserError, match=r"instances-00002\.parquet is not a whole parquet file"):
        next(reading)


def test_splits_choose_and_unknown_ones_are_named(tmp_path: Path) -> None:
    splits = ["train", "test", "train", "validation"]
    write_instances(tmp_path, [instance(number, split=split) for number, split in enumerate(splits)])
    assert [item.dialogue_id for item in read_instances(tmp_path, {"train"})] == ["d0", "d2"]
    assert [item.dialogue_id for item in read_instances(tmp_path, ("test", "validation"))] == ["d1", "d3"]
    assert read_instances(tmp_path, ()) == []
    with pytest.raises(UserError, match="unknown split 'tarin'; did you mean 'train'"):
        read_instances(tmp_path, ["tarin"])


def shard(folder: Path) -> Path:
    write_instances(folder, [instance(number) for number in range(3)])
    return folder / "instances-00000.parquet"


def test_a_missing_folder_and_one_without_instances(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        read_instances(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no instances"):
        read_instances(tmp_path)


def test_an_unfinished_stage_is_never_read(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / IN_PROGRESS).write_text("fingerprint")
    with pytest.raises(UserError, match="unfinished stage"):
        read_instances(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard(tmp_path).rename(tmp_path / "instances-00001.parquet")
    with pytest.raises(UserError, match=r"lacks instances-00000\.parquet"):
        read_instances(tmp_path)


@pytest.mark.parametrize("length", [0, 3, 500, -1])
def test_a_truncated_shard_is_named(tmp_path: Path, length: int) -> None:
    path = shard(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UserError, match=r"instances-00000\.parquet is not a whole parquet file"):
        read_instances(tmp_path)


def test_a_flipped_bit_in_the_data_is_noticed(tmp_path: Path) -> None:
    path = shard(tmp_path)
    raw = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(0).column(8)
    raw[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match="damaged"):
        read_instances(tmp_path)


def test_foreign_parquet_and_other_versions(tmp_path: Path) -> None:
    path = shard(tmp_path)
    table = pq.read_table(path)
    pq.write_table(pa.table({"text": ["a"]}), path)
    with pytest.raises(UserError, match="not of instances"):
        read_instances(tmp_path)
    pq.write_table(table.replace_schema_metadata({b"awpo.instances.version": b"99"}), path)
    with pytest.raises(UserError, match="version 99, this code reads 1"):
        read_instances(tmp_path)
    pq.write_table(table.drop_columns(["kind"]), path)
    with pytest.raises(UserError, match="lacks columns"):
        read_instances(tmp_path)


@pytest.mark.parametrize(
    ("column", "value"),
    [("target", "{"), ("target", "[]"), ("tools", '{"a": 1}'), ("prompt", '[{"role": "wizard"}]'), ("prompt", "3")],
)
def test_a_cell_that_is_not_what_it_should_be(tmp_path: Path, column: str, value: str) -> None:
    path = shard(tmp_path)
    table = pq.read_table(path)
    cells = [table[column][0].as_py(), value, value]
    index = table.column_names.index(column)
    pq.write_table(table.set_column(index, store.SCHEMA.field(column), pa.array(cells, pa.string())), path)
    reading = iterate_instances(tmp_path)
    next(reading)
    with pytest.raises(UserError, match="damaged after 1 instances"):
        next(reading)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write instances"):
        write_instances(tmp_path / "file" / "folder", [instance()])


def test_other_tools_can_read_the_columns(tmp_path: Path) -> None:
    table = pq.read_table(shard(tmp_path))
    assert table.schema.equals(store.SCHEMA)
    assert table["kind"].to_pylist() == ["call"] * 3
    assert json.loads(table["target"][0].as_py())["tool_calls"][0]["function"]["name"] == "t"
