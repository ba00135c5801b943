"""The commands of docs/operations.md, as they stand there: a backup of stores that are being written, and its restore."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import pytest

from awpo.artifacts import finished_result, open_stage
from awpo.endpoint_cache import CachedAnswer, EndpointCache
from tasks.registry import Candidate, register, resolve_checkpoint
from tasks.tracking import open_run
from tasks.tracking_store import Tracking

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def commands(section: str) -> str:
    """The first block of commands under a heading."""
    text = PAGE.read_text("utf-8").partition(f"\n## {section}\n")[2]
    found = re.search(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, section
    return found[1]


def shell(script: str, folder: Path, *, may_differ: bool = False) -> None:
    done = subprocess.run(["bash", "-e", "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or (may_differ and "file changed as we read it" in done.stderr), done.stderr


@pytest.mark.skipif(
    not shutil.which("sqlite3"), reason="no sqlite3 on this machine; on Debian: apt-get install sqlite3"
)
def test_a_backup_of_a_store_that_is_written_restores_all_of_it(tracking: Tracking, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x" / "policy"
    with open_stage(folder, "test", {}, {}) as made:
        (folder / "checkpoint").mkdir()
        (folder / "checkpoint" / "config.json").write_text("{}")
        (folder / ".resume").mkdir()
        (folder / ".resume" / "optimizer.pt").write_text("large")
        made.finish()
    run = open_run(tracking, "policy", folder, made.manifest.fingerprint, {})
    run.config({"learning_rate": 0.1})
    version = register(Candidate(folder / "checkpoint", run_id=run.run_id), tracking)
    tracking.client().set_registered_model_alias("awpo", "champion", version.version)
    with EndpointCache(tmp_path / "runs" / "endpoint-cache.sqlite") as cache:
        cache.put("key", "m", CachedAnswer("kept", "stop", 1, 1, 0.1))
        (tmp_path / "runs" / "prefect").mkdir()
        sqlite3.connect(tmp_path / "runs" / "prefect" / "prefect.db").execute("CREATE TABLE block (name)")

        ended = threading.Event()

        def write() -> None:
            for step in range(10_000):
                if ended.is_set():
                    return
                run.metrics({"loss": float(step)}, step=step)
                time.sleep(0.01)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            shell(commands("Backup"), tmp_path, may_differ=True)
        finally:
            ended.set()
            writer.join()
    written = len(tracking.client().get_metric_history(run.run_id, "loss"))

    shutil.rmtree(tmp_path / "runs")
    restore = commands("Restore")
    assert restore.endswith("awpo doctor\n")
    shell(restore.removesuffix("awpo doctor\n"), tmp_path)
    for store in (tmp_path / "runs").rglob("*.db"):
        assert sqlite3.connect(store).execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert finished_result(folder, made.manifest.fingerprint)
    assert not (folder / ".resume").exists()
    assert resolve_checkpoint("models:/awpo@champion", tracking) == folder / "checkpoint"
    history = tracking.client().get_metric_history(run.run_id, "loss")
    assert [metric.value for metric in history] == [float(step) for step in range(len(history))]  # none torn or missing
    assert len(history) <= written
    assert tracking.client().download_artifacts(run.run_id, "config.json", str(tmp_path))
    with EndpointCache(tmp_path / "runs" / "endpoint-cache.sqlite") as cache:
        assert cache.get("key") is not None
