"""Defaults of the environment, set when this module is imported: before Prefect, MLflow and Hugging Face libraries.

Those libraries read their settings from the environment when they are imported, so every module of this package that
a person or a worker may start imports this one first. What the environment already says is never changed.
"""

from __future__ import annotations

import os
from pathlib import Path

DEFAULTS = {
    # Nothing is reported to anyone. MLflow accepts only the word "true".
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # The first start of Prefect's temporary server makes its database; on a busy machine that takes more than 20 s.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    # Heartbeats let the server see that a run's process was killed; see `flows.automations`.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_WORKER_ENABLE_CANCELLATION": "true",
    # A server whose database starts again answers 500 meanwhile, which ends a flow unless it is asked again. 2, 4, ...,
    # 64 s make two minutes, what a managed database takes to fail over; tasks.patience does the same for MLflow.
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
    "PREFECT_CLIENT_MAX_RETRIES": "6",
    # A server that keeps leases in memory forgets them when it ends, and the slots they held never come back.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    # A tracking server that is away must not stop training for minutes: what was not sent is sent later.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


def set_defaults() -> None:
    """Sets what the environment does not say; Prefect's home goes under the runs folder (`AWPO_RUNS`, ./runs)."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    home = Path(os.environ.get("AWPO_RUNS", "runs")).absolute() / "prefect"
    os.environ.setdefault("PREFECT_HOME", str(home))


def set_hub_offline() -> None:
    """Keeps Hugging Face libraries, and the workers started from here, from asking a hub that nothing comes from."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")


def quiet_prefect() -> None:
    """Keeps Prefect's log off the console; it still goes to the server. For commands that draw their own progress."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_CLI_PROMPT", "false")


set_defaults()
