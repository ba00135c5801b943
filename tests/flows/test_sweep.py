"""Flows in process, on a temporary Prefect server: what fails, what goes on, what the states say; champion and nights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flows.prefect_home  # noqa: F401 - before Prefect is imported

# isort: split
import mlflow
import pytest
from mlflow import MlflowClient
from prefect.testing.utilities import prefect_test_harness

from awpo.config import CorpusConfig, EvaluationConfig
from awpo.config_training import PolicyConfig, SftConfig

pytestmark = pytest.mark.slow

TINY: dict[str, Any] = {
    "corpus": CorpusConfig(train_dialogues=30, validation_dialogues=4, test_dialogues=4),
    "sft": SftConfig(steps=2, batch_size=4, save_every=2),
    "policy": PolicyConfig(
        steps=2,
        prompts_per_rollout=2,
        group_size=2,
        steps_per_rollout=2,
        micro_batch_size=2,
        max_completion_length=16,
        save_every=2,
    ),
    "evaluation": EvaluationConfig(
        benchmarks=("held_out",), instances_per_split=4, samples=2, max_completion_length=16, batch_size=8
    ),
}
SMOKE = EvaluationConfig(
    benchmarks=("held_out",), splits=("validation",), instances_per_split=2, samples=1, max_completion_length=8
)


@dataclass
class Swept:
    """A sweep of a good and a broken model, and how it ended."""

    out: Path
    client: MlflowClient
    experiment: str
    state: Any

    def runs(self) -> list[Any]:
        return list(self.client.search_runs([self.experiment], max_results=500))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swept]:
    folder = tmp_path_factory.mktemp("sweep")
    broken = folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    patch = pytest.MonkeyPatch()
    patch.setenv("AWPO_RUNS", str(folder / "runs"))
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    patch.setenv("OMP_NUM_THREADS", "1")
    before = mlflow.get_tracking_uri()
    with prefect_test_harness(server_startup_timeout=180):
        from flows.sweep import sweep

        out = folder / "out"
        state = sweep(
            out=str(out), models=["embedded-1m", str(broken)], methods=["awpo"], seeds=[0], **TINY, return_state=True
        )
        uri = f"sqlite:///{folder / 'runs' / 'mlflow.db'}"
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name("awpo")
        assert experiment is not None
        yield Swept(out, client, experiment.experiment_id, state)
    patch.undo()
    mlflow.set_tracking_uri(before)


def test_a_failed_cell_is_told_and_does_not_end_the_others(swept: Swept) -> None:
    """prefect#16373: Completed though a task failed."""
    assert swept.state.is_failed()
    assert "2 of 5 failed" in swept.state.message
    assert "start · broken · seed 0: " in swept.state.message
    assert "awpo · broken · seed 0: start · broken · seed 0 failed" in swept.state.message
    rows = json.loads((swept.out / "summary.json").read_text())["methods"]
    assert [(row["method"], row["init"]) for row in rows] == [("base", "base"), ("sft", "base"), ("awpo", "sft")]


def test_summary_rows_have_the_agreed_keys(swept: Swept) -> None:
    rows = json.loads((swept.out / "summary.json").read_text())["methods"]
    agreed = {
        *("method", "init", "model", "seed", "reward", "accuracy", "accuracy_low", "accuracy_high"),
        *("response_length", "seconds"),
    }
    for row in rows:
        assert agreed <= row.keys()
        assert 0 <= row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"] <= 1
        assert -3 <= row["reward"] <= 4
        assert row["seconds"] > 0
    assert "<html" in (swept.out / "report.html").read_text().lower()


