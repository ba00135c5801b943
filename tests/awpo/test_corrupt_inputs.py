"""What was damaged after it was written is refused in one line that names the file; what is sound is not lost by it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from awpo.artifacts import (
    IN_PROGRESS,
    MANIFEST,
    MANIFEST_VERSION,
    check_outputs,
    input_identity,
    open_stage,
    read_manifest,
)
from awpo.config import EvaluationConfig
from awpo.config_training import PolicyConfig
from awpo.data.decompose import decompose_source
from awpo.data.sources import read
from awpo.data.store import iterate_instances
from awpo.endpoint_cache import CachedAnswer, EndpointCache
from awpo.errors import UserError
from awpo.events import METRICS, RunLog, Tail
from awpo.training.checkpoints import drop_metrics_after
from awpo.training.identity import policy_identity
from evaluation.local_generator import LocalGenerator
from evaluation.target import evaluation_identity


def flip(path: Path, at: float = 0.5) -> None:
    """Turns one bit of a file over, its size staying as it is."""
    raw = bytearray(path.read_bytes())
    raw[int((len(raw) - 1) * at)] ^= 1
    path.write_bytes(raw)


def one_line(caught: pytest.ExceptionInfo[UserError], path: Path) -> None:
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def example(folder: Path) -> Path:
    with open_stage(folder, "example", {"data": "1"}, {"a": 1}) as stage:
        (folder / "result.txt").write_text("result")
        stage.finish()
    return folder


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished stage that holds a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    with open_stage(folder, "policy", {"data": "1"}, {"seed": 1}) as stage:
        shutil.copytree(tiny_model, folder / "checkpoint")
        stage.finish()
    return folder


@pytest.fixture
def parquet(shared_data: Path, tmp_path: Path) -> Path:
    path = shared_data / "toolrl" / "rlla_4k_test.parquet"
    if not path.exists():
        pytest.skip(f"no {path}; see SOURCES.md beside it")
    return Path(shutil.copy(path, tmp_path / "b.parquet"))


# Sources and instances


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.999])
def test_a_truncated_source_is_named(parquet: Path, kept: float) -> None:
    parquet.write_bytes(parquet.read_bytes()[: int(parquet.stat().st_size * kept)])
    with pytest.raises(UserError, match="is not a whole parquet file") as caught:
        list(read(parquet, "toolrl"))
    one_line(caught, parquet)


def test_a_bad_shard_among_good_ones_ends_the_stage_and_leaves_no_result(parquet: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    table = pq.read_table(parquet)
    for number in range(3):
        pq.write_table(table.slice(number * 4, 4), source / f"{number}.parquet")
    whole = (source / "1.parquet").read_bytes()
    (source / "1.parquet").write_bytes(whole[:-100])
    with pytest.raises(UserError, match="is not a whole parquet file") as caught:
        decompose_source(source, out, format="toolrl")
    one_line(caught, source / "1.parquet")
    assert read_manifest(out) is None if out.exists() else True
    (source / "1.parquet").write_bytes(whole)
    assert decompose_source(source, out, format="toolrl").counts["rows_read"] == 12


def test_a_damaged_shard_of_instances_is_no_input(parquet: Path, tmp_path: Path) -> None:
    decompose_source(parquet, tmp_path / "out", format="toolrl")
    before = input_identity(tmp_path / "out")
    shard = tmp_path / "out" / "instances-00000.parquet"
    whole = shard.read_bytes()
    flip(shard)
    with pytest.raises(UserError, match="is not what the stage 'decompose' wrote") as caught:
        input_identity(tmp_path / "out")
    one_line(caught, shard)
    shard.write_bytes(whole[:-8])
    with pytest.raises(UserError, match="is not a whole parquet file"):
        list(iterate_instances(tmp_path / "out"))
    shard.write_bytes(whole)
    assert input_identity(tmp_path / "out") == before


# Checkpoints


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_a_checkpoint_with_a_flipped_bit_is_neither_trained_on_nor_evaluated(
    trained: Path, tmp_path: Path, at: float
) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "trained"))
    checkpoint, weights = folder / "checkpoint", folder / "checkpoint" / "model.safetensors"
    instances = example(tmp_path / "instances")
    evaluation = EvaluationConfig(benchmarks=("held_out",))
    evaluation_identity(checkpoint, instances, evaluation)
    flip(weights, at)
    for refuses in (
        lambda: evaluation_identity(checkpoint, instances, evaluation),
        lambda: policy_identity(str(checkpoint), instances, PolicyConfig(method="awpo")),
        lambda: input_identity(folder),
        lambda: check_outputs(checkpoint),
    ):
        with pytest.raises(UserError, match="is not what the stage 'policy' wrote") as caught:
            refuses()
        one_line(caught, weights)
    flip(weights, at)
    evaluation_identity(checkpoint, instances, evaluation)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_checkpoint_without_one_of_its_files_names_it(trained: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "trained"))
    (folder / "checkpoint" / name).unlink()
    with pytest.raises(UserError, match="cannot be read: No such file") as caught:
        input_identity(folder / "checkpoint")
    one_line(caught, folder / "checkpoint" / name)
    with pytest.raises(UserError, match=r"no tokenizer\.json|no config\.json|cannot load") as caught:
        LocalGenerator(folder / "checkpoint")
    assert "\n" not in str(caught.value)


def test_what_no_stage_wrote_is_known_by_its_bytes_alone(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    before = input_identity(folder)
    flip(folder / "model.safetensors")
    assert input_identity(folder) != before


def test_files_beside_a_result_are_not_its_own(tmp_path: Path) -> None:
    folder = example(tmp_path / "example")
    (folder / "notes.txt").write_text("mine")
    check_outputs(folder / "notes.txt")
    check_outputs(folder)


# Manifests


@pytest.mark.parametrize("kept", [0, 1, 30, -3])
def test_half_a_manifest_is_named(tmp_path: Path, kept: int) -> None:
    path = example(tmp_path / "example") / MANIFEST
    path.write_text(path.read_text()[:kept])
    with pytest.raises(UserError, match="is not a manifest this version can read") as caught:
        input_identity(path.parent)
    one_line(caught, path)


@pytest.mark.parametrize(
    "changed", [{"outputs": ["result.txt"]}, {"config": None}, {"counts": [1]}, {"manifest_version": "new"}]
)
def test_a_manifest_of_other_types_is_named(tmp_path: Path, changed: dict[str, object]) -> None:
    path = example(tmp_path / "example") / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(UserError, match="is not a manifest this version can read"):
        read_manifest(path.parent)


def test_a_manifest_of_a_newer_version_says_so_and_its_result_is_left_alone(tmp_path: Path) -> None:
    folder = example(tmp_path / "example")
    raw = json.loads((folder / MANIFEST).read_text())
    assert raw["manifest_version"] == MANIFEST_VERSION
    (folder / MANIFEST).write_text(json.dumps({"manifest_version": MANIFEST_VERSION + 1, "code": "9.0.0"}))
    for use in (lambda: read_manifest(folder), lambda: input_identity(folder), lambda: example(folder)):
        with pytest.raises(UserError, match=r"written by a newer version of this project \(9\.0\.0\)"):
            use()
    assert (folder / "result.txt").read_text() == "result"


def test_a_manifest_of_before_versions_were_written_down_is_read(tmp_path: Path) -> None:
    path = example(tmp_path / "example") / MANIFEST
    raw = json.loads(path.read_text())
    del raw["manifest_version"]
    path.write_text(json.dumps(raw))
    assert read_manifest(path.parent) is not None


@pytest.mark.parametrize(
    "damaged",
    [
        b"\x80",
        b"\0" * 50,
        b"[" * 100_000,
        b'{"fingerprint": "F", "config": 1}',
        b'{"fingerprint": "F", "seconds": ["a"]}',
        b'{"fingerprint": "F", "began": 1' + b"0" * 400 + b"}",
        b'{"fingerprint": "F", "inputs": [], "began": NaN}',
    ],
)
def test_a_damaged_mark_is_that_of_other_work(tmp_path: Path, damaged: bytes) -> None:
    """The stage begins anew, and says nothing of what it cannot read."""
    folder = tmp_path / "example"
    with open_stage(folder, "example", {"data": "1"}, {"a": 1}) as stage:
        (folder / "half.txt").write_text("half")
        fingerprint = stage.manifest.fingerprint
    (folder / IN_PROGRESS).write_bytes(damaged.replace(b'"F"', json.dumps(fingerprint).encode()))
    with open_stage(folder, "example", {"data": "1"}, {"a": 1}) as stage:
        assert not stage.resumed
        assert not (folder / "half.txt").exists()
        (folder / "result.txt").write_text("result")
        stage.finish()
    assert read_manifest(folder) is not None


# Metrics and cached answers


def test_half_a_line_of_metrics_is_neither_read_nor_kept(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in (1, 2, 3):
        log.metrics(step, {"loss": step / 10})
    path = tmp_path / METRICS
    path.write_bytes(path.read_bytes()[:-9])
    assert [row["step"] for row in Tail(path)] == [1, 2]
    drop_metrics_after(tmp_path, 3)
    log.metrics(3, {"loss": 0.3})
    assert [row["step"] for row in Tail(path)] == [1, 2, 3]


def test_a_damaged_cache_of_answers_is_told_and_costs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    with EndpointCache(path) as cache:
        for number in range(400):
            cache.put(f"{number:064}", "m", CachedAnswer("text " * 50, "stop", 1, 1, 0.1))
    raw = bytearray(path.read_bytes())
    raw[4096:] = b"\xff" * (len(raw) - 4096)
    path.write_bytes(raw)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"cannot be used .*mend or move it") as caught, EndpointCache(path) as cache:
        cache.get(f"{7:064}")
    one_line(caught, path)
