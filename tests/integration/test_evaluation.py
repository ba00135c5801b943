"""A full evaluation of a tiny model through a real server: every benchmark, three items of each category."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from awpo.artifacts import open_stage, read_manifest
from awpo.config import CorpusConfig, EvaluationConfig
from awpo.data.decompose import decompose
from awpo.data.store import write_instances
from awpo.embedded.corpus import dialogues
from awpo.embedded.model import build_model
from awpo.errors import UserError
from awpo.serving.vllm import vllm_python
from evaluation.benchmarks import BENCHMARKS
from evaluation.bfcl.averages import MULTI_TURN
from evaluation.bfcl.package import find_package
from evaluation.bfcl.versions import V4
from evaluation.compare import read_run
from evaluation.diff import find_flips
from evaluation.items import GREEDY, read_items
from evaluation.run import evaluate

pytestmark = [pytest.mark.slow, pytest.mark.servers]

SHARED = Path(os.environ.get("AWPO_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
ITEMS = 3
# The other version of BFCL has an environment of its own, and a test of its own below.
USUAL = tuple(name for name in BENCHMARKS if name != V4.name)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny untrained Qwen3 and of instances."""
    folder = tmp_path_factory.mktemp("evaluated")
    config = CorpusConfig(train_dialogues=30, validation_dialogues=2, test_dialogues=4)
    with open_stage(folder / "instances", "decompose", {}, {}) as stage:
        write_instances(stage.folder, [item for dialogue in dialogues(config) for item in decompose(dialogue)])
        stage.finish()
    build_model("embedded-1m", folder / "instances", folder / "tiny")
    return folder / "tiny", folder / "instances"


def settings(*benchmarks: str, engine: str) -> EvaluationConfig:
    return EvaluationConfig.read(
        {
            "benchmarks": benchmarks,
            "engine": engine,
            "instances_per_split": ITEMS,
            "bfcl_items_per_category": ITEMS,
            "api_bank_items_per_level": ITEMS,
            "mmlu_pro_items_per_category": ITEMS,
            "samples": 1,
            "max_completion_length": 16,
            "mmlu_pro_completion_length": 16,
            "threads": 1,
            "batch_size": 8,
        },
        "the test",
    )


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data (AWPO_SHARED_DATA)")
def test_every_benchmark_through_a_real_server(parts: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, instances = parts
    manifest = evaluate(checkpoint, instances, tmp_path / "out", settings(*USUAL, engine="transformers"))
    counts = manifest.counts
    assert (counts["missing"], counts["not_run"]) == (0, {})
    assert counts["generator"]["engine"] == "transformers"
    assert counts["generator"]["model"] == manifest.inputs["checkpoint"]
    items = read_items(tmp_path / "out" / "items.parquet")
    assert {item.benchmark for item in items} == set(USUAL)
    assert all(item.correct is not None and item.prompt_hash for item in items)
    assert all(item.prompt_tokens and item.seconds for item in items if item.finish != "no_room")
    assert any(item.finish != "no_room" for item in items if item.benchmark == "mmlu_pro")
    greedy = Counter((item.benchmark, item.split) for item in items if item.sample == GREEDY)
    assert set(greedy.values()) <= set(range(1, ITEMS + 1))
    assert len({split for benchmark, split in greedy if benchmark == "bfcl_v3"}) == 17
    assert len({split for benchmark, split in greedy if benchmark == "mmlu_pro"}) == 14
    rows = json.loads((tmp_path / "out" / "scores.json").read_text())
    with_row = {(row["benchmark"], row["split"]) for row in rows}
    assert set(greedy) <= with_row
    assert read_manifest(tmp_path / "out") == manifest


def has_bfcl_v4() -> bool:
    try:
        return find_package(V4).folder.is_dir()
    except UserError:
        return False


@pytest.mark.skipif(not has_bfcl_v4(), reason="needs BFCL v4: make install-bfcl-v4, or AWPO_BFCL_V4_PYTHON")
def test_bfcl_v4_through_a_real_server(parts: tuple[Path, Path], tmp_path: Path) -> None:
    """Its categories of one turn: conversations and memories take an untrained model many minutes."""
    checkpoint, _ = parts
    config = settings(V4.name, engine="transformers").model_copy(
        update={"bfcl_turns": "one", "bfcl_items_per_category": 1}
    )
    manifest = evaluate(checkpoint, None, tmp_path / "out", config)
    assert (manifest.counts["missing"], manifest.counts["not_run"]) == (0, {})
    items = read_items(tmp_path / "out" / "items.parquet")
    assert [item.split for item in items] == list(V4.single_turn)
    assert all(item.correct is not None and item.prompt_hash for item in items)
    rows = {row["split"]: row for row in json.loads((tmp_path / "out" / "scores.json").read_text())}
    assert (rows["Overall Acc"]["accuracy"], rows["Overall Acc"]["partial"]) == (None, True)
    assert rows["Overall Acc"]["not_run"] == [*MULTI_TURN, *V4.agentic]
    assert rows["Live Acc"]["accuracy"] is not None
    assert "bfcl-eval 2026.3.23" in rows["live_simple"]["protocol"]


try:
    vllm_python()
    MISSING = ""
except UserError as error:
    MISSING = f"{error} (make install-vllm, then make test-vllm)"


@pytest.mark.vllm
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("benchmark", ["held_out", "bfcl_v3"])
def test_vllm_gives_the_same_greedy_answers(benchmark: str, parts: tuple[Path, Path], tmp_path: Path) -> None:
    """Both compute in float32, and differ by 1e-6: of an untrained model, whose logits lie close together, an answer
    may part ways at a near tie. What each prompt is must be the same."""
    checkpoint, instances = parts
    for engine in ("in_process", "auto"):
        config = settings(benchmark, engine=engine).model_copy(update={"bfcl_turns": "one"})
        manifest = evaluate(checkpoint, instances, tmp_path / engine, config)
    assert manifest.counts["generator"]["engine"] == "vllm"
    assert manifest.config["engine"] == "vllm"
    one, two = (
        {
            (item.split, item.item_id): item
            for item in read_items(tmp_path / engine / "items.parquet")
            if item.sample == GREEDY
        }
        for engine in ("in_process", "auto")
    )
    assert {name: item.prompt_tokens for name, item in one.items()} == {
        name: item.prompt_tokens for name, item in two.items()
    }
    assert all(item.correct is not None and item.response_tokens > 0 for item in two.values())
    same = sum(two[name].completion == item.completion for name, item in one.items())
    assert same >= 0.9 * len(one)


def test_a_server_and_this_process_give_the_same_greedy_answers(parts: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, instances = parts
    for engine in ("in_process", "transformers"):
        evaluate(checkpoint, instances, tmp_path / engine, settings("held_out", engine=engine))
    runs = [read_run(tmp_path / engine) for engine in ("in_process", "transformers")]
    one, two = ({item.item_id: item for item in run.items if item.sample == GREEDY} for run in runs)
    assert one.keys() == two.keys()
    for name, item in one.items():
        assert (two[name].completion, two[name].finish) == (item.completion, item.finish)
        assert (two[name].prompt_tokens, two[name].prompt_hash) == (item.prompt_tokens, item.prompt_hash)
    assert find_flips(*runs).flips == ()
