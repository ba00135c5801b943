"""The cells of a sweep: a child run each, in threads of the sweep's process, queued by the limits of `tasks.slots`."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
import contextvars
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from prefect import flow
from prefect.states import Cancelled

from awpo.models import resolve_model
from evaluation.items import read_scores
from flows.parameters import PipelineSettings
from flows.pieces import (
    THREADS_ALONE,
    THREADS_BESIDE,
    Failure,
    Settled,
    Start,
    evaluated_before,
    make_start,
    measure_start,
    subject_of,
    train_and_evaluate,
)
from tasks.cancellation import stop
from tasks.comparison import Subject
from tasks.evaluation import score_metrics
from tasks.layout import Layout
from tasks.parents import child_run
from tasks.tracking_store import Tracking

# Cells that have begun: most of them wait for a slot. Each is a thread that asks the server every few seconds.
BEGUN_AT_ONCE = 16
START = "start"

Result = TypeVar("Result")


class StartFailed(RuntimeError):
    """What a cell would have started from could not be made."""


@dataclass(frozen=True)
class Cell:
    """A method with one model and seed; the method `start` makes what the others start from."""

    settings: PipelineSettings
    method: str

    @property
    def model(self) -> str:
        return resolve_model(self.settings.model).name

    @property
    def title(self) -> str:
        """The name of its runs, here and in MLflow."""
        return f"{self.method} · {self.model} · seed {self.settings.seed}"


@dataclass
class Cells:
    """All cells of one sweep, on the same instances."""

    layout: Layout
    instances: Path
    tracking: Tracking
    _subjects: list[Subject] = field(default_factory=list)
    _failures: list[Failure] = field(default_factory=list)

    def run(self, starts: list[PipelineSettings]) -> Settled:
        """Runs everything and waits for it; cells begin when their start is made. Never raises for one that failed.

        Where the flow is stopped meanwhile, all cells are, and have ended when this raises.
        """
        threads = THREADS_BESIDE if len(starts) > 1 else THREADS_ALONE
        pool = ThreadPoolExecutor(max_workers=BEGUN_AT_ONCE, thread_name_prefix="cell")
        try:
            pending: dict[Future[Any], Cell] = {}
            for settings in starts:
                cell = Cell(settings, START)
                pending[self._submit(pool, self._make_start, cell, threads)] = cell
            while pending:
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    for cell, start in self._settle(pending.pop(future), future):
                        pending[self._submit(pool, self._train_and_evaluate, cell, start)] = cell
        except BaseException:
            stop()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        place = {(resolve_model(settings.model).name, settings.seed): n for n, settings in enumerate(starts)}
        methods = ("base", "sft", *starts[0].methods)
        self._subjects.sort(key=lambda found: (place[found.model, found.seed], methods.index(found.method)))
        self._failures.sort(key=lambda failure: failure.what)
        return Settled(self._subjects, self._failures)

    def _settle(self, cell: Cell, future: Future[Any]) -> list[tuple[Cell, Start]]:
        """Keeps what came of a cell; of a start, returns the cells that can begin now."""
        error = future.exception()
        if error is not None:
            self._failures.append(Failure(cell.title, error))
        if cell.method != START:
            if error is None:
                self._subjects.append(future.result())
            return []
        if error is not None:
            lost = [Cell(cell.settings, method).title for method in cell.settings.methods]
            self._failures += [Failure(title, StartFailed(f"{cell.title} failed")) for title in lost]
            return []
        start: Start = future.result()
        return [(Cell(cell.settings, method), start) for method in (*evaluated_before(start), *cell.settings.methods)]

    def _submit(
        self, pool: ThreadPoolExecutor, work: Callable[[Cell, Any], Result], cell: Cell, what: Any
    ) -> Future[Result]:
        # The copied context is what makes the run a child of this flow's.
        context = contextvars.copy_context()
        return pool.submit(context.run, as_child, cell, lambda: work(cell, what))

    def _make_start(self, cell: Cell, threads: int) -> Start:
        folder = self.layout.cell(cell.model, cell.settings.seed).folder / START
        known = cell.settings.model_dump(mode="json", include={"model", "seed", "init", "sft"})
        with child_run(self.tracking, cell.title, folder, known, _labels(cell)) as (tracking, run):
            start = make_start(self.layout, cell.settings, self.instances, tracking, threads)
            run.metrics(measure_start(start, tracking, threads))
        return start

    def _train_and_evaluate(self, cell: Cell, start: Start) -> Subject:
        subject = subject_of(start, cell.method)
        known = cell.settings.model_dump(mode="json", include={"model", "seed", "policy", "evaluation"})
        folder = start.cell.folder / f"cell-{subject.evaluation.name}"
        with child_run(
            self.tracking, cell.title, folder, known | {"method": cell.method, "init": subject.init}, subject.labels
        ) as (tracking, run):
            train_and_evaluate(start, subject, tracking)
            run.metrics(score_metrics(read_scores(subject.evaluation)))
        return subject


def as_child(cell: Cell, work: Callable[[], Result]) -> Result:
    """Does the work in a run of its own, a child of the flow run in whose context this is called.

    The run's state is Cancelled where the flow was stopped.
    """

    def body(method: str, model: str, seed: int) -> Any:
        try:
            return work()
        except InterruptedError as error:
            return Cancelled(message=str(error))

    # Prefect tells children of one flow apart by the function and a count, which threads would race for.
    body.__qualname__ = f"cell {cell.title}"
    child = flow(name="cell", flow_run_name=lambda: cell.title, validate_parameters=False)(body)
    result: Any = child(method=cell.method, model=cell.model, seed=cell.settings.seed)
    return result  # type: ignore[no-any-return]


def _labels(cell: Cell) -> dict[str, Any]:
    return {"method": cell.method, "init": "base", "model": cell.model, "seed": cell.settings.seed}
