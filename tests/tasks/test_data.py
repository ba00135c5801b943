"""Data tasks: the run in MLflow and the folder's manifest stand for the same work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from awpo.artifacts import read_manifest
from awpo.config import CorpusConfig, RationaleConfig
from awpo.data import sources
from awpo.data.settings import DecomposeConfig, MixtureConfig, NearDuplicatesConfig, SelectConfig
from tasks.data import decompose, select, write_corpus, write_rationales
from tasks.tracking import RunFile
from tasks.tracking_store import Tracking

CORPUS = CorpusConfig(train_dialogues=20, validation_dialogues=4, test_dialogues=4)


def run_file(folder: Path) -> RunFile:
    found = RunFile.read(folder)
    assert found
    return found


def fingerprint(folder: Path) -> str:
    manifest = read_manifest(folder)
    assert manifest
    return manifest.fingerprint


def test_a_run_is_known_by_the_fingerprint_of_the_manifest(tracking: Tracking, tmp_path: Path) -> None:
    source = write_corpus.fn(tmp_path / "corpus", CORPUS, tracking)
    instances = decompose.fn(source, tmp_path / "instances", "auto", DecomposeConfig(), tracking)
    config = SelectConfig(near_duplicates=NearDuplicatesConfig(), mixture=MixtureConfig(dialogues=10))
    selected = select.fn(instances, tmp_path / "selected", config, tracking)
    written = write_rationales.fn(selected, tmp_path / "rationales", RationaleConfig(), tracking)
    for folder in (source.parent, instances, selected, written):
        assert run_file(folder).work == fingerprint(folder), folder.name
    metrics = tracking.client().get_run(run_file(selected).run_id).data.metrics
    reasons = [metrics[f"selection.embedded.{reason}"] for reason in ("near-duplicate", "mixture", "left")]
    assert metrics["selection.embedded.read"] == metrics["instances_read"] == sum(reasons)


def test_a_newer_reader_is_other_work_for_both(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_text(json.dumps({"messages": message, "tools": []}))
    seen: list[tuple[Any, ...]] = []
    for format, version in (("auto", 1), ("openai", 1), ("auto", 99)):
        reader = replace(sources.FORMATS["openai"], version=version)
        monkeypatch.setitem(sources.FORMATS, "openai", reader)
        decompose.fn(path, out, format, DecomposeConfig(), tracking)
        assert run_file(out).work == fingerprint(out)
        seen.append((run_file(out).run_id, fingerprint(out)))
    assert seen[0] == seen[1], "the format that was found and the format that was named are the same work"
    assert seen[0][0] != seen[2][0]
    assert seen[0][1] != seen[2][1]
