"""What pipeline, sweep, study and train are made of: prepare data, make a start, train and evaluate methods, settle.

Each piece only calls or submits tasks. A piece that fails is kept as a `Failure` and does not end the others; `settle`
resolves every future, so that no failure stays unseen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect.futures import PrefectFuture

from awpo.data.settings import SelectConfig
from awpo.data.store import iterate_instances
from awpo.errors import UserError
from awpo.methods import get_method
from awpo.models import resolve_model
from flows.environment import set_hub_offline
from flows.limits import gpu_slots
from flows.parameters import PipelineSettings
from tasks.comparison import Subject, compare, write_report
from tasks.data import decompose, select, write_corpus, write_rationales
from tasks.evaluation import evaluate, measure_pass_at_k
from tasks.layout import Cell, Layout
from tasks.links import link_comparison, link_report
from tasks.model import build_model
from tasks.progress import say
from tasks.tracking import TrackedRun
from tasks.tracking_store import Tracking
from tasks.training import train_policy, train_sft

# As many heavy processes at a time as there are GPUs; on a CPU two of one thread each, or one of two: more threads than
# cores spin against each other.
AT_ONCE = gpu_slots()
THREADS_ALONE = 2
THREADS_BESIDE = 1


# Models of several seeds may be one folder, such as a converted one.
_building = threading.Lock()


class WorkFailed(RuntimeError):
    """Some pieces of a flow failed; the message names each with its reason."""


@dataclass(frozen=True)
class Failure:
    """A piece that has no result, and why."""

    what: str
    error: BaseException

    def __str__(self) -> str:
        reason = str(self.error) or type(self.error).__name__
        return f"{self.what}: {reason.splitlines()[0]}"


@dataclass(frozen=True)
class Start:
    """Where methods start from in one cell: the base model (a folder or hub id) and the SFT checkpoint."""

    settings: PipelineSettings
    label: str
    cell: Cell
    instances: Path
    base: str
    sft: Path | None

    def checkpoint(self, init: str) -> str:
        return str(self.sft) if init == "sft" and self.sft else self.base


@dataclass
class Pending:
    """Work under way on one subject: its training, where it has one, and its evaluation."""

    subject: Subject
    futures: tuple[PrefectFuture[Any], ...]


@dataclass
class Settled:
    """What came of a set of pieces."""

    subjects: list[Subject] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def raise_failures(self, total: int) -> None:
        """Raises the one failure that a person can mend as it is, else WorkFailed naming all of them."""
        if not self.failures:
            return
        if all(isinstance(failure.error, UserError) for failure in self.failures):
            raise self.failures[0].error
        self.raise_named(total)

    def raise_named(self, total: int | None = None) -> None:
        """Raises WorkFailed naming all failures out of `total` pieces (by default, all that are settled), if any."""
        if not self.failures:
            return
        total = total or len(self.subjects) + len(self.failures)
        lines = "; ".join(str(failure) for failure in self.failures)
        raise WorkFailed(f"{len(self.failures)} of {total} failed: {lines}") from self.failures[0].error


def prepare_instances(layout: Layout, settings: PipelineSettings, tracking: Tracking) -> Path:
    """Source or embedded corpus -> instances -> those selected -> rationales; returns the folder of instances with rationales."""
    source = Path(settings.data) if settings.data else write_corpus(layout.corpus, settings.corpus, tracking)
    instances = decompose(source, layout.instances, settings.format, settings.decomposition, tracking)
    if settings.selection != SelectConfig():
        instances = select(instances, layout.selected, settings.selection, tracking)
    return write_rationales(instances, layout.rationales, settings.rationales, tracking)


def fit_evaluation(settings: PipelineSettings, instances: Path) -> PipelineSettings:
    """The settings with splits that the instances have: sources without a split for it are tested on `test`.

    Only where none of the splits asked for is there; otherwise the evaluation names what it could not run.
    """
    present = {str(instance.split) for instance in iterate_instances(instances)}
    if present.intersection(settings.evaluation.splits) or "test" not in present:
        return settings
    say(f"the data have no split {' or '.join(settings.evaluation.splits)}: evaluated on their split test")
    return settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update={"splits": ("test",)})})


def make_start(
    layout: Layout,
    settings: PipelineSettings,
    instances: Path,
    tracking: Tracking,
    threads: int = THREADS_ALONE,
) -> Start:
    """Model and, where methods start from it, SFT; by default run alone, with all threads."""
    choice = resolve_model(settings.model)
    if choice.kind != "hub":
        set_hub_offline()
    cell = layout.cell(choice.name, settings.seed)
    with _building:
        base = build_model(settings.model, instances, cell.base, settings.seed, tracking)
    sft = None
    if any(init_of(method, settings.init) == "sft" for method in settings.methods):
        config = settings.sft.with_seed(settings.seed)
        sft = train_sft(base, choice.name, instances, cell.sft, config, tracking, threads, settings.launch)
    return Start(settings, choice.name, cell, instances, base, sft)


def init_of(method: str, init: str) -> str:
    """Where `method` starts: `init`, unless its name stands for the pair of SFT and policy training."""
    return "sft" if "sft" in get_method(method).stages else init


def measure_start(start: Start, tracking: Tracking, threads: int = THREADS_ALONE) -> dict[str, float]:
    """pass@1 and pass@8 on the validation split of the checkpoint that policy training starts from."""
    init = "sft" if start.sft else "base"
    labels = _labels(start, init, "base")
    checkpoint = Path(start.checkpoint(init))
    if not checkpoint.exists():  # a hub id: measured by the evaluation that follows
        return {}
    config = start.settings.evaluation.model_copy(update={"temperature": start.settings.policy.temperature})
    return measure_pass_at_k(checkpoint, start.instances, start.cell.before_policy, config, labels, tracking, threads)


def submit_methods(start: Start, tracking: Tracking) -> list[Pending]:
    """Submits the training of each method and the evaluations of base, SFT and each method."""
    trained = []
    for method in start.settings.methods:
        subject = subject_of(start, method)
        trained.append((subject, train_policy.submit(*_training(start, subject, tracking))))
    pending: list[Pending] = []
    for method in evaluated_before(start):
        subject = subject_of(start, method)
        future = evaluate.submit(*_evaluation(start, subject, _made(start, method), tracking))
        pending.append(Pending(subject, (future,)))
    for subject, training in trained:
        future = evaluate.submit(*_evaluation(start, subject, training, tracking))
        pending.append(Pending(subject, (training, future)))
    return pending


def train_and_evaluate(start: Start, subject: Subject, tracking: Tracking) -> None:
    """Trains a method where it is one that is trained, and evaluates what came of it, in this thread."""
    if subject.method in ("base", "sft"):
        checkpoint = _made(start, subject.method)
    else:
        checkpoint = train_policy(*_training(start, subject, tracking))
    evaluate(*_evaluation(start, subject, checkpoint, tracking))


def evaluated_before(start: Start) -> list[str]:
    """What is evaluated beside the methods: the base model, where it is a folder, and SFT, where it was trained."""
    return [*(["base"] if Path(start.base).exists() else []), *(["sft"] if start.sft else [])]


def subject_of(start: Start, method: str) -> Subject:
    """What is trained and evaluated as `method` (or base, sft), and where."""
    made = {"base": start.cell.base, "sft": start.cell.sft}
    init = "base" if method in made else init_of(method, start.settings.init)
    name = method if method in made or init == "sft" else f"{method}-from-{init}"
    trained = made.get(method) or start.cell.policy(method, init)
    return Subject(
        method, init, start.label, start.settings.seed, start.cell.evaluation(name), start.instances, trained
    )


def _made(start: Start, method: str) -> Path:
    return start.sft if method == "sft" and start.sft else Path(start.base)


def _training(start: Start, subject: Subject, tracking: Tracking) -> tuple[Any, ...]:
    """What the task train_policy is called with."""
    config = start.settings.policy.with_method(subject.method, start.settings.seed)
    checkpoint = start.checkpoint(subject.init)
    return (
        *(checkpoint, start.label, subject.init, start.instances, subject.trained, config),
        *(tracking, THREADS_BESIDE, start.settings.launch),
    )


def _evaluation(
    start: Start, subject: Subject, checkpoint: Path | PrefectFuture[Path], tracking: Tracking
) -> tuple[Any, ...]:
    """What the task evaluate is called with."""
    # The items are chosen by the evaluation's own seed, the same for all seeds of training: differences can be paired.
    config = start.settings.evaluation
    return checkpoint, start.instances, subject.evaluation, config, subject.labels, tracking, THREADS_BESIDE


def _labels(start: Start, method: str, init: str) -> dict[str, Any]:
    return {"method": method, "init": init, "model": start.label, "seed": start.settings.seed}


def settle(pending: Iterable[Pending]) -> Settled:
    """Waits for all work. Never raises for a piece that failed; the reason kept is that of its first failed task."""
    settled = Settled()
    for item in pending:
        error = next((error for future in item.futures if (error := error_of(future))), None)
        if error is None:
            settled.subjects.append(item.subject)
        else:
            subject = item.subject
            settled.failures.append(Failure(f"{subject.method} · {subject.model} · seed {subject.seed}", error))
    return settled


def error_of(future: PrefectFuture[Any]) -> BaseException | None:
    """Waits for a task; why it has no result, or None."""
    future.wait()
    state = future.state
    if state.is_completed():
        return None
    found = future.result(raise_on_failure=False) if state.is_final() else None
    return found if isinstance(found, BaseException) else RuntimeError(state.message or f"ended {state.name}")


def conclude(
    settled: Settled, layout: Layout, tracking: Tracking, run: TrackedRun, notes: list[str]
) -> list[dict[str, Any]]:
    """Compares and reports what there is, and hangs it on the parent run; returns the rows of summary.json."""
    if not settled.subjects:
        return []
    rows = compare(settled.subjects, layout.summary, tracking)
    missing = [f"Without a result: {failure}" for failure in settled.failures]
    write_report(settled.subjects, layout.report, [*notes, *missing])
    run.artifact(layout.report)
    link_report(run, layout.report.name)
    link_comparison(run)
    run.artifact(layout.summary)
    several = len({(row["model"], row["seed"]) for row in rows}) > 1
    run.metrics(
        {
            f"accuracy/{row['method']}" + (f"/{row['model']}/seed-{row['seed']}" if several else ""): row["accuracy"]
            for row in rows
            if row["accuracy"] is not None
        }
    )
    return rows
