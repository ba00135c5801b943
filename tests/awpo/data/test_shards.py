"""A large source in parts: what comes out is what one process makes of it in one piece, wherever the cuts are."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from awpo.artifacts import IN_PROGRESS, MANIFEST, read_manifest
from awpo.data import parts, splits, strict_json
from awpo.data.decompose import decompose, decompose_source, examine, rate_and_rest
from awpo.data.instance_rows import _message_texts, dialogue_rows
from awpo.data.parts import plan_parts, read_segment
from awpo.data.rows import Row, Rows, line_rows
from awpo.data.settings import DecomposeConfig, MaskingConfig
from awpo.data.shards import HashSet
from awpo.data.sources import Rejected, get_source
from awpo.data.sources.base import dialogue_hash, read_tool
from awpo.data.splits import split_of
from awpo.data.store import instance_row, message_to_json, read_instances
from awpo.errors import UserError
from awpo.types import Message, Role, ToolCall, canonical_json

TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def row(number: int, *, name: str | None = None, city: Any = "Rome") -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": {"city": city}}}
    messages = [
        {"role": "user", "content": f"Question {number} é" + " long" * (number % 7)},
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "f fits."},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": f"Answer {number}."},
    ]
    return {"id": name or f"id {number}", "source": f"s{number % 2}", "messages": messages, "tools": [TOOL]}


def texts(count: int) -> list[str]:
    """Rows as JSON: sound ones, repetitions near and far, an id used twice, calls that don't fit, broken ones."""
    rows = [json.dumps(row(number), ensure_ascii=False) for number in range(count)]
    rows[5] = "{broken"
    rows[7] = rows[6]
    rows[count - 2] = rows[3]
    rows[count // 2] = json.dumps(row(count // 2, name="id 1"))
    rows[count // 3] = json.dumps(row(count // 3, city=5))
    rows[count - 5] = json.dumps(row(count // 3, city=5, name="another"))
    rows[count - 4] = json.dumps({"messages": [], "tools": []})
    return rows


def write(folder: Path, kind: str, count: int = 120) -> Path:
    folder.mkdir(exist_ok=True)
    rows = texts(count)
    sound = [text for text in rows if text != "{broken"]
    lines = "\n\n".join(rows) + "\n"
    if kind == "lines":
        (folder / "a.jsonl").write_text(lines, "utf-8")
    elif kind == "lines without an end, of Windows":
        (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    elif kind == "zipped":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    elif kind == "array":
        (folder / "a.json").write_text("[" + ",\n".join(sound) + "]", "utf-8")
    else:
        half = len(sound) // 2
        (folder / "b.jsonl").write_text("\n".join(rows[:10]), "utf-8")
        (folder / "c.json").write_text(f"[{sound[20]}]", "utf-8")
        columns = {
            name: [json.loads(text)[name] for text in sound[:half] if "id" in json.loads(text)]
            for name in ("id", "source")
        }
        for name in ("messages", "tools"):
            columns[name] = [json.dumps(json.loads(text)[name]) for text in sound[:half] if "id" in json.loads(text)]
        table = pa.table(columns)
        pq.write_table(table, folder / "d.parquet", row_group_size=7)
        buffer = io.BytesIO()
        pq.write_table(table.slice(0, 9), buffer)
        (folder / "e.parquet.gz").write_bytes(gzip.compress(buffer.getvalue(), mtime=0))
        (folder / "f.jsonl").write_text("\n".join(rows[half:]), "utf-8")
    return folder


KINDS = ["lines", "lines without an end, of Windows", "zipped", "array", "a folder of everything"]
MASKS = DecomposeConfig(invalid_calls="drop", masking=MaskingConfig(share=0.5, irrelevance=0.3))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [{**json.loads(line), "detail": ""} for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize(("kind", "config"), [*((kind, DecomposeConfig()) for kind in KINDS), ("lines", MASKS)])
def test_parts_are_what_one_piece_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, config: DecomposeConfig
) -> None:
    monkeypatch.setattr(splits, "SMALL_SOURCE", 1)  # in parts, splits are by hash alone
    source = write(tmp_path / "in", kind)
    whole = decompose_source(source, tmp_path / "whole", config=config)
    monkeypatch.setattr(parts, "PART_BYTES", 600 if kind == "zipped" else 6000)
    cut = decompose_source(source, tmp_path / "cut", config=config, workers=1)
    assert len(list((tmp_path / "cut").glob("*.parquet"))) > 3
    assert read_instances(tmp_path / "cut") == read_instances(tmp_path / "whole")
    assert cut.counts == whole.counts
    assert whole.counts["rejected"]["the same as an earlier row"] >= 2
    for name in ("rejected.jsonl", "invalid_calls.jsonl"):
        assert lines_of(tmp_path / "cut" / name) == lines_of(tmp_path / "whole" / name)
    assert not (tmp_path / "cut" / ".parts").exists()
    assert {name.partition("-")[0] for name in cut.outputs} == {"instances", "rejected.jsonl", "invalid_calls.jsonl"}


def test_the_bytes_do_not_depend_on_the_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 6000)
    source = write(tmp_path / "in", "lines")
    outputs = [decompose_source(source, tmp_path / str(count), workers=count).outputs for count in (1, 3)]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 6


RUN = """
import sys
from pathlib import Path
from awpo.data import parts
from awpo.data.decompose import decompose_source
parts.PART_BYTES = int(sys.argv[3])
decompose_source(Path(sys.argv[1]), Path(sys.argv[2]), workers=2)
"""


@pytest.mark.parametrize("kind", ["lines", "zipped"])
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    source, out = write(tmp_path / "in", kind, 4000), tmp_path / "out"
    size = 40_000 if kind == "lines" else 25_000
    process = subprocess.Popen([sys.executable, "-c", RUN, str(source), str(out), str(size)])
    deadline = time.monotonic() + 120
    while len(list(out.glob(".parts/*.done"))) < 3:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert read_manifest(out) is None
    assert (out / IN_PROGRESS).exists()
    settled = [path.name for path in out.glob(".parts/*.done")]
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("instances-0000[0-2].parquet")}
    monkeypatch.setattr(parts, "PART_BYTES", size)
    resumed = decompose_source(source, out, workers=2)
    clean = decompose_source(source, tmp_path / "clean", workers=1)
    assert len(settled) < len(clean.outputs) - 2, "it was killed too late to tell"
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert resumed.outputs == clean.outputs
    assert resumed.counts == clean.counts


def test_what_cannot_be_stored_or_read_ends_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 2000)
    path = tmp_path / "a.json"
    path.write_text("[" + ",".join(json.dumps(row(number)) for number in range(40)), "utf-8")  # cut off
    with pytest.raises(UserError, match=r"broken or cut off|not ','"):
        decompose_source(path, tmp_path / "out", workers=1)
    assert not (tmp_path / "out" / MANIFEST).exists()
    path.write_text(
        "\n".join(json.dumps({"messages": [{"role": "user", "content": str(number)}]}) for number in range(200)),
        "utf-8",
    )
    with pytest.raises(UserError, match=r"no row of .* can be used \(200 of 200"):
        decompose_source(path, tmp_path / "none", workers=1)


def test_lines_cut_anywhere_are_each_read_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n\n{"n": 2}\r\n  {"n": 3}\n{"n": "\xc3\xa9"}')
    wanted = [item.value for item in Rows(path)]
    size = path.stat().st_size
    for cut in range(1, size):
        with open(path, "rb") as one, open(path, "rb") as two:
            found = [*line_rows("a", one, 0, cut), *line_rows("a", two, cut, size)]
        assert [item.value for item in found] == wanted, cut


def test_a_plan_holds_every_row_once(tmp_path: Path) -> None:
    files = sorted(write(tmp_path / "in", "a folder of everything").iterdir())
    for size in (500, 3000, 10**6):
        folder = tmp_path / str(size)
        folder.mkdir()
        plan = list(plan_parts(files, size, folder, lambda number: True))
        assert [part.number for part in plan] == list(range(len(plan)))
        found = [item.value for part in plan for segment in part.segments for item in read_segment(segment)]
        assert found == [item.value for item in Rows(tmp_path / "in")]
    assert len(plan) == 1


def test_a_set_of_hashes_is_a_set() -> None:
    draw, known, hashes = random.Random(0), set[int](), HashSet()
    for size in (1, 5, 3, 0, 200, 2, 2, 90, 1000):
        new = np.array(sorted({draw.randrange(4000) for _ in range(size)} - known), "u8")
        asked = np.array([draw.randrange(4000) for _ in range(50)], "u8")
        assert hashes.holds(asked).tolist() == [int(value) in known for value in asked]
        hashes.add(new)
        known.update(new.tolist())
    assert hashes.holds(np.arange(4000, dtype="u8")).sum() == len(known)


def test_rate_and_rest() -> None:
    assert rate_and_rest(5000, 25, 100, 10.0) == "500 dialogues/s, 30 s left"
    assert rate_and_rest(5000, 1, 61, 10.0) == "500 dialogues/s, 10 min left"
    assert rate_and_rest(5000, 1, 1801, 10.0) == "500 dialogues/s, 5.0 h left"
    assert rate_and_rest(0, 0, 100, 0.0) == ""


def test_rows_of_instances_are_those_of_the_store(shared_data: Path) -> None:
    files = {"openai": None, "sharegpt": shared_data / "glaive" / "glaive_first200.json"}
    files["toolrl"] = shared_data / "toolrl" / "rlla_sft_first260.json"
    compared = 0
    for name, path in files.items():
        reader = get_source(name)
        rows = Rows(path) if path else [Row("a", n, row(n)) for n in range(20)]
        for item in rows:
            found = examine(item, reader)
            if isinstance(found, Rejected):
                continue
            dialogue = found.dialogue
            assert found.content == dialogue_hash(dialogue.tools, dialogue.messages)
            slow = [instance_row(instance) for instance in decompose(dialogue, last_step_only=reader.last_step_only)]
            assert dialogue_rows(found.texts, dialogue.split or split_of(dialogue.id), reader.last_step_only) == slow
            compared += len(slow)
    assert compared > 700


ARGUMENTS = st.dictionaries(
    st.text(max_size=3),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
        lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=2), inner, max_size=2)),
        max_leaves=4,
    ),
    max_size=4,
)


