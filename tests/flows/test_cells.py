"""Ten cells of two model sizes on a real Prefect server with two slots: how many compute at once, and what the runs say."""

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
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId, LogFilter, LogFilterFlowRunId
from prefect.testing.utilities import prefect_test_harness

from awpo.config import CorpusConfig, EvaluationConfig
from awpo.config_training import PolicySettings, SftSettings

pytestmark = [pytest.mark.slow, pytest.mark.servers]

SIZES = ["embedded-1m", "embedded-3m"]
METHODS = ["grpo", "awpo", "dapo"]
TITLES = {f"{what} · {size} · seed 0" for size in SIZES for what in ("start", "base", "sft", *METHODS)}
BROKEN = "grpo · embedded-3m · seed 0"
SLOTS = 2
TINY: dict[str, Any] = {
    "corpus": CorpusConfig(train_dialogues=12, validation_dialogues=2, test_dialogues=2),
    "sft": SftSettings(steps=1, batch_size=2, save_every=1),
    "policy": PolicySettings(
        steps=1,
        prompts_per_rollout=1,
        group_size=2,
        steps_per_rollout=1,
        micro_batch_size=2,
        max_completion_length=64,
        save_every=1,
    ),
    "evaluation": EvaluationConfig(
        benchmarks=("held_out",),
        splits=("test_phrasings",),
        instances_per_split=1,
        samples=1,
        max_completion_length=8,
        batch_size=8,
    ),
}


def times(out: Path) -> list[tuple[float, float]]:
    """When each worker process of the results in `out` was started, and when it had its result, in seconds."""
    jobs = [job for job in out.rglob("job.json") if (job.parent / "manifest.json").exists()]
    return [(job.stat().st_mtime, (job.parent / "manifest.json").stat().st_mtime) for job in jobs]


def most_at_once(intervals: list[tuple[float, float]]) -> int:
    """How many of the intervals overlap where most do."""
    changes = sorted([(start, 1) for start, _ in intervals] + [(end, -1) for _, end in intervals])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


@dataclass
class Swept:
    """A sweep of twelve cells (two starts, ten others), one of which can't be trained, and how it ended."""

    out: Path
    runs: Path
    state: Any
    methods: list[dict[str, Any]]
    report: str
    children: dict[str, Any]
    logs: dict[str, list[str]]
    again: Any
    children_again: dict[str, Any]
    written: dict[Path, tuple[float, float]]

    def client(self) -> tuple[MlflowClient, str]:
        client = MlflowClient(tracking_uri=f"sqlite:///{self.runs / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("awpo")
        assert experiment is not None
        return client, experiment.experiment_id


def children_of(run_id: Any) -> dict[str, Any]:
    with get_client(sync_client=True) as client:
        within = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run_id]))
        found = client.read_flow_runs(flow_run_filter=within, limit=100)
    names = [run.name for run in found]
    assert len(names) == len(set(names)), f"two cells share a name: {names}"
    return {run.name: run for run in found}


def log_of(run_id: Any) -> list[str]:
    with get_client(sync_client=True) as client:
        return [line.message for line in client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run_id])))]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swept]:
    folder = tmp_path_factory.mktemp("cells")
    out, runs = folder / "out", folder / "runs"
    patch = pytest.MonkeyPatch()
    patch.setenv("AWPO_RUNS", str(runs))
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    patch.setenv("OMP_NUM_THREADS", "1")
    before = mlflow.get_tracking_uri()
    with prefect_test_harness(server_startup_timeout=180):
        from flows.limits import ensure_limits
        from flows.sweep import sweep

        patch.setattr("flows.limits.gpu_slots", lambda: SLOTS)
        assert set(ensure_limits()) == {"gpu", "judge-api"}
        # Somebody's folder stands where a cell would write: that cell can't be trained.
        foreign = out / "embedded-3m" / "seed-0" / "grpo"
        foreign.mkdir(parents=True)
        (foreign / "thesis.txt").write_text("mine")
        (out / ".sweep.mlflow.json").write_text(
            "{}"
        )  # the folder itself is a sweep's, so that only the cell is refused
        given = {"models": SIZES, "methods": METHODS, "seeds": [0], "out": str(out), **TINY}
        state = sweep(**given, return_state=True)
        children = children_of(state.state_details.flow_run_id)
        logs = {name: log_of(run.id) for name, run in children.items()}
        methods = json.loads((out / "summary.json").read_text())["methods"]
        report = (out / "report.html").read_text()
        written = {path: (path.stat().st_mtime, path.stat().st_size) for path in out.rglob("manifest.json")}
        (foreign / "thesis.txt").unlink()
        again = sweep(**given, return_state=True)
        children_again = children_of(again.state_details.flow_run_id)
        yield Swept(out, runs, state, methods, report, children, logs, again, children_again, written)
    patch.undo()
    mlflow.set_tracking_uri(before)


