"""A run that several machines share (`awpo.machines`): the first does all of it, the others help in its trainings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from awpo.launch import read_launch
from awpo.machine_help import help_machine_0
from awpo.machines import leading, machine_rank


@contextmanager
def shared_by_machines(launch: str) -> Iterator[bool]:
    """Yields whether this machine is to do the run. Where it is another than the first, it has helped by then.

    `launch` is the preset by which the run trains. Raises UserError where the environment doesn't say which machine
    this is, StageFailed where the first is gone before the run has ended.
    """
    settings = read_launch(launch)
    if settings.machines > 1 and machine_rank() > 0:
        # Imports Prefect, which makes its home in the runs folder: not before a run is known to be sound.
        from tasks.stage_run import available_threads

        threads = settings.threads_of_each(available_threads(), available_threads())
        help_machine_0(settings, threads, lambda text: typer.echo(text, err=True))
        yield False
        return
    with leading(settings.machines):
        yield True