def test_every_stage_is_a_run_under_one_parent_with_a_true_status(swept: Swept) -> None:
    """mlflow#13456: the active run is per thread."""
    runs = {run.info.run_name: run for run in swept.runs()}
    parent = runs.pop("sweep out")
    assert parent.info.status == "FAILED"
    names = {run.info.run_id: name for name, run in runs.items()} | {parent.info.run_id: "sweep out"}
    parents = {name: names[run.data.tags["mlflow.parentRunId"]] for name, run in runs.items()}
    cells = {f"{what} · embedded-1m · seed 0" for what in ("start", "base", "sft", "awpo")}
    cells.add("start · broken · seed 0")
    assert {name for name, above in parents.items() if above == "sweep out"} >= cells
    assert parents["train awpo · embedded-1m · seed 0"] == "awpo · embedded-1m · seed 0"
    assert parents["evaluate awpo · embedded-1m · seed 0"] == "awpo · embedded-1m · seed 0"
    assert parents["train sft · embedded-1m · seed 0"] == "start · embedded-1m · seed 0"
    statuses = {run.info.run_name: run.info.status for run in runs.values()}
    assert statuses.pop("train sft · broken · seed 0") == "FAILED"
    assert statuses.pop("start · broken · seed 0") == "FAILED"
    assert set(statuses.values()) == {"FINISHED"}
    compared = runs["awpo · embedded-1m · seed 0"].data
    assert {"model", "method", "seed", "init"} <= compared.params.keys()
    assert "held_out/test_phrasings/sampled/accuracy" in compared.metrics
    assert {"train sft · embedded-1m · seed 0", "train awpo · embedded-1m · seed 0"} <= statuses.keys()
    trained = runs["train awpo · embedded-1m · seed 0"]
    assert {"model", "method", "seed", "init"} <= trained.data.params.keys()
    assert trained.data.tags["prefect.flow_run_id"]
    assert trained.outputs.model_outputs
    history = swept.client.get_metric_history(trained.info.run_id, "reward/total")
    assert [metric.step for metric in history] == sorted({metric.step for metric in history})


def test_items_are_a_table_and_inputs_bear_hashes(swept: Swept) -> None:
    [evaluated] = [run for run in swept.runs() if run.info.run_name == "evaluate awpo · embedded-1m · seed 0"]
    artifacts = {file.path for file in swept.client.list_artifacts(evaluated.info.run_id)}
    assert {"config.json", "items.json", "items.parquet", "scores.json"} <= artifacts
    assert {entry.dataset.name for entry in evaluated.inputs.dataset_inputs} == {"checkpoint", "instances"}
    assert all(len(entry.dataset.digest) >= 16 for entry in evaluated.inputs.dataset_inputs)


def test_the_champion_passes_its_smoke_test_or_stays_who_it_was(swept: Swept) -> None:
    from flows.promote import SmokeFailed, promote

    place = str(swept.out.parent / "promote")
    first = promote(out=place, minimum_accuracy=0.0, maximum_empty_rate=1.0, smoke=SMOKE)
    assert Path(first["checkpoint"]).parent.name == "awpo"
    sft = str(swept.out / "embedded-1m" / "seed-0" / "sft")
    with pytest.raises(SmokeFailed, match="champion is unchanged"):
        promote(
            out=place,
            candidate=sft,
            instances=str(swept.out / "data" / "rationales"),
            minimum_accuracy=1.0,
            smoke=SMOKE,
        )
    assert swept.client.get_model_version_by_alias("awpo", "champion").version == first["version"]


def test_a_night_fails_loudly_past_a_drop(swept: Swept) -> None:
    from flows.nightly_regression import Regression, nightly_regression

    night = {"out": str(swept.out.parent / "nights"), "evaluation": SMOKE}
    first = nightly_regression(**night)
    version = swept.client.get_model_version_by_alias("awpo", "champion")
    [(key, value)] = [(k, v) for k, v in version.tags.items() if k.startswith("awpo.accepted.")]
    assert json.loads(value) == first["scores"]
    better = {name: score + 0.5 for name, score in first["scores"].items()}
    swept.client.set_model_version_tag("awpo", version.version, key, json.dumps(better))
    with pytest.raises(Regression, match="dropped by more than"):
        nightly_regression(**night)


def test_without_a_champion_the_state_says_that_nothing_was_checked(swept: Swept) -> None:
    from flows.nightly_regression import nightly_regression

    state = nightly_regression(name="nobody", return_state=True)
    assert state.is_completed()
    assert state.name == "NothingToCheck"


def test_a_champion_whose_files_were_changed_is_refused(swept: Swept) -> None:
    from awpo.errors import UserError
    from tasks.registry import resolve_checkpoint
    from tasks.tracking_store import connect

    tracking = connect()
    folder = resolve_checkpoint("models:/awpo@champion", tracking)
    assert folder is not None
    config = folder / "config.json"
    text = config.read_text()
    config.write_text(text + " ")
    with pytest.raises(UserError, match="not those that were registered"):
        resolve_checkpoint("models:/awpo@champion", tracking)
    config.write_text(text)
    assert resolve_checkpoint("models:/awpo@champion", tracking) == folder
    with pytest.raises(UserError, match="no models:/nobody@champion"):
        resolve_checkpoint("models:/nobody@champion", tracking)
