"""The registry on a real store: names resolve to the files that were registered, or say what is wrong with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from awpo.errors import UserError
from tasks.promotion import promoted, unfinished_promotions
from tasks.registry import (
    Candidate,
    accept_scores,
    accepted_scores,
    aliased_version,
    candidate_of,
    find_version,
    newest_candidate,
    register,
    resolve_checkpoint,
)
from tasks.tracking import TrackedRun, open_run
from tasks.tracking_store import Tracking


def checkpoint(folder: Path, text: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(text)
    return folder


def trained(tracking: Tracking, folder: Path, method: str, name: str) -> TrackedRun:
    """A training stage's run with its checkpoint as a logged model."""
    run = open_run(tracking, name, folder.parent / name, "work", {}, begun=True)
    labels = {"model": "m", "method": method, "seed": 0, "init": "sft", "instances": str(folder.parent / "instances")}
    run.checkpoint(name, folder, labels)
    run.end("FINISHED")
    return run


def test_a_name_leads_to_the_files_that_were_registered(tracking: Tracking, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "one")
    version = register(Candidate(folder), tracking)
    tracking.client().set_registered_model_alias("awpo", "champion", version.version)
    for name in ("models:/awpo@champion", f"models:/awpo/{version.version}", str(folder)):
        assert resolve_checkpoint(name, tracking) == folder
    assert resolve_checkpoint("embedded-1m", tracking) is None, "a preset has no folder yet"


def test_files_that_were_changed_or_are_gone_are_refused(tracking: Tracking, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "one")
    version = register(Candidate(folder), tracking)
    name = f"models:/awpo/{version.version}"
    (folder / "config.json").write_text("{ }")
    with pytest.raises(UserError, match=f"the files of {name} .* are not those that were registered"):
        resolve_checkpoint(name, tracking)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=f"the checkpoint of {name} is gone: {folder}"):
        resolve_checkpoint(name, tracking)


def test_a_name_that_nobody_has_is_said(tracking: Tracking, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no models:/awpo@champion; the flow `promote` makes a champion"):
        find_version("models:/awpo@champion", tracking)
    with pytest.raises(UserError, match=r"no checkpoint '.*nowhere'"):
        resolve_checkpoint(str(tmp_path / "nowhere"), tracking)
    assert aliased_version(tracking, "champion") is None


def test_the_newest_candidate_is_a_policy_whose_files_are_there(tracking: Tracking, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no trained checkpoint is known"):
        newest_candidate(tracking)
    first = checkpoint(tmp_path / "grpo")
    run = trained(tracking, first, "grpo", "first")
    trained(tracking, checkpoint(tmp_path / "sft"), "sft", "demonstrations")
    gone = checkpoint(tmp_path / "gone")
    trained(tracking, gone, "awpo", "deleted")
    shutil.rmtree(gone)
    found = newest_candidate(tracking)
    assert (found.checkpoint, found.run_id, found.instances) == (first, run.run_id, tmp_path / "instances")
    assert candidate_of(first, tracking) == found
    version = register(found, tracking)
    assert (version.run_id, version.tags["awpo.checkpoint"]) == (run.run_id, str(first))


def test_accepted_scores_are_those_of_a_version_and_a_protocol(tracking: Tracking, tmp_path: Path) -> None:
    version = register(Candidate(checkpoint(tmp_path / "one")), tracking)
    accept_scores(version, "protocol", {"held_out": 0.5}, tracking)
    version = find_version(f"models:/awpo/{version.version}", tracking)
    assert accepted_scores(version, "protocol") == {"held_out": 0.5}
    assert accepted_scores(version, "another") is None


def test_an_alias_goes_back_where_the_files_are_not_those_registered(tracking: Tracking, tmp_path: Path) -> None:
    good, bad = (register(Candidate(checkpoint(tmp_path / name)), tracking) for name in ("good", "bad"))
    with promoted(good, tracking, "champion") as place:
        assert place == tmp_path / "good"
    (tmp_path / "bad" / "config.json").write_text("[]")
    with pytest.raises(UserError, match="not those that were registered"):
        promoted(bad, tracking, "champion").__enter__()
    version = aliased_version(tracking, "champion")
    assert version is not None
    assert version.version == good.version
    assert unfinished_promotions(tracking) == []
