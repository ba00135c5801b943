"""What `awpo gc` removes and what it leaves: the decision alone, and on real folders with a real store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from awpo.artifacts import IN_PROGRESS, input_identity, open_stage
from awpo.endpoint_cache import CachedAnswer, EndpointCache
from awpo.errors import UserError
from awpo.folder_lock import alone_in
from tasks.cleanup import Decision, Item, References, decide
from tasks.cleanup_folders import find, identified, references, remove
from tasks.registry import Candidate, register
from tasks.tracking import RunFile, open_run
from tasks.tracking_store import Tracking

ROOT = Path(__file__).resolve().parents[2]
RUNS = Path("/runs")


def result(name: str, run_id: str | None = "gone", **rest: Any) -> Item:
    return Item(
        "result",
        RUNS / name,
        1,
        run_id=run_id,
        **{key: frozenset(value) if key != "busy" else value for key, value in rest.items()},
    )


def goes(items: list[Item], known: References) -> set[str]:
    return {one.item.path.relative_to(RUNS).as_posix() for one in decide(items, known) if one.goes}


DELETED = References(runs={"gone": "deleted", "here": "active"})


def test_only_the_result_of_a_deleted_run_goes() -> None:
    items = [
        result("deleted"),
        result("active", "here"),
        result("never", None),
        result("other-store", "who"),
        result("busy", busy=True),
    ]
    assert goes(items, DELETED) == {"deleted"}
    assert {one.reason for one in decide(items, DELETED) if not one.goes} == {
        "its run stands in MLflow",
        "no run ever told of it",
        "its run is not in this store",
        "a process works in it",
    }


def test_what_is_needed_stays_with_all_that_it_is_made_from() -> None:
    chain = [
        result("data", identities={"d"}),
        result("sft", identities={"s"}, inputs={"d"}),
        result("policy", identities={"p"}, inputs={"s", "d"}),
        result("evaluation", "here", inputs={"p"}),
        result("unused", identities={"u"}, inputs={"d"}),
    ]
    assert goes(chain, DELETED) == {"unused"}
    assert goes(chain[:3], DELETED) == {"data", "sft", "policy"}
    assert goes(chain[:3], References(runs=DELETED.runs, inputs=frozenset({"s"}))) == {"policy"}


def test_a_model_or_run_that_names_a_folder_in_it_holds_a_result() -> None:
    items = [result("policy"), result("policy-2")]
    known = References({RUNS / "policy" / "checkpoint": "models:/awpo/1"}, DELETED.runs)
    assert goes(items, known) == {"policy-2"}
    assert decide(items, known)[0].reason == "models:/awpo/1 refers to it"


def test_a_folder_with_something_in_it_that_stays_stays() -> None:
    assert goes([result("out"), result("out/inner", "here"), result("out2"), result("out2/inner")], DELETED) == {
        "out2",
        "out2/inner",
    }


def test_leftovers_go_unless_somebody_works_there() -> None:
    def leftover(name: str, busy: bool = False) -> Item:
        return Item("temporary", RUNS / name, 1, "left over", busy=busy)

    items = [leftover("a/.x.1.tmp"), leftover("b/.x.1.tmp", busy=True), result("c"), leftover("c/.x.1.tmp")]
    assert goes(items, DELETED) == {"a/.x.1.tmp", "c"}  # the last one goes with its folder


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["gone", "here", "who", None]),
            st.frozensets(st.integers(0, 5)),
            st.frozensets(st.integers(0, 5)),
            st.booleans(),
        ),
        max_size=8,
    ),
    st.frozensets(st.integers(0, 7)),
)
def test_nothing_goes_that_anything_that_stays_needs(rows: list[Any], named: frozenset[int]) -> None:
    items = [
        result(str(n), run, identities=map(str, own), inputs=map(str, inputs), busy=busy)
        for n, (run, own, inputs, busy) in enumerate(rows)
    ]
    known = References({RUNS / str(n): "a model" for n in named}, DELETED.runs)
    decisions = decide(items, known)
    needed = {name for one in decisions if not one.goes for name in one.item.inputs}
    for n, one in enumerate(decisions):
        if one.goes:
            assert one.item.run_id == "gone"
            assert not one.item.busy
            assert n not in named
            assert not one.item.identities & needed


# On real folders, with a real store.


def stage(tracking: Tracking, folder: Path, inputs: dict[str, Path] | None = None, *, deleted: bool = False) -> Path:
    """A finished stage with a run that told of it."""
    with open_stage(folder, "test", {name: input_identity(path) for name, path in (inputs or {}).items()}, {}) as made:
        (folder / "checkpoint").mkdir()
        (folder / "checkpoint" / "config.json").write_text(json.dumps({"folder": folder.name}))
        made.finish()
    run = open_run(tracking, folder.name, folder, made.manifest.fingerprint, {})
    run.inputs(inputs or {})
    run.end("FINISHED")
    if deleted:
        tracking.client().delete_run(run.run_id)
    return folder


def plan(tracking: Tracking, root: Path, days: float = 90) -> list[Decision]:
    items = find(root, days)
    known = references(tracking, items)
    return decide(identified(items, known), known)


def going(tracking: Tracking, root: Path) -> list[str]:
    return sorted(one.item.path.relative_to(root).as_posix() for one in plan(tracking, root) if one.goes)


@pytest.fixture
def root(tracking: Tracking, tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_deleted_runs_lose_their_results_and_nothing_else_does(tracking: Tracking, root: Path) -> None:
    data = stage(tracking, root / "x" / "data", deleted=True)
    sft = stage(tracking, root / "x" / "sft", {"data": data}, deleted=True)
    stage(tracking, root / "x" / "policy", {"model": sft / "checkpoint", "data": data})
    lone = stage(tracking, root / "x" / "lone", {"data": data}, deleted=True)
    with open_stage(root / "mine", "decompose", {}, {}) as untracked:
        untracked.finish()
    assert going(tracking, root) == ["x/lone"]  # sft is named by its checkpoint's hash, data by its manifest
    [decision] = [one for one in plan(tracking, root) if one.goes]
    remove(decision, 90)
    assert not lone.exists()
    assert RunFile.read(lone) is None
    assert sorted(path.name for path in (root / "x").iterdir() if path.is_dir()) == ["data", "policy", "sft"]
    assert going(tracking, root) == []


def test_a_registered_model_keeps_its_checkpoint_though_its_run_was_deleted(tracking: Tracking, root: Path) -> None:
    folder = stage(tracking, root / "policy")
    file = RunFile.read(folder)
    assert file
    register(Candidate(folder / "checkpoint", run_id=file.run_id), tracking)
    tracking.client().delete_run(file.run_id)
    assert going(tracking, root) == []
    tracking.client().delete_model_version("awpo", "1")
    assert going(tracking, root) == ["policy"]


def test_runs_of_another_store_are_not_taken_for_deleted(tracking: Tracking, root: Path) -> None:
    folder = stage(tracking, root / "policy", deleted=True)
    file = RunFile.read(folder)
    assert file
    file.run_id = "0" * 32
    file.write(folder)
    assert going(tracking, root) == []


def test_a_result_elsewhere_keeps_what_it_was_made_from(tracking: Tracking, root: Path, tmp_path: Path) -> None:
    data = stage(tracking, root / "data", deleted=True)
    with open_stage(tmp_path / "elsewhere", "test", {"data": input_identity(data)}, {}) as made:
        made.finish()
    run = open_run(tracking, "elsewhere", tmp_path / "elsewhere", made.manifest.fingerprint, {})
    assert going(tracking, root) == []
    tracking.client().delete_run(run.run_id)
    assert going(tracking, root) == ["data"]


def test_unfinished_work_that_is_under_way_is_left_alone(tracking: Tracking, root: Path) -> None:
    folder = root / "policy"
    with suppress(InterruptedError), open_stage(folder, "test", {}, {}) as made:
        run = open_run(tracking, "policy", folder, made.manifest.fingerprint, {})
        (folder / ".resume").mkdir()
        raise InterruptedError
    assert (folder / IN_PROGRESS).exists()
    assert going(tracking, root) == []  # its run stands: it may go on
    tracking.client().delete_run(run.run_id)
    with alone_in(folder):
        assert going(tracking, root) == []
    [decision] = [one for one in plan(tracking, root) if one.goes]
    with alone_in(folder), pytest.raises(UserError, match="another process is at work"):
        remove(decision, 90)  # somebody began between looking and removing
    assert folder.exists()
    remove(decision, 90)
    assert not folder.exists()


def test_checkpoints_of_finished_trainings_go(tracking: Tracking, root: Path) -> None:
    folder = stage(tracking, root / "policy")
    (folder / ".resume" / "checkpoint-4").mkdir(parents=True)
    (folder / ".resume" / "checkpoint-4" / "optimizer.pt").write_bytes(b"x" * 1000)
    [decision] = [one for one in plan(tracking, root) if one.goes]
    assert (decision.item.path, decision.item.bytes) == (folder / ".resume", 1000)
    remove(decision, 90)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint", "manifest.json"]


def test_half_written_files_of_dead_processes_go(tracking: Tracking, root: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    old = time.time() - 2 * 86400
    names = {f".a.{dead.pid}.tmp": old, f".b.{os.getpid()}.tmp": old, f".c.{dead.pid}.tmp": time.time(), "d.tmp": old}
    for name, when in names.items():
        (root / name).write_text("half")
        os.utime(root / name, (when, when))
    (root / f".e.{dead.pid}.tmp").mkdir()
    (root / f".e.{dead.pid}.tmp" / "manifest.json").write_text("{}")
    os.utime(root / f".e.{dead.pid}.tmp", (old, old))
    assert going(tracking, root) == [f".a.{dead.pid}.tmp", f".e.{dead.pid}.tmp"]
    for decision in plan(tracking, root):
        if decision.goes:
            remove(decision, 90)
    assert not (root / f".e.{dead.pid}.tmp").exists()
    assert (root / f".c.{dead.pid}.tmp").exists()


def test_old_answers_go_and_newer_ones_stay(tracking: Tracking, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    with EndpointCache(root / "endpoint-cache.sqlite") as cache:
        for age in (100, 91, 89, 0):
            monkeypatch.setattr(time, "time", lambda age=age: now - age * 86400)
            cache.put(f"key-{age}", "m", CachedAnswer(f"answer {age}", "stop", 1, 1, 0.1))
    monkeypatch.setattr(time, "time", lambda: now)
    [decision] = [one for one in plan(tracking, root) if one.goes]
    assert decision.reason == "2 answers of endpoints are older than 90 days"
    remove(decision, 90)
    with EndpointCache(root / "endpoint-cache.sqlite") as cache:
        assert [cache.get(f"key-{age}") is None for age in (100, 91, 89, 0)] == [True, True, False, False]


def test_links_are_not_followed(tracking: Tracking, root: Path, tmp_path: Path) -> None:
    outside = stage(tracking, tmp_path / "outside", deleted=True)
    (root / "link").symlink_to(tmp_path)
    assert going(tracking, root) == []
    assert outside.exists()


def test_a_file_that_is_no_manifest_of_ours_holds_its_folder(tracking: Tracking, root: Path) -> None:
    folder = stage(tracking, root / "policy", deleted=True)
    (folder / "manifest.json").write_text('{"name": "a web page"}')
    assert going(tracking, root) == []


def test_the_command_shows_first_and_removes_when_told(tracking: Tracking, root: Path) -> None:
    folder = stage(tracking, root / "policy", deleted=True)
    kept = stage(tracking, root / "kept")

    def gc(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flows.cli", "gc", *arguments]
        environment = {**os.environ, "AWPO_RUNS": str(root), "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)

    shown = gc()
    assert shown.returncode == 0, shown.stderr
    assert "policy: its run was deleted in MLflow" in shown.stdout
    assert "results that stay: 1, as a run or a registered model refers to it" in shown.stdout
    assert folder.exists()
    told = json.loads(gc("--delete", "--json").stdout.splitlines()[-1])
    assert [(row["path"], row["kind"]) for row in told["items"] if row["goes"]] == [(str(folder), "result")]
    assert told["bytes"] > 0
    assert not folder.exists()
    assert kept.exists()
