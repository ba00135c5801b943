import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from awpo.artifacts import IN_PROGRESS, finished_result, input_identity, open_stage, read_manifest, stage_fingerprint
from awpo.errors import UserError
from awpo.files import file_hash


def finish(
    folder: Path, text: str = "result", config: dict[str, int] | None = None, inputs: dict[str, str] | None = None
) -> bool:
    """Runs a one-file stage; returns whether it had to do anything."""
    with open_stage(folder, "example", inputs or {"data": "1"}, config or {"a": 1}) as stage:
        if stage.finished:
            return False
        (folder / "result.txt").write_text(text)
        stage.finish({"rows_read": 3})
    return True


def test_a_finished_stage_is_not_done_again(tmp_path: Path) -> None:
    assert finish(tmp_path / "out")
    assert not finish(tmp_path / "out", "other")
    assert (tmp_path / "out" / "result.txt").read_text() == "result"


def test_other_config_or_inputs_redo_the_stage_and_remove_what_was_there(tmp_path: Path) -> None:
    finish(tmp_path / "out")
    (tmp_path / "out" / "left_over.txt").write_text("old")
    assert finish(tmp_path / "out", config={"a": 2})
    assert not (tmp_path / "out" / "left_over.txt").exists()
    assert finish(tmp_path / "out", config={"a": 2}, inputs={"data": "2"})


def test_the_manifest_says_what_came_from_what(tmp_path: Path) -> None:
    finish(tmp_path / "out")
    raw = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert raw["rows_read"] == 3
    assert raw["inputs"] == {"data": "1"}
    assert raw["config"] == {"a": 1}
    assert raw["outputs"] == {"result.txt": file_hash(tmp_path / "out" / "result.txt")}
    assert raw["code"]


def test_unfinished_work_of_the_same_kind_is_kept_and_of_another_kind_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def die_half_way() -> None:
        with open_stage(out, "example", {"data": "1"}, {}):
            (out / "part.txt").write_text("half")
            raise RuntimeError("died")

    with pytest.raises(RuntimeError, match="died"):
        die_half_way()
    assert read_manifest(out) is None
    with open_stage(out, "example", {"data": "1"}, {}) as stage:
        assert stage.resumed
        assert not stage.finished
        assert (out / "part.txt").exists()
    with open_stage(out, "example", {"data": "2"}, {}) as stage:
        assert not stage.resumed
        assert not (out / "part.txt").exists()


