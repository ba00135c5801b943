"""The stage as others start it: a process with a job file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import awpo.endpoint
from awpo.artifacts import read_manifest
from awpo.config import EndpointConfig, EvaluationConfig
from awpo.errors import UserError
from evaluation import held_out, run
from evaluation.endpoint_generator import EndpointGenerator
from evaluation.items import read_items
from evaluation.run import evaluate
from tests.fault_server import FaultServer

SETTINGS = {
    "benchmarks": ["held_out"],
    "splits": ["test_phrasings", "test_tools", "validation"],
    "samples": 2,
    "max_completion_length": 8,
    "threads": 1,
}


def run_job(folder: Path, job: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return subprocess.run(
        [sys.executable, "-m", "evaluation", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
        check=False,
    )


@pytest.fixture
def job(tmp_path: Path, checkpoint: Path, instances_folder: Path) -> dict[str, Any]:
    paths = {"checkpoint": checkpoint, "instances": instances_folder, "out": tmp_path / "out"}
    return {name: str(path) for name, path in paths.items()} | {"config": SETTINGS}


def test_a_job_leaves_items_scores_events_and_a_manifest(tmp_path: Path, job: dict[str, Any]) -> None:
    done = run_job(tmp_path, job)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    items = read_items(out / "items.parquet")
    assert len(items) == (8 + 6) * 3
    assert {item.sample for item in items} == {-1, 0, 1}
    rows = json.loads((out / "scores.json").read_text())
    assert {(row["split"], row["mode"]) for row in rows} == {
        (split, mode) for split in ("test_phrasings", "test_tools") for mode in ("greedy", "sampled")
    }
    assert all(0 <= row["low"] <= row["accuracy"] <= row["high"] <= 1 for row in rows)
    manifest = read_manifest(out)
    assert manifest is not None
    assert manifest.stage == "evaluation"
    assert manifest.counts["not_run"] == {"held_out/validation": "the instances hold none of this split"}
    assert set(manifest.outputs) == {"items.parquet", "scores.json"}
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    progress = [event for event in events if event["event"] == "progress"]
    assert (progress[0]["done"], progress[-1]["done"], progress[-1]["total"]) == (0, 42, 42)
    assert any(event["event"] == "warning" and "held_out/validation" in event["message"] for event in events)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {**SETTINGS, "sample": 3}}, "unknown key 'sample'; did you mean 'samples'?"),
        ({"checkpoint": "/nowhere"}, "/nowhere does not exist"),
        ({"instances": None}, "needs 'instances'"),
        ({"out": None}, "lacks 'out'"),
        ({"config": {**SETTINGS, "splits": ["test_tool"]}}, "did you mean 'test_tools'?"),
    ],
)
def test_what_a_person_can_mend_is_one_line_and_code_2(
    tmp_path: Path, job: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    done = run_job(tmp_path, job | change)
    assert done.returncode == 2
    assert message in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_an_interrupted_stage_goes_on_where_it_stood(
    tmp_path: Path, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second split fails once; the next run takes the first split's result as it was left."""
    config = EvaluationConfig(**SETTINGS)
    paths = Path(job["checkpoint"]), Path(job["instances"]), Path(job["out"])
    real, seen = held_out.evaluate_split, []

    def failing(generator: Any, instances: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(instances[0].split)
        if instances[0].split == "test_tools" and seen.count("test_tools") == 1:
            raise RuntimeError("power cut")
        return real(generator, instances, *arguments, **options)

    monkeypatch.setattr(held_out, "evaluate_split", failing)
    with pytest.raises(RuntimeError, match="power cut"):
        evaluate(*paths, config)
    (left,) = (paths[2] / ".parts").glob("*.parquet")
    before = read_items(left)
    manifest = evaluate(*paths, config)
    assert seen == ["test_phrasings", "test_tools", "test_tools"]
    assert [item for item in read_items(paths[2] / "items.parquet") if item.split == "test_phrasings"] == before
    assert not left.exists()
    assert evaluate(*paths, config) == manifest
    assert len(seen) == 3


def test_the_same_evaluation_twice_gives_the_same_items(tmp_path: Path, job: dict[str, Any]) -> None:
    config = EvaluationConfig(**SETTINGS)
    for name in ("one", "two"):
        evaluate(Path(job["checkpoint"]), Path(job["instances"]), tmp_path / name, config)
    assert read_items(tmp_path / "one" / "items.parquet") == read_items(tmp_path / "two" / "items.parquet")


def test_a_folder_of_someone_else_is_not_touched(tmp_path: Path, job: dict[str, Any]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="no stage of this project wrote"):
        evaluate(Path(job["checkpoint"]), Path(job["instances"]), tmp_path / "out", EvaluationConfig(**SETTINGS))
    assert (tmp_path / "out" / "thesis.txt").exists()


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer() as running:
        yield running


def test_an_endpoint_is_evaluated_like_a_checkpoint(tmp_path: Path, job: dict[str, Any], server: FaultServer) -> None:
    """By the worker, as tasks start it: greedy and two samples of each instance."""
    server.script(default={"do": "answer", "text": "It is sunny."})
    endpoint = {"base_url": server.url, "model": "closed", "attempts": 1}
    done = run_job(tmp_path, {**job, "checkpoint": None, "endpoint": endpoint})
    assert done.returncode == 0, done.stderr
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.inputs["endpoint"] == "closed at 127.0.0.1"
    assert manifest.counts["generator"]["engine"] == "endpoint"
    items = read_items(tmp_path / "out" / "items.parquet")
    assert len(items) == len(server.log()) == (8 + 6) * 3
    assert {item.correct for item in items if item.kind == "reply"} == {True}
    assert {item.correct for item in items if item.kind == "call"} == {False}
    assert {(item.prompt_tokens, item.response_tokens) for item in items} == {(100, 10)}


def test_a_server_of_ours_is_given_hours(
    tmp_path: Path, job: dict[str, Any], server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy CPU a batch of prompts takes longer than a closed model's slowest answer, and is computed anew if
    it is given up."""

    class Started:
        url, name = server.url, "model"

        def __enter__(self) -> Started:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(run, "ModelServer", lambda *_, **__: Started())
    config = EvaluationConfig(**{**SETTINGS, "engine": "transformers"})
    with run.open_generator(Path(job["checkpoint"]), config, tmp_path / "parts") as generator:
        assert isinstance(generator, EndpointGenerator)
        assert generator.config.timeout_seconds >= 3600 > EndpointConfig.model_fields["timeout_seconds"].default


def test_failed_requests_are_missing_items_and_the_same_command_asks_for_them(
    tmp_path: Path, job: dict[str, Any], server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awpo.endpoint, "FIRST_PAUSE", 0.001)
    broken = {"match": "test_tools 1?", "do": "status", "status": 500, "message": "broken"}
    server.script(broken, default={"do": "answer", "text": "It is sunny."})
    endpoint = EndpointConfig(base_url=server.url, model="closed", attempts=1)
    paths = Path(job["instances"]), Path(job["out"])
    config = EvaluationConfig(**SETTINGS)
    manifest = evaluate(endpoint, *paths, config)
    missing = [item for item in read_items(paths[1] / "items.parquet") if item.correct is None]
    assert len(missing) == manifest.counts["missing"] == 2 * 3
    assert {item.error_type for item in missing} == {"request_failed"}
    assert all("answered 500: broken" in item.detail for item in missing)
    (reason,) = manifest.counts["missing_reasons"]
    assert "answered 500: broken" in reason
    rows = json.loads((paths[1] / "scores.json").read_text())
    partial = {(row["split"], row.get("partial"), row.get("missing")) for row in rows if row["group"] == "all"}
    assert partial == {("test_phrasings", None, None), ("test_tools", True, 2), ("test_tools", True, 4)}
    sampled = next(row for row in rows if (row["split"], row["mode"], row["group"]) == ("test_tools", "sampled", "all"))
    assert (sampled["accuracy"], sampled["items"]) == (0.5, 4)  # the two that are missing count neither way

    asked = len(server.log())
    server.script(default={"do": "answer", "text": "It is sunny."})
    whole = evaluate(endpoint, *paths, config)
    assert asked == 42
    assert len(server.log()) == 6
    assert whole.counts["missing"] == 0
    assert all(item.correct is not None for item in read_items(paths[1] / "items.parquet"))
    assert not (paths[1] / ".parts").exists()
    assert evaluate(endpoint, *paths, config) == whole
    assert len(server.log()) == 6


def test_a_part_without_any_answer_is_named_and_has_no_row(
    tmp_path: Path, job: dict[str, Any], server: FaultServer
) -> None:
    server.script({"match": "test_tools", "do": "status", "status": 422, "message": "no"})
    endpoint = EndpointConfig(base_url=server.url, model="closed", attempts=1)
    manifest = evaluate(endpoint, Path(job["instances"]), Path(job["out"]), EvaluationConfig(**SETTINGS))
    rows = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert {row["split"] for row in rows} == {"test_phrasings"}
    assert "none of its 18 answers came" in manifest.counts["not_run"]["held_out/test_tools"]
