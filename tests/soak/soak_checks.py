"""What a soak looks at in the end: results, and what Prefect, MLflow and the folders say."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from soak_servers import Servers
from soak_watch import processes_of

from awpo.files import file_hash

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
LEASE_SECONDS = 420.0
"""A slot of a killed process comes back a minute after its last renewal, that of a deployment's limit after five."""


def result_of(out: Path) -> dict[str, Any]:
    """What must not depend on faults: the hashes of weights, the scores and answers without seconds."""
    weights = {str(p.relative_to(out)): file_hash(p) for p in sorted(out.rglob("checkpoint/*.safetensors"))}
    scores, answers = {}, {}
    for path in sorted(out.rglob("scores.json")):
        rows = json.loads(path.read_text("utf-8"))
        scores[str(path.relative_to(out))] = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
        items = pq.read_table(path.with_name("items.parquet")).drop_columns(["seconds"])
        text = json.dumps(items.to_pylist(), ensure_ascii=False, default=str)
        answers[str(path.relative_to(out))] = hashlib.sha256(text.encode()).hexdigest()
    return {"weights": weights, "scores": scores, "answers": answers}


def status_of_parent(mlflow_url: str, out: Path) -> str | None:
    """The status in MLflow of the outermost run of a folder; None where there is none yet, or MLflow is away."""
    with suppress(OSError, ValueError, _mlflow().exceptions.MlflowException):
        for name in (".train.mlflow.json", ".evaluate.mlflow.json"):
            if (out / name).exists():
                told = json.loads((out / name).read_text("utf-8"))
                return str(_mlflow().MlflowClient(mlflow_url).get_run(told["run_id"]).info.status)
    return None


def looked_at(
    servers: Servers, folders: Sequence[Path], flow_runs: Sequence[str], problem: Callable[[str], None]
) -> dict[str, Any]:
    """What both servers and the folders say when all is done; what is untrue is told to `problem`."""
    servers.wait(lambda: not _of_runs(servers), "the processes of all runs have ended", 120)
    states = Counter(servers.ask(f"flow_runs/{one}")["state_type"] for one in flow_runs)
    if open_ones := set(states) - FINAL:
        problem(f"runs are still {sorted(open_ones)} in Prefect")
    client = _mlflow().MlflowClient(servers.mlflow)
    found, token = [], None
    experiment = client.get_experiment_by_name("awpo").experiment_id
    while token != "":
        page = client.search_runs([experiment], max_results=1000, page_token=token)
        found += page
        token = page.token or ""
    statuses = Counter(run.info.status for run in found)
    for run in found:
        if run.info.status == "RUNNING":
            problem(f"{run.info.run_name} of {run.data.tags.get('awpo.folder')} is still RUNNING in MLflow")
    for path in sorted(path for out in folders for path in out.rglob(".*.mlflow.json")):
        run = client.get_run(json.loads(path.read_text("utf-8"))["run_id"])
        if run.info.status != "FINISHED":
            problem(f"{path} is {run.info.status} in MLflow")
        steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")]
        if len(steps) != len(set(steps)):
            problem(f"steps of {path} stand twice in MLflow")
    for folder in locked(path.parent for out in folders for path in out.rglob("manifest.json")):
        problem(f"{folder} is locked")
    return {"prefect": dict(states), "mlflow": dict(statuses), "slots_held": _slots(servers, problem)}


def _of_runs(servers: Servers) -> list[str]:
    return [process.command for process in processes_of(servers.folder).values() if process.flow_run]


def _slots(servers: Servers, problem: Callable[[str], None]) -> dict[str, int]:
    """The slots that are held when nobody works, once the leases of killed processes are over: none."""
    end = time.monotonic() + LEASE_SECONDS
    while True:
        limits = servers.ask("v2/concurrency_limits/filter", {})
        held = {limit["name"]: int(limit["active_slots"]) for limit in limits}
        if not any(held.values()) or time.monotonic() > end:
            break
        time.sleep(2.0)
    for name, count in held.items():
        if count:
            problem(f"{count} slots of the limit {name} are held by nobody")
    return held


def locked(folders: Any) -> list[Path]:
    """Those of the folders that a process holds (`awpo.folder_lock`)."""
    found = []
    for folder in sorted(set(folders)):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found.append(folder)
        finally:
            os.close(descriptor)
    return found


def _mlflow() -> Any:
    import mlflow  # seconds of imports, that the options of the command need not wait for

    return mlflow
