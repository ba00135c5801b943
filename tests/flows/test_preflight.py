"""What commands check before they begin: whose the folder of results is."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from awpo.artifacts import IN_PROGRESS, open_stage
from awpo.config_training import PolicySettings
from awpo.errors import UserError
from flows.cli import app
from flows.parameters import read_pipeline
from flows.pipeline import run_pipeline
from flows.preflight import check_launch, check_own, check_writable


def test_a_folder_of_foreign_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "method.md").write_text("# Precious\n")
    for command in (["data", "corpus"], ["train"], ["study"]):
        done = CliRunner().invoke(app, [*command, "--out", str(tmp_path)])
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr == (
            f"error: {tmp_path} holds files that are no result of this project (method.md); choose a new or empty "
            "folder with --out\n"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["method.md"]


def test_a_launch_that_this_machine_has_no_gpus_for_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = CliRunner().invoke(app, ["train", "--launch", "fsdp2-8", "--out", str(tmp_path / "mine")])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        "error: the launch preset takes 8 GPUs of a machine, and this one has 0; choose a preset of fewer processes, "
        "or cpu or cpu-2\n"
    )
    with pytest.raises(UserError, match="takes 8 GPUs"):
        run_pipeline(read_pipeline("quick").model_copy(update={"launch": "fsdp2-8"}), tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


def test_missing_empty_and_hidden_are_no_hindrance(tmp_path: Path) -> None:
    check_own(tmp_path / "missing")
    check_own(tmp_path)
    (tmp_path / ".gitkeep").touch()
    check_own(tmp_path)


def test_an_earlier_result_is_taken_up(tmp_path: Path) -> None:
    with open_stage(tmp_path / "stage", "example", {}, {}) as stage:
        (tmp_path / "stage" / "rows.txt").write_text("rows")
        check_own(tmp_path / "stage")  # unfinished: only the mark of work in progress
        assert (tmp_path / "stage" / IN_PROGRESS).exists()
        stage.finish()
    check_own(tmp_path / "stage")
    (tmp_path / "flow" / "data").mkdir(parents=True)
    with pytest.raises(UserError, match="no result of this project"):
        check_own(tmp_path / "flow")
    (tmp_path / "flow" / ".train.mlflow.json").write_text("{}")
    check_own(tmp_path / "flow")
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "cells.csv").touch()
    check_own(tmp_path / "study")


def test_what_a_worker_left_before_its_stage_began_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    check_own(tmp_path)


def test_a_manifest_of_something_else_does_not_make_a_folder_ours(tmp_path: Path) -> None:
    for text in ('{"name": "app"}', "[]", "{"):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(UserError, match=r"\(manifest\.json\)"):
            check_own(tmp_path)


def test_the_folder_of_all_runs_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflow.db").touch()
    with pytest.raises(UserError, match="no result"):
        check_own(tmp_path)
    monkeypatch.setenv("AWPO_RUNS", str(tmp_path))
    check_own(tmp_path)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file; choose another folder with --out"):
        check_writable(tmp_path / "file")


def test_a_path_that_cannot_be_looked_at_is_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["data", "decompose", "x" * 300, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "cannot read source xxx" in done.stderr
    assert "File name too long; check the path" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["prepare_data", "synthesize_rationales", "evaluate", "pipeline", "train", "sweep"])
def test_forms_are_as_careful_as_commands(name: str, tmp_path: Path) -> None:
    """A run from the UI does not write into a folder of somebody else's, either."""
    flow = getattr(importlib.import_module(f"flows.{name}"), name)
    (tmp_path / "thesis.tex").write_text("mine")
    given = {"checkpoint": "embedded-1m"} if name == "evaluate" else {}
    with pytest.raises(UserError, match=r"thesis\.tex"):
        flow.fn(out=str(tmp_path), **given)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_python_that_has_vllm_is_asked_before_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU: there training with a vLLM of its own runs with vLLM's Python."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.31.0\n")
    python.chmod(0o755)
    monkeypatch.setenv("AWPO_VLLM_PYTHON", str(python))
    policy = PolicySettings.read({"rollouts": {"engine": "vllm_colocate"}}, "here")
    check_launch("cpu", policy, tmp_path / "new")
    python.write_text("#!/bin/sh\necho 0.32.0\n")
    with pytest.raises(UserError, match=rf"the Python that trains \({python}\) has vLLM 0\.32\.0"):
        check_launch("cpu", policy, tmp_path / "new")


@pytest.mark.skipif(torch.cuda.is_available(), reason="of rollouts on a machine without GPUs")
@pytest.mark.parametrize(
    ("rollouts", "reason"),
    [
        ({"engine": "vllm_colocate"}, "needs GPUs"),
        ({"engine": "vllm_server"}, "vLLM is not installed"),
        ({"engine": "vllm_server", "url": "http://127.0.0.1:1"}, "127.0.0.1:1"),
    ],
)
def test_rollouts_that_cannot_be_are_refused_before_fine_tuning(
    rollouts: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWPO_VLLM_PYTHON", "/nowhere/python")
    policy = PolicySettings.read({"rollouts": rollouts}, "here")
    with pytest.raises(UserError, match=reason):
        check_launch("cpu", policy, tmp_path / "new")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    check_launch("cpu", policy, tmp_path / "old")  # what is there may need no training any more
    check_launch("cpu", PolicySettings(), tmp_path / "new")
