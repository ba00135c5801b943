"""The parent run of a flow: what its stages' runs are nested in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from awpo.types import content_hash
from tasks.stage_run import prefect_tags
from tasks.tracking import TrackedRun, Tracking, close_abandoned_runs, connect, ended_truly, open_run


@contextmanager
def parent_run(flow: str, out: Path, settings: Mapping[str, Any]) -> Iterator[tuple[Tracking, TrackedRun]]:
    """Opens the run of a flow over `out`: the same one where the same flow was run there with the same settings.

    Yields the tracking to hand to tasks, whose runs are nested in it, and the run itself. Its status is true however
    the block ends; runs that an earlier process left open are closed first.
    """
    top = connect()
    close_abandoned_runs(top)
    tags = {**prefect_tags(), "awpo.stage": flow}
    # The file beside the name of a folder that never exists: it lies in OUT, and goes when OUT goes.
    run = open_run(top, f"{flow} {out.name}", out / flow, content_hash([flow, dict(settings)]), tags, begun=True)
    with ended_truly(run):
        run.tags({"awpo.folder": out.absolute()})
        run.config(settings)
        yield replace(top, parent_run_id=run.run_id), run