@given(
    role=st.sampled_from(get_args(Role)),
    content=st.none() | st.text(max_size=5) | st.sampled_from(["", "\ud800", '\x00\x1f\x7f\u2028"\\/']),
    calls=st.lists(st.builds(ToolCall, st.text(max_size=3), ARGUMENTS), max_size=2),
    thought=st.none() | st.text(max_size=3),
    name=st.none() | st.text(max_size=3),
)
def test_texts_of_messages_are_those_of_the_encoders(
    role: Role, content: str | None, calls: list[ToolCall], thought: str | None, name: str | None
) -> None:
    message = Message(role, content, tuple(calls), thought, name)
    bare = replace(message, thought=None)
    whole, without, stored = _message_texts(message)
    assert whole == canonical_json(message.to_json())
    assert without == canonical_json(bare.to_json())
    try:
        wanted = strict_json.dump(message_to_json(bare))
    except ValueError:
        with pytest.raises(ValueError):
            (stored or "\ud800").encode("utf-8")
    else:
        assert stored == wanted


def test_a_tool_that_was_read_before_is_told_from_one_that_looks_like_it() -> None:
    def tool(**properties: Any) -> dict[str, Any]:
        return {"name": "f", "parameters": {"type": "object", "properties": properties}}

    defaults: list[Any] = [1, 1.0, True, "1"]
    read = [read_tool(tool(a={"default": value}), "tool 0").parameters["properties"]["a"] for value in defaults]
    assert [repr(found["default"]) for found in read] == ["1", "1.0", "True", "'1'"]
    for order in (("a", "b"), ("b", "a")):
        made = tool(**{name: {"type": "string"} for name in order})
        assert list(read_tool(made, "tool 0").parameters["properties"]) == list(order)
    shared = {"type": "string"}
    assert read_tool(tool(a=shared, b=shared), "x") is read_tool(tool(a={"type": "string"}, b={"type": "string"}), "y")
