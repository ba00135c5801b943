"""`awpo run` on rows that no one here wrote: each is read or listed with the reason, and the whole job runs on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def test_run_on_toolrl_rows(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "toolrl" / "rlla_sft_first260.json"
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("AWPO_", "PREFECT_", "MLFLOW_"))
    }
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        *(sys.executable, "-m", "flows.cli", "run", "--data", str(source), "--method", "awpo"),
        *("--model", "embedded-1m", "--steps", "4", "--out", "out", "--seed", "3", "--json"),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["run_id"]
    assert result["metrics"]["accuracy"] is not None
    assert 0 <= result["metrics"]["accuracy"] <= 1
    assert "database is locked" not in done.stderr

    folder = tmp_path / "out" / "data" / "instances"
    manifest = json.loads((folder / "manifest.json").read_text())
    rows = json.loads(source.read_text())
    assert manifest["rows_read"] == len(rows) == 260
    assert manifest["dialogues"] + sum(manifest["rejected"].values()) == 260
    listed = (folder / "rejected.jsonl").read_text().splitlines()
    assert len(listed) == sum(manifest["rejected"].values())
    assert all(json.loads(line)["reason"] for line in listed)

    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row["method"] for row in summary["methods"]] == ["base", "sft", "awpo"]
    assert {row["seed"] for row in summary["methods"]} == {3}
    metrics = [
        json.loads(line)
        for line in (tmp_path / "out" / "embedded-1m" / "seed-3" / "awpo" / "metrics.jsonl").read_text().splitlines()
    ]
    assert metrics[-1]["step"] == 4
