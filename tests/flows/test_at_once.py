"""Several flows on one machine, one Prefect server and one SQLite store; and a sweep that is stopped in its middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flows.prefect_home  # noqa: F401 - before Prefect is imported

# isort: split
import pytest
import yaml
from mlflow import MlflowClient

from flows.prefect_server import temporary_server

pytestmark = [pytest.mark.slow, pytest.mark.servers]

ROOT = Path(__file__).resolve().parents[2]
TINY: dict[str, Any] = {
    "model": "embedded-1m",
    "methods": ["grpo", "awpo"],
    "corpus": {"train_dialogues": 12, "validation_dialogues": 2, "test_dialogues": 2},
    "sft": {"steps": 1, "batch_size": 2, "save_every": 1},
    "policy": {
        "steps": 1,
        "prompts_per_rollout": 1,
        "group_size": 2,
        "steps_per_rollout": 1,
        "micro_batch_size": 2,
        "max_completion_length": 8,
        "save_every": 1,
    },
    "evaluation": {
        "benchmarks": ["held_out"],
        "splits": ["test_phrasings"],
        "instances_per_split": 1,
        "samples": 1,
        "max_completion_length": 8,
        "batch_size": 8,
    },
}


@dataclass
class Machine:
    """A Prefect server with a runs folder of its own."""

    folder: Path
    url: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "AWPO_RUNS": str(self.folder / "runs"),
            "PREFECT_HOME": str(self.folder / "home"),
            "PREFECT_API_URL": self.url,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *command],
            env=self.environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())

    def states(self) -> dict[str, str]:
        """The states of all flow runs by name."""
        return {run["name"]: run["state_name"] for run in self.ask("flow_runs/filter", {"limit": 100})}

    def slots_taken(self) -> int:
        return int(self.ask("v2/concurrency_limits/gpu")["active_slots"])

    def runs(self) -> list[Any]:
        client = MlflowClient(tracking_uri=f"sqlite:///{self.folder / 'runs' / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("awpo")
        assert experiment is not None
        return list(client.search_runs([experiment.experiment_id], max_results=500))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("AWPO_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "home").mkdir()
    with temporary_server() as url:
        yield Machine(tmp_path, url)


def wait_for(what: Callable[[], Any], seconds: float = 300) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.3)
    return found


def most_at_once(folder: Path) -> int:
    """How many worker processes of the results in `folder` computed where most did: from its job to its manifest."""
    changes = []
    for job in folder.rglob("job.json"):
        changes += [(job.stat().st_mtime, 1), ((job.parent / "manifest.json").stat().st_mtime, -1)]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def test_two_pipelines_at_once_end_clean_and_share_the_slots(machine: Machine) -> None:
    """mlflow#13456: the active run is per thread (prefect#18934)."""
    # As `awpo serve` leaves a server; two commands that both find none of them make them at once, which the server logs.
    for name, limit in (("gpu", 2), ("judge-api", 4)):
        machine.ask("v2/concurrency_limits/", {"name": name, "limit": limit})
    preset = machine.folder / "tiny.yaml"
    preset.write_text(yaml.safe_dump(TINY))
    outs = [machine.folder / "out" / name for name in ("a", "b")]
    commands = [
        machine.start(*("-m", "flows.cli", "train", "--preset", str(preset), "--out", str(out), "--seed", str(seed)))
        for seed, out in enumerate(outs)
    ]
    said = [process.communicate(timeout=900)[0] for process in commands]
    assert [process.returncode for process in commands] == [0, 0], said
    log = (machine.folder / "runs" / "logs" / "prefect-temporary.log").read_text()
    for text in (*said, log):
        assert "database is locked" not in text, text
        assert "Traceback" not in text, text
    assert set(machine.states().values()) == {"Completed"}
    assert machine.states().keys() == {"pipeline embedded-1m · seed 0", "pipeline embedded-1m · seed 1"}
    runs = machine.runs()
    assert {run.info.status for run in runs} == {"FINISHED"}
    names = [run.info.run_name for run in runs]
    assert sorted(names.count(f"train awpo · embedded-1m · seed {seed}") for seed in (0, 1)) == [1, 1]
    for out in outs:
        assert len(json.loads((out / "summary.json").read_text())["methods"]) == 4
    assert most_at_once(machine.folder / "out") == 2
    assert machine.slots_taken() == 0


SWEEP = """
import json, sys
from flows.sweep import sweep
sweep(**json.loads(sys.argv[1]))
"""


def test_a_sweep_that_is_stopped_ends_its_cells_and_says_so(machine: Machine) -> None:
    # A person's own limit: one slot, so that one cell trains and the others wait for it.
    machine.ask("v2/concurrency_limits/", {"name": "gpu", "limit": 1})
    out = machine.folder / "out"
    long = {**TINY["policy"], "steps": 100_000}
    given = {**TINY, "policy": long, "models": ["embedded-1m"], "seeds": [0], "out": str(out), "init": "base"}
    del given["model"]
    process = machine.start("-c", SWEEP, json.dumps(given))
    training = out / "embedded-1m" / "seed-0"

    def trained() -> list[Path]:
        return [path for path in training.glob("*-from-base/metrics.jsonl") if path.stat().st_size]

    [metrics] = wait_for(trained)
    assert machine.slots_taken() == 1
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    states = machine.states()
    cells = {name: states[name] for name in ("grpo · embedded-1m · seed 0", "awpo · embedded-1m · seed 0")}
    assert set(cells.values()) == {"Cancelled"}
    assert states["start · embedded-1m · seed 0"] == "Completed"
    assert states[f"sweep · {out}"] in ("Crashed", "Cancelled")
    assert machine.slots_taken() == 0
    statuses = {run.info.run_name: run.info.status for run in machine.runs()}
    assert {statuses[name] for name in (*cells, "sweep out")} == {"KILLED"}
    size = metrics.stat().st_size
    time.sleep(2)
    assert metrics.stat().st_size == size, "its worker still trains"
