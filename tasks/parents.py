"""The parent run of a flow: what its stages' runs are nested in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from awpo.types import content_hash
from tasks.links import link_run
from tasks.patience import patience_of_this_run
from tasks.stage_run import prefect_tags
from tasks.tracking import TrackedRun, close_abandoned_runs, ended_truly, open_run
from tasks.tracking_store import Tracking, connect


def close_runs(flow: Any, flow_run: Any, state: Any) -> None:
    """Hook of a flow whose process was killed, called by its worker: MLflow's runs of it end KILLED."""
    close_abandoned_runs(connect())


@contextmanager
def parent_run(flow: str, out: Path, settings: Mapping[str, Any]) -> Iterator[tuple[Tracking, TrackedRun]]:
    """Opens the run of a flow over `out`: the same one where the same flow was run there with the same settings.

    Yields the tracking to hand to tasks, whose runs are nested in it, and the run itself. Its status is true however
    the block ends; runs that an earlier process left open are closed first.
    """
    top = connect(patience=patience_of_this_run())
    close_abandoned_runs(top)
    # The file beside the name of a folder that never exists: it lies in OUT, and goes when OUT goes.
    with _opened(top, f"{flow} {out.name}", out / flow, [flow, dict(settings)], flow) as (tracking, run):
        run.tags({"awpo.folder": out.absolute()})
        run.config(settings)
        yield tracking, run


@contextmanager
def child_run(
    tracking: Tracking, title: str, folder: Path, settings: Mapping[str, Any], labels: Mapping[str, Any]
) -> Iterator[tuple[Tracking, TrackedRun]]:
    """Opens the run of a cell, nested in that of `tracking`; the same one where the cell was run with these settings.

    `folder` names the cell among the results and need not exist; `labels` are the parameters that runs are compared by.
    """
    with _opened(tracking, title, folder, [title, dict(settings)], "cell") as (within, run):
        run.parameters(labels)
        run.config(settings)
        yield within, run


@contextmanager
def _opened(
    tracking: Tracking, title: str, folder: Path, work: list[Any], stage: str
) -> Iterator[tuple[Tracking, TrackedRun]]:
    tags = {**prefect_tags(), "awpo.stage": stage}
    run = open_run(tracking, title, folder, content_hash(work), tags, begun=True)
    with ended_truly(run):
        link_run(run)
        yield replace(tracking, parent_run_id=run.run_id, group=tracking.group or run.run_id), run
