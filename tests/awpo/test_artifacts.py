import json
import os
from pathlib import Path

import pytest

from awpo.artifacts import file_hash, input_identity, open_stage, read_manifest, write_atomically
from awpo.errors import UserError


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


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    write_atomically(target, "old")

    def broken(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="No space"):
        write_atomically(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


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
