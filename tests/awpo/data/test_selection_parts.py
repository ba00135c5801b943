"""Selection in parts: the same rows wherever the cuts are, the same bytes however many processes, and after a kill."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from awpo.artifacts import open_stage, read_manifest
from awpo.data import instance_parts, store
from awpo.data.decompose import decompose
from awpo.data.instance_parts import plan_instance_parts, read_rows
from awpo.data.selection import select_instances
from awpo.data.settings import (
    BenchmarkText,
    DecontaminationConfig,
    LengthConfig,
    MixtureConfig,
    NearDuplicatesConfig,
    SelectConfig,
)
from awpo.data.store import read_instances, write_instances
from awpo.embedded.tokenizer import train_tokenizer
from awpo.types import Dialogue, Instance, Message, Tool

WORDS = [f"word{number}" for number in range(500)]
TOOLS = (Tool("f", "", {"type": "object", "properties": {}}),)


def some(number: int, source: str, seed: int = 0) -> list[list[Instance]]:
    """Dialogues of one to five steps, of which some are nearly the same as another, and some repeat a question."""
    draw, found = random.Random(seed), []
    texts: list[list[str]] = []
    for index in range(number):
        words = draw.choices(WORDS, k=40)
        if index % 7 == 3 and index > 5:
            words = [*texts[index - 5][:-1], "changed"]
        if index % 11 == 5:
            words[5:18] = [f"asked{place}" for place in range(13)]
        texts.append(words)
        messages: list[Message] = []
        for step in range(1 + index % 5):
            messages += [Message("user", " ".join(words[step:])), Message("assistant", f"Answer {index} {step}")]
        split: Any = "test" if index % 13 == 1 else "train"
        found.append(decompose(Dialogue(f"{source} {index}", source, TOOLS, tuple(messages), split)))
    return found


def folder_of(path: Path, dialogues: list[list[Instance]], rows_per_group: int = 17) -> Path:
    """Several shards of several row groups, with dialogues that go over from one to the next."""
    instances = [instance for found in dialogues for instance in found]
    with pytest.MonkeyPatch.context() as patch, open_stage(path, "decompose", {}, {"n": len(instances)}) as stage:
        patch.setattr(store, "ROWS_PER_GROUP", rows_per_group)
        patch.setattr(store, "ROWS_PER_SHARD", 8 * rows_per_group)
        write_instances(path, instances, {"rationales": "somebody"})
        stage.finish()
    return path


def everything(tmp_path: Path) -> SelectConfig:
    question = tmp_path / "question.json"
    question.write_text('[{"question": "' + " ".join(f"asked{place}" for place in range(10)) + '"}]')
    train_tokenizer([found[0] for found in some(50, "a")]).save_pretrained(tmp_path / "tokenizer")
    return SelectConfig(
        near_duplicates=NearDuplicatesConfig(),
        decontamination=DecontaminationConfig(benchmarks={"mine": BenchmarkText(path=str(question))}),
        lengths=LengthConfig(tokenizer=str(tmp_path / "tokenizer"), most=700),
        mixture=MixtureConfig(sources={"a": 1, "b": 1}),
    )


@pytest.mark.parametrize("size", [1, 9, 16, 17, 18, 100])
def test_cuts_are_between_dialogues(tmp_path: Path, size: int) -> None:
    dialogues = some(60, "a")
    folders = [folder_of(tmp_path / "1", dialogues), folder_of(tmp_path / "2", some(20, "b"))]
    parts = plan_instance_parts(folders, size)
    assert [part.number for part in parts] == list(range(len(parts)))
    names, rows = [], []
    for part in parts:
        read = [row for table in read_rows(part, ["dialogue_id", "id"]) for row in table.to_pylist()]
        assert len(read) == part.rows
        names.append({row["dialogue_id"] for row in read})
        rows += [row["id"] for row in read]
    assert rows == [instance.id for folder in folders for instance in read_instances(folder)]
    assert sum(map(len, names)) == 80, "a dialogue is in one part only"
    assert len(parts) >= (80 if size == 1 else 240 // (size + 5))


@pytest.mark.slow
def test_parts_are_what_one_piece_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = folder_of(tmp_path / "1", some(200, "a")), folder_of(tmp_path / "2", some(80, "b", 5))
    config = everything(tmp_path)
    whole = select_instances([one, two], tmp_path / "whole", config)
    left = read_instances(tmp_path / "whole")
    table = whole.counts["selection"]
    assert all(count > 0 for count in table["a"].values()), "each reason holds of something"
    for source in "ab":
        assert table[source]["read"] == sum(table[source].values()) - table[source]["read"]
    assert whole.counts["contaminated"]["a"]["mine"] > 3
    assert store.read_metadata(tmp_path / "whole") == {"rationales": "somebody"}
    monkeypatch.setattr(instance_parts, "PART_ROWS", 50)
    cut = [select_instances([one, two], tmp_path / f"cut {n}", config, workers=n) for n in (1, 3)]
    assert cut[0].outputs == cut[1].outputs
    assert cut[0].counts == cut[1].counts == whole.counts
    assert read_instances(tmp_path / "cut 1") == left
    # The same dialogues whatever the order of the input.
    for order in range(2):
        mixed = [[*some(200, "a"), *some(80, "b", 5)][index] for index in random.Random(order).sample(range(280), 280)]
        folder = folder_of(tmp_path / f"mixed {order}", mixed, 5 + order)
        found = select_instances([folder], tmp_path / f"of mixed {order}", config, workers=1)
        assert {item.id for item in read_instances(tmp_path / f"of mixed {order}")} == {item.id for item in left}
        assert found.counts["selection"] == table


RUN = """
import sys
from pathlib import Path
from awpo.data import instance_parts
from awpo.data.selection import select_instances
from awpo.data.settings import SelectConfig
instance_parts.PART_ROWS = 50
config = SelectConfig.model_validate_json(Path(sys.argv[3]).read_text())
select_instances([Path(sys.argv[1])], Path(sys.argv[2]), config, workers=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["examined", "compared"])
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    folder, out, config = folder_of(tmp_path / "in", some(500, "a"), 60), tmp_path / "out", everything(tmp_path)
    config = config.model_copy(update={"mixture": None})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *map(str, (folder, out, tmp_path / "config.json"))], start_new_session=True
    )
    pattern = ".select/*.done" if stage == "examined" else ".select/pairs-*.npy"
    deadline = time.monotonic() + 180
    while len(list(out.glob(pattern))) < 3:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert read_manifest(out) is None
    done = {path: path.stat().st_mtime_ns for path in out.glob(".select/*.done")}
    monkeypatch.setattr(instance_parts, "PART_ROWS", 50)
    seen: dict[Path, int] = {}

    def look(number: int, total: int, what: str = "") -> None:
        seen.update({path: path.stat().st_mtime_ns for path in done if path.exists()})

    resumed = select_instances([folder], out, config, workers=1, progress=look)
    clean = select_instances([folder], tmp_path / "clean", config, workers=1)
    assert seen == done, "what was done was done again"
    assert resumed.outputs == clean.outputs
    assert resumed.counts == clean.counts
    assert not (out / ".select").exists()


