"""Flows are imported with a Prefect home and a runs folder of this test run's own."""

from __future__ import annotations

import os
import tempfile

# Before anything imports Prefect: it reads its settings once.
_FOLDER = tempfile.mkdtemp(prefix="awpo-flows-")
os.environ["AWPO_RUNS"] = _FOLDER
os.environ.setdefault("PREFECT_HOME", f"{_FOLDER}/prefect")
os.environ.pop("PREFECT_API_URL", None)
