"""A disk that is really full: a small file system in memory, filled up while a stage works. Then room is made, and the
same again ends as if there had been room all the time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from awpo.artifacts import MANIFEST, open_stage, read_manifest
from awpo.data.store import read_instances, write_instances
from awpo.endpoint_cache import CachedAnswer, EndpointCache
from awpo.errors import UserError
from awpo.events import EVENTS, METRICS, RunLog, Tail
from awpo.files import write_atomically
from awpo.full_disk import full_disk
from awpo.processes import run_worker
from evaluation.items import write_items
from tests.small_disk import MIB, SmallDisk, small_disk

ROOM = 2 * MIB

WORKER = """
from pathlib import Path
from awpo.artifacts import open_stage
from awpo.processes import worker_main

def run(job):
    folder = Path(job["out"])
    with open_stage(folder, "example", {}, {}) as stage:
        with open(folder / "result.bin", "wb") as file:
            for _ in range(job["pieces"]):
                file.write(bytes(2**16))
        stage.finish()

worker_main(run)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", ROOM) as found:
        yield found


def test_a_file_that_does_not_fit_leaves_the_old_one(disk: SmallDisk) -> None:
    path = disk.folder / "scores.json"
    write_atomically(path, "[]")
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "x" * 100_000)
    assert [p.name for p in disk.folder.iterdir() if p.name != "ballast"] == ["scores.json"]
    assert path.read_text() == "[]"


def test_lines_are_whole_or_not_there(disk: SmallDisk) -> None:
    log = RunLog(disk.folder)
    log.metrics(1, {"loss": 1.0})
    disk.fill(leave=8192)
    written = 1
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012 - the line at which the room ends is not known
        for step in range(2, 2000):
            log.metrics(step, {f"metric/{n}": 1.0 for n in range(40)})
            written = step
    assert [row.get("step") for row in Tail(disk.folder / METRICS)] == list(range(1, written + 1))
    assert (disk.folder / METRICS).read_bytes().endswith(b"\n")
    disk.make_room()
    log.metrics(written + 1, {"loss": 1.0})
    assert [row["step"] for row in Tail(disk.folder / METRICS)] == list(range(1, written + 2))


