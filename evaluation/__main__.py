"""Evaluates a checkpoint: `python -m evaluation JOB.json`.

The job: {"checkpoint": folder or "endpoint": EndpointConfig, "instances": folder, "out": folder, "config":
EvaluationConfig}. Leaves in `out` items.parquet, scores.json, events.jsonl and manifest.json. Exit code 2 and one line for what a person can mend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from awpo.config import EndpointConfig, EvaluationConfig
from awpo.errors import UserError
from awpo.processes import worker_main
from evaluation.run import evaluate


def run(job: dict[str, Any]) -> None:
    endpoint = EndpointConfig.read(job["endpoint"], "the endpoint") if job.get("endpoint") else None
    for key in ("out",) if endpoint else ("checkpoint", "out"):
        if not isinstance(job.get(key), str):
            raise UserError(f"the evaluation job lacks {key!r}: the path of a folder")
    config = EvaluationConfig.read(job.get("config") or {}, "the evaluation config")
    instances = Path(job["instances"]) if job.get("instances") else None
    evaluate(endpoint or Path(job["checkpoint"]), instances, Path(job["out"]), config)


if __name__ == "__main__":
    worker_main(run)