def test_ten_queued_cells_with_two_slots_never_compute_three_at_a_time(swept: Swept) -> None:
    """prefect#17415: slots are lost."""
    intervals = times(swept.out)
    assert len(intervals) == 2 * (2 + 2 + 2 * len(METHODS))
    assert most_at_once(intervals) == SLOTS


def test_each_cell_is_a_run_with_its_own_name_and_state(swept: Swept) -> None:
    assert swept.children.keys() == TITLES
    states = {name: run.state.name for name, run in swept.children.items()}
    assert states.pop(BROKEN) == "Failed"
    assert set(states.values()) == {"Completed"}
    trained = swept.children["awpo · embedded-3m · seed 0"]
    assert trained.parameters == {"method": "awpo", "model": "embedded-3m", "seed": 0}
    assert trained.parent_task_run_id


def test_the_state_of_the_sweep_names_the_cell_that_failed_and_the_others_are_compared(swept: Swept) -> None:
    assert swept.state.is_failed()
    assert swept.state.message.count(BROKEN) == 1
    assert "1 of 10 failed" in swept.state.message
    assert "holds files that no stage" in swept.state.message
    assert len(swept.methods) == 9
    assert f"Without a result: {BROKEN}" in swept.report


def test_waiting_is_told_in_the_log_of_the_cell(swept: Swept) -> None:
    waited = [name for name, lines in swept.logs.items() if any("waiting for a free slot of gpu" in x for x in lines)]
    assert waited
    assert all(any("got a slot of gpu after" in line for line in swept.logs[name]) for name in waited)


def test_running_it_again_does_only_what_is_missing(swept: Swept) -> None:
    """prefect#9814: a retry does everything again."""
    assert swept.again.is_completed(), swept.again.message
    assert {run.state.name for run in swept.children_again.values()} == {"Completed"}
    assert swept.children_again.keys() == TITLES
    assert len(json.loads((swept.out / "summary.json").read_text())["methods"]) == 10
    assert "Without a result" not in (swept.out / "report.html").read_text()
    for path, stamp in swept.written.items():
        assert (path.stat().st_mtime, path.stat().st_size) == stamp, f"{path} was made again"
    new = {path.parent.relative_to(swept.out).as_posix() for path in swept.out.rglob("manifest.json")}
    new -= {path.parent.relative_to(swept.out).as_posix() for path in swept.written}
    assert new == {"embedded-3m/seed-0/grpo", "embedded-3m/seed-0/evaluation/grpo"}


def test_the_store_has_a_run_for_each_cell_under_the_sweep(swept: Swept) -> None:
    client, experiment = swept.client()
    runs = list(client.search_runs([experiment], max_results=500))
    [parent] = [run for run in runs if run.info.run_name == "sweep out"]
    below = {run.info.run_name: run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id}
    assert below.keys() >= TITLES
    # The failed cell was taken up again in its run.
    assert {run.info.status for run in below.values()} == {"FINISHED"}


def test_what_a_person_set_stays() -> None:
    from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate

    with prefect_test_harness(server_startup_timeout=180):
        from flows.limits import ensure_limits

        ensure_limits()
        with get_client(sync_client=True) as client:
            client.update_global_concurrency_limit("gpu", GlobalConcurrencyLimitUpdate(limit=7))
        assert ensure_limits() == []
        with get_client(sync_client=True) as client:
            assert client.read_global_concurrency_limit_by_name("gpu").limit == 7
