"""What tasks do with MLflow around a stage, in a process of its own: `python tests/soak/tracked.py JOB.json`.

{"do": "train", ...} trains with its run in MLflow, to which its metrics are relayed; {"do": "promote", ...} moves the
alias `champion` to the newest version while an evaluation runs. The store is SQLite under AWPO_RUNS.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import flows.environment  # noqa: F401 - before MLflow is imported

# isort: split
from awpo.config import EvaluationConfig
from awpo.config_training import SftConfig
from evaluation.run import evaluate
from tasks.cancellation import stops_its_tasks
from tasks.promotion import promoted
from tasks.registry import find_version
from tasks.tracking_store import connect
from tasks.training import train_sft


def run(job: dict[str, Any]) -> None:
    tracking = connect()
    out, instances = Path(job["out"]), Path(job["instances"])
    if job["do"] == "train":
        with stops_its_tasks():
            train_sft.fn(job["model"], "tiny", instances, out, SftConfig(**job["config"]), tracking, threads=1)
        return
    with promoted(find_version("models:/awpo/2", tracking), tracking, "champion") as checkpoint:
        evaluate(checkpoint, instances, out, EvaluationConfig(**job["config"]))


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text("utf-8")))