def test_a_folder_that_no_stage_wrote_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="no stage of this project wrote"):
        finish(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_the_result_of_another_stage_is_left_alone(tmp_path: Path) -> None:
    finish(tmp_path)
    with (
        pytest.raises(UserError, match="holds the result of another stage, 'example'"),
        open_stage(tmp_path, "train", {"data": "1"}, {"a": 1}),
    ):
        pass
    assert (tmp_path / "result.txt").read_text() == "result"
    assert not finish(tmp_path)


def test_a_result_of_which_a_file_is_missing_is_made_again(tmp_path: Path) -> None:
    finish(tmp_path)
    (tmp_path / "result.txt").unlink()
    assert finish(tmp_path)
    assert (tmp_path / "result.txt").exists()


def test_a_path_below_a_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        finish(tmp_path / "file" / "out")


def test_a_manifest_of_another_make_is_named(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"manifest\.json is not a manifest"):
        read_manifest(tmp_path)


def test_identity_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    finish(tmp_path / "one")
    finish(tmp_path / "two")
    finish(tmp_path / "three", text="other")
    assert input_identity(tmp_path / "one") == input_identity(tmp_path / "two")
    assert input_identity(tmp_path / "one") != input_identity(tmp_path / "three")
    with pytest.raises(UserError, match="does not exist"):
        input_identity(tmp_path / "four")


def fail(folder: Path, config: dict[str, int], *, hidden: bool = False) -> None:
    """A stage that a person must mend, after it has written something."""
    with open_stage(folder, "example", {"data": "1"}, config):
        (folder / "result.txt").write_text("half")
        if hidden:
            (folder / ".answers.jsonl").write_text("dear")
        raise UserError("the row cannot be used; give another")


def test_a_failed_attempt_gives_the_earlier_result_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    finish(out)
    before = {path.name: path.read_text() for path in out.iterdir()}
    with pytest.raises(UserError, match="cannot be used"):
        fail(out, {"a": 2})
    assert {path.name: path.read_text() for path in out.iterdir()} == before
    assert not finish(out)


def test_a_failed_first_attempt_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be used"):
        fail(tmp_path / "out", {"a": 1})
    assert not (tmp_path / "out").exists()


def test_a_failed_attempt_keeps_what_a_later_one_goes_on_from(tmp_path: Path) -> None:
    out = tmp_path / "out"
    finish(out)
    with pytest.raises(UserError, match="cannot be used"):
        fail(out, {"a": 2}, hidden=True)
    assert (out / ".answers.jsonl").read_text() == "dear"
    with open_stage(out, "example", {"data": "1"}, {"a": 2}) as stage:
        assert stage.resumed
        stage.finish()
    assert not (out / ".previous").exists()


class Killed(RuntimeError):
    pass


def begin(folder: Path, config: dict[str, int], growing: tuple[str, ...] = ()) -> tuple[bool, str]:
    """An attempt that writes a file and dies; whether it went on from an earlier one, and what had changed."""
    told: list[tuple[bool, str]] = []

    def die_half_way() -> None:
        with open_stage(folder, "example", {"data": "1"}, config, growing=growing) as stage:
            told.append((stage.resumed, stage.changes))
            (folder / "part.txt").write_text("half")
            raise Killed

    with pytest.raises(Killed):
        die_half_way()
    return told[0]


def test_seconds_are_those_of_all_attempts(tmp_path: Path) -> None:
    begin(tmp_path, {"a": 1})
    mark = json.loads((tmp_path / IN_PROGRESS).read_text())
    assert len(mark["seconds"]) == 1
    assert mark["began"] is None
    # The second is killed by the system and can say nothing: its files tell how long it lived.
    (tmp_path / IN_PROGRESS).write_text(json.dumps({**mark, "seconds": [40.0], "began": 1000.0}))
    for name, written in (("part.txt", 1025.5), ("log.txt", 5000.0), ("job.json", 5000.0), (IN_PROGRESS, 1000.0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (written, written))
    with open_stage(tmp_path, "example", {"data": "1"}, {"a": 1}) as stage:
        assert stage.resumed
        assert stage.earlier == [40.0, 25.5]
        manifest = stage.finish()
    assert 65.5 <= manifest.seconds < 165.5
    assert manifest.attempts == 3
    assert read_manifest(tmp_path) == manifest


def test_work_that_only_grew_is_gone_on_with_where_the_stage_allows_it(tmp_path: Path) -> None:
    assert begin(tmp_path, {"steps": 4, "a": 1}) == (False, "")
    assert begin(tmp_path, {"steps": 6, "a": 1}, ("steps",)) == (True, "steps was 4 and is 6")
    assert begin(tmp_path, {"steps": 6, "a": 1}) == (True, "")
    assert begin(tmp_path, {"steps": 5, "a": 1}, ("steps",)) == (False, "steps was 6 and is 5")
    assert begin(tmp_path, {"steps": 7, "a": 2}, ("steps",)) == (False, "steps was 5 and is 7, a was 1 and is 2")
    assert begin(tmp_path, {"steps": 8, "a": 2}) == (False, "steps was 7 and is 8")


def test_a_mark_of_an_earlier_version_is_understood(tmp_path: Path) -> None:
    begin(tmp_path, {"a": 1})
    (tmp_path / IN_PROGRESS).write_text(stage_fingerprint("example", {"data": "1"}, {"a": 1}))
    assert begin(tmp_path, {"a": 1}) == (True, "")
    (tmp_path / IN_PROGRESS).write_text("0123456789012345")  # of other work; a number in JSON
    assert begin(tmp_path, {"a": 1}) == (False, "")


def test_of_several_processes_the_first_alone_writes(tmp_path: Path) -> None:
    with open_stage(tmp_path / "out", "example", {}, {}) as stage:
        before = (tmp_path / "out" / IN_PROGRESS).read_text()

        def follow() -> None:
            with open_stage(tmp_path / "out", "example", {}, {}, leads=False) as follower:
                assert not follower.finished
                raise UserError("each process meets the same mistake")

        with pytest.raises(UserError, match="same mistake"):
            follow()
        assert (tmp_path / "out" / IN_PROGRESS).read_text() == before
        stage.finish()
    with open_stage(tmp_path / "out", "example", {}, {}, leads=False) as follower:
        assert follower.finished


def test_the_logs_of_all_processes_are_no_part_of_a_result(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("log.txt", "log.rank-1.txt", "log.rank-12.txt", "job.json", "events.jsonl"):
        (out / name).write_text("there before the stage is opened")
    with open_stage(out, "example", {}, {}) as stage:
        (out / "log.rank-x.txt").write_text("a result")
        assert set(stage.finish().outputs) == {"log.rank-x.txt"}
    with open_stage(out, "example", {}, {"a": 1}):
        assert (out / "log.rank-12.txt").exists()
        assert not (out / "log.rank-x.txt").exists()


def test_a_result_of_an_earlier_version_is_known_by_its_former_fingerprint(tmp_path: Path) -> None:
    finish(tmp_path, config={"a": 1, "save_every": 2})
    raw = json.loads((tmp_path / "manifest.json").read_text())
    del raw["attempts"]  # which it did not count
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    with open_stage(tmp_path, "example", {"data": "1"}, {"a": 1}, former=raw["fingerprint"]) as stage:
        assert stage.finished
        assert stage.manifest.attempts == 1
    assert finished_result(tmp_path, "other") is None
    assert finished_result(tmp_path, "other", raw["fingerprint"]) is not None


def test_unfinished_work_of_an_earlier_version_is_gone_on_with(tmp_path: Path) -> None:
    begin(tmp_path, {"a": 1})
    (tmp_path / IN_PROGRESS).write_text("0123456789abcdef")
    with open_stage(tmp_path, "example", {"data": "1"}, {"b": 1}, former="0123456789abcdef") as stage:
        assert stage.resumed
        assert (tmp_path / "part.txt").exists()


@pytest.mark.parametrize(
    "what", ["open_stage(folder, 'example', {}, {}).__enter__()", "write_atomically(folder / 'job.json', '{}')"]
)
def test_a_process_killed_while_it_writes_its_first_file_leaves_nothing_in_the_way(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    code = (
        "import os, signal, sys; from pathlib import Path; from awpo.artifacts import open_stage; from awpo.files import write_atomically\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"folder = Path(sys.argv[1]); {what}\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == -signal.SIGKILL
    assert [path.suffix for path in folder.iterdir()] == [".tmp"]
    with pytest.raises(UserError, match="mend it"), open_stage(folder, "example", {}, {}):
        raise UserError("mend it")
    with open_stage(folder, "example", {}, {}) as stage:
        (folder / "text.txt").write_text("x")
        stage.finish()
    assert list(stage.manifest.outputs) == ["text.txt"]