def test_half_a_line_of_a_process_that_died_does_not_swallow_the_next(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_text('{"event": "progress", "don')
    RunLog(tmp_path).warning("after it")
    first, second = Tail(tmp_path / EVENTS)
    assert "unreadable" in first["message"]
    assert second["message"] == "after it"


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "filling_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return "filling_worker"


def test_a_worker_on_a_full_disk_ends_with_one_line_and_goes_on_later(disk: SmallDisk, worker: str) -> None:
    """Not a byte is left for the event that would tell of it."""
    out = disk.folder / "stage"
    job = {"out": str(out), "pieces": 12}
    disk.fill(leave=2**18)
    with pytest.raises(UserError, match=r"no space left on the disk of .*stage; free some and run the same again"):
        run_worker(worker, job, out)
    assert read_manifest(out) is None
    disk.make_room()
    run_worker(worker, job, out)
    assert (out / "result.bin").stat().st_size == 12 * 2**16
    assert read_manifest(out) is not None


def test_a_manifest_that_does_not_fit_is_no_result(disk: SmallDisk) -> None:
    out = disk.folder / "stage"
    with pytest.raises(UserError, match="no space left"), open_stage(out, "example", {}, {}) as stage:  # noqa: PT012
        (out / "text.txt").write_text("x")
        disk.fill()
        stage.finish({"why": "x" * 100_000})
    assert not (out / MANIFEST).exists()
    disk.make_room()
    with open_stage(out, "example", {}, {}) as stage:
        assert stage.resumed
        (out / "text.txt").write_text("x")
        stage.finish()
    assert read_manifest(out) is not None


def test_each_library_that_writes_is_understood(disk: SmallDisk) -> None:
    """Weights, a trainer's state, instances' and items' tables: what each of them raises of a full disk."""
    tensor = torch.zeros(2**20)
    disk.fill(leave=2**14)
    writers = {
        "safetensors": lambda: save_file({"w": tensor}, disk.folder / "w.safetensors"),
        "torch": lambda: torch.save({"w": tensor}, disk.folder / "w.pt"),
        "text": lambda: (disk.folder / "t").write_text("x" * 2**20),
        "events": lambda: [RunLog(disk.folder).note("x" * 2**18) for _ in range(4)],
        "atomic": lambda: write_atomically(disk.folder / "a", "x" * 2**20),
    }
    for name, write in writers.items():
        with pytest.raises(Exception) as raised:
            write()
        told = full_disk(raised.value, disk.folder)
        assert told is not None, f"{name}: {raised.value!r}"
        for path in disk.folder.iterdir():
            if path.name != "ballast":
                path.unlink()
    for other in (ValueError("no"), OSError(2, "No such file"), RuntimeError("unexpected position")):
        assert full_disk(other, Path("/")) is None


def test_the_cache_of_answers_says_so_and_keeps_what_it_has(disk: SmallDisk) -> None:
    path = disk.folder / "answers.sqlite"
    answer = CachedAnswer("x" * 20_000, "stop", 1, 1, 0.1)
    kept = 0
    with EndpointCache(path) as cache:
        disk.fill(leave=2**17)
        with pytest.raises(UserError, match=r"cannot be used \((database or disk is full|disk I/O error)"):  # noqa: PT012
            for number in range(1000):
                cache.put(str(number), "m", answer)
                kept += 1
    assert kept < 1000
    disk.make_room()
    with EndpointCache(path) as cache:
        assert len(cache) == kept
        cache.put("later", "m", answer)
        assert cache.get("later") == answer


def test_instances_and_items_that_do_not_fit_leave_nothing_that_is_read(disk: SmallDisk, instances: Path) -> None:
    rows = list(read_instances(instances)) * 200
    disk.fill(leave=2**12)
    with pytest.raises(UserError, match="free space"):
        write_instances(disk.folder / "data", rows)
    assert not list((disk.folder / "data").glob("*.parquet"))
    with pytest.raises(OSError, match="No space left"):
        write_items(disk.folder / "items.parquet", some_items())
    assert not (disk.folder / "items.parquet").exists()


def some_items() -> Iterator[object]:
    from evaluation.items import Item

    for number in range(300):
        text = os.urandom(400).hex()
        yield Item("b", "s", str(number), "d", "t", 0, 1, "call", -1, True, text, 1, False)


@pytest.fixture(scope="module")
def instances(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from awpo.config import CorpusConfig
    from awpo.data.decompose import decompose_source
    from awpo.embedded.corpus import write_corpus

    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "corpus", CorpusConfig(train_dialogues=10, validation_dialogues=1, test_dialogues=1))
    decompose_source(folder / "corpus" / "dialogues.jsonl", folder / "data")
    return folder / "data"


@pytest.mark.parametrize("who", ["a folder without the right to write", "a folder that is read-only for everybody"])
def test_a_folder_that_may_not_be_written_is_refused_in_one_line(tmp_path: Path, who: str) -> None:
    """As another user, since root may write everywhere; and on a file system that is mounted read-only."""
    folder = tmp_path / "place"
    folder.mkdir()
    # The interpreter may lie where other users may not look: so what is needed is imported before.
    code = (
        "import os, sys; from pathlib import Path; from awpo.artifacts import open_stage; from awpo.errors import UserError\n"
        "if sys.argv[2]: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try:\n"
        "    with open_stage(Path(sys.argv[1]) / 'out', 'example', {}, {}): pass\n"
        "except UserError as error: print(error)\n"
    )
    root, mounted = os.geteuid() == 0, "everybody" in who
    if mounted:
        made = ["mount", "-t", "tmpfs", "-o", "size=64k,ro", "tmpfs", str(folder)]
        if not root or subprocess.run(made, capture_output=True, check=False).returncode != 0:
            pytest.skip("a file system is mounted for this, which needs root and the right to mount")
    else:
        folder.chmod(0o555)
        for path in folder.parents if root else ():
            if path == Path(tempfile.gettempdir()):
                break
            path.chmod(path.stat().st_mode | 0o055)
    try:
        command = [sys.executable, "-c", code, str(folder), "nobody" if root and not mounted else ""]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
    [line] = found.stdout.splitlines()
    assert line.startswith(f"cannot write to {folder}/out: ")
    assert line.endswith("; choose a folder you may write to")
    assert not list(folder.iterdir())
