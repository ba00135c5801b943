"""What is refused before an evaluation is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from awpo.config import CorpusConfig, EndpointConfig, EvaluationConfig
from awpo.embedded.corpus import dialogues
from awpo.errors import UserError
from evaluation.checks import CORPUS_SPLITS, check_data, check_evaluation

HELD_OUT = EvaluationConfig(benchmarks=("held_out",), splits=("test_phrasings", "test"))


def test_the_splits_of_the_corpus_are_those_that_it_has() -> None:
    config = CorpusConfig(train_dialogues=1, validation_dialogues=1, test_dialogues=1)
    assert {dialogue.split for dialogue in dialogues(config)} == set(CORPUS_SPLITS)


def test_one_split_of_a_preset_is_enough_and_all_that_were_asked_for_must_be_there(instances_folder: Path) -> None:
    for instances in (None, instances_folder):
        check_evaluation(HELD_OUT, instances)
        with pytest.raises(UserError, match=r"has no split test; there are .*test_phrasings"):
            check_evaluation(HELD_OUT, instances, splits=["test_phrasings", "test"])
        with pytest.raises(UserError, match="has no split test; there are"):
            check_evaluation(HELD_OUT.model_copy(update={"splits": ("test",)}), instances)


def test_an_endpoint_elsewhere_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    check_evaluation(HELD_OUT, None, EndpointConfig(base_url="http://127.0.0.1:8000/v1", model="m"))
    with pytest.raises(UserError, match="set the environment variable OPENAI_API_KEY"):
        check_evaluation(HELD_OUT, None, EndpointConfig(base_url="https://models.example/v1", model="m"))
    with pytest.raises(UserError, match="is not an http"):
        check_evaluation(HELD_OUT, None, EndpointConfig(base_url="ftp://models.example/v1", model="m"))


def test_a_folder_of_files_must_be_of_use_to_each_benchmark_that_reads_one(tmp_path: Path) -> None:
    (tmp_path / "mmlu-pro").mkdir()
    (tmp_path / "mmlu-pro" / "test.jsonl").touch()
    check_data(tmp_path, ["held_out", "mmlu_pro"])
    with pytest.raises(
        UserError, match=r"holds none of the files that api_bank looks for there: toolrl/api-bank-level-1"
    ):
        check_data(tmp_path, ["mmlu_pro", "api_bank"])
    with pytest.raises(UserError, match="no folder of benchmark data is read for held_out and bfcl_v3"):
        check_data(tmp_path, ["held_out", "bfcl_v3"])
