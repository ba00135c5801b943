"""Processor, memory, disk, network and GPUs of this machine while a stage's worker runs, as MLflow's system metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from tasks.tracking import TrackedRun

EVERY_SECONDS = 10.0


class _Monitor(SystemMetricsMonitor):  # type: ignore[misc]
    """MLflow's own monitor, but for how it writes: as all else here, one writer at a time, into the run's store.

    It begins with the stage's own first metrics, as MLflow's pages offer metrics in the order in which they came. A
    retry counts on from the last step that the store has.
    """

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(
            run.run_id, sampling_interval=EVERY_SECONDS, resume_logging=True, tracking_uri=run.tracking.uri
        )
        self.run = run

    def publish_metrics(self, metrics: Mapping[str, Any]) -> None:
        if self.run.file.sent:
            named = {f"{self._metrics_prefix}{name}": value for name, value in metrics.items()}
            self.run.metrics(named, self._logging_step)
            self._logging_step += 1
        for monitor in self.monitors:
            monitor.clear_metrics()


@contextmanager
def system_metrics(run: TrackedRun) -> Iterator[None]:
    """Logs system metrics every `EVERY_SECONDS` while the block runs, once the stage has metrics of its own.

    What the store misses is lost, and told nobody.

    The numbers are the machine's, not the worker's alone: other work beside it shows in them.
    """
    try:
        monitor = _Monitor(run)
    except (MlflowException, OSError):  # a store that is away ends no stage
        yield
        return
    monitor.start()
    try:
        yield
    finally:
        monitor.finish()