MEMORY = """
import resource, sys, tempfile
from pathlib import Path
import numpy as np
from awpo.data import near_duplicates
from awpo.data.settings import NearDuplicatesConfig
near_duplicates.BUCKET_RECORDS = 8192
config, number, size = NearDuplicatesConfig(), int(sys.argv[1]), 2000
draw = np.random.default_rng(0)
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    parts = number // size
    for part in range(parts):
        signatures = draw.integers(0, 2**32, (size, 128), "u4")
        signatures[1::50] = signatures[::50]
        near_duplicates.write_part(folder, part, list(signatures), draw.integers(0, 2**62, size).tolist(), config)
    sizes = [size] * parts
    buckets = near_duplicates.buckets_of(sizes, config)
    pairs = (near_duplicates.similar_pairs(folder, sizes, bucket, config) for bucket in buckets)
    found = near_duplicates.duplicates_of(folder, sizes, pairs)
print(len(found), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_ten_times_as_many_dialogues_take_no_more_memory() -> None:
    peaks = []
    for number in (10_000, 100_000):
        done = subprocess.run([sys.executable, "-c", MEMORY, str(number)], capture_output=True, text=True, check=True)
        found, peak = map(int, done.stdout.split())
        assert found == number // 50
        peaks.append(peak)
    assert peaks[1] < 1.1 * peaks[0], f"{peaks[0]} and {peaks[1]} KiB"
