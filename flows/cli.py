"""The command `awpo`.

Imports that cost time stand inside the commands: `awpo --help` and `awpo methods` answer at once. What a person can
mend ends in one line on standard error and exit code 2; work that failed in one line and exit code 1.
"""

from __future__ import annotations

import flows.environment as environment  # sets defaults before the libraries below read them

# isort: split
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from awpo.errors import UserError


class Commands(TyperGroup):
    """Turns errors that are for people into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("stopped; the same command goes on where it stood", err=True)
            raise typer.Exit(130) from None
        except RuntimeError as error:
            if type(error).__name__ not in ("WorkFailed", "StageFailed", "ServerFailed", "SmokeFailed", "Regression"):
                raise
            typer.echo(f"failed: {error}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    help="Trains language models to use tools, compares methods, tracks it all in Prefect and MLflow.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(cls=Commands, help="Prepares data, without any server.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Out = Annotated[Path, typer.Option(help="Folder of the results; what it holds already is not made again.")]
Format = Annotated[str, typer.Option(help="Format of the source; auto looks at its rows.")]
Model = Annotated[str | None, typer.Option(help="A preset of infra/presets/models, or a checkpoint's folder.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of model, SFT, policy training.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object, on the last line.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show Prefect's log, and tracebacks in it.")]


@app.command()
def demo(
    out: Out = Path("runs/demo"),
    preset: Annotated[str, typer.Option(help="Preset of infra/presets/pipelines, or a YAML file.")] = "demo",
    verbose: Verbose = False,
) -> None:
    """Runs everything on this machine: corpus, SFT, three methods, evaluation, report. Minutes, on two cores."""
    from flows.parameters import read_pipeline

    _run_pipeline(read_pipeline(preset), out, verbose, as_json=False)


@app.command()
def run(
    data: Annotated[Path, typer.Option(help="Source file or folder of dialogues.")],
    out: Out,
    method: Annotated[str, typer.Option(help="Method to train by; see `awpo methods`.")] = "awpo",
    model: Model = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps of policy training.")] = None,
    sft_steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps of SFT.")] = None,
    init: Annotated[str, typer.Option(help="Where policy training starts: sft or base.")] = "sft",
    seed: Seed = None,
    format: Format = "auto",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Decomposes a source, trains a few steps by one method and evaluates on rows held out of it."""
    from flows.parameters import read_pipeline
    from flows.preflight import check_source

    settings = _changed(
        read_pipeline("run"),
        {"data": str(data), "format": format, "methods": (method,), "init": init, "model": model, "seed": seed},
        {"policy": {"steps": steps}, "sft": {"steps": sft_steps}},
    )
    check_source(data, format)
    _run_pipeline(settings, out, verbose, as_json)


@app.command()
def train(
    out: Out,
    preset: Annotated[str, typer.Option(help="Preset of infra/presets/pipelines, or a YAML file.")] = "quick",
    data: Annotated[Path | None, typer.Option(help="Source of dialogues; none: the preset's, or the corpus.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Method to train by; give it again for more.")] = None,
    model: Model = None,
    seed: Seed = None,
    init: Annotated[str | None, typer.Option(help="Where policy training starts: sft or base.")] = None,
    format: Format = "auto",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Runs a pipeline of your own: a preset or YAML file, changed by the options."""
    from flows.parameters import read_pipeline
    from flows.preflight import check_source

    changes = {"data": str(data) if data else None, "model": model, "seed": seed, "init": init}
    settings = _changed(
        read_pipeline(preset), {**changes, "methods": tuple(method) if method else None, "format": format}, {}
    )
    if settings.data:
        check_source(Path(settings.data), settings.format)
    _run_pipeline(settings, out, verbose, as_json)


@app.command()
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint's folder, models:/NAME@ALIAS, or a model preset.")],
    out: Out,
    instances: Annotated[Path | None, typer.Option(help="Folder of instances; none: the embedded corpus.")] = None,
    split: Annotated[list[str] | None, typer.Option(help="Split to evaluate on; give it again for more.")] = None,
    benchmark: Annotated[list[str] | None, typer.Option(help="held_out or bfcl; give it again for more.")] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Evaluates one checkpoint on held-out instances and BFCL."""
    from flows.parameters import read_pipeline
    from flows.preflight import check_file, check_out

    if instances:
        check_file(instances, "folder of instances")
    check_out(out)
    base = read_pipeline("quick").evaluation
    changes = {"splits": split, "benchmarks": benchmark}
    settings = type(base).read(
        {**base.model_dump(), **{key: tuple(value) for key, value in changes.items() if value}}, "awpo evaluate"
    )
    _check_checkpoint(checkpoint)
    with _flow_session(verbose):
        from flows.evaluate import evaluate as flow

        result = flow(checkpoint, str(instances) if instances else None, str(out), settings)
    if as_json:
        _print_json({"run_id": result["run_id"], "scores": result["scores"], "out": result["out"]})
        return
    from rich.console import Console

    from flows.screen import plain_table

    columns = ("benchmark", "split", "mode", "group", "accuracy", "low", "high", "items")
    rows = [[row[name] for name in columns] for row in result["scores"]]
    Console().print(plain_table(f"Evaluation of {checkpoint}", columns, rows))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Folder of a finished evaluation.")],
    second: Annotated[Path, typer.Argument(help="Folder of another one, of the same items.")],
    as_json: Json = False,
) -> None:
    """Compares two evaluations item by item: differences of accuracy with intervals."""
    from evaluation.compare import compare as compare_runs
    from evaluation.compare import read_run

    found = [row.to_json() for row in compare_runs(read_run(first), read_run(second))]
    if as_json:
        _print_json({"differences": found})
        return
    from rich.console import Console

    from flows.screen import plain_table

    columns = ("benchmark", "split", "mode", "first", "second", "difference", "low", "high", "items")
    Console().print(
        plain_table(f"{second} against {first}", columns, [[row[name] for name in columns] for row in found])
    )


@app.command()
def methods(as_json: Json = False) -> None:
    """Lists the methods that can be trained by."""
    from awpo.methods import METHODS

    if as_json:
        _print_json({"methods": [method.to_json() for method in METHODS.values()]})
        return
    from rich.console import Console

    from flows.screen import plain_table

    rows = [(method.name, " + ".join(method.stages) or "-", method.summary) for method in METHODS.values()]
    Console().print(plain_table("Methods", ("name", "stages", "what it does"), rows))


@app.command()
def doctor() -> None:
    """Looks whether this machine and installation can do the work; exit code 1 where something needs mending."""
    from rich.console import Console

    from flows.doctor import examine

    checks = examine()
    from flows.doctor import checks_table

    Console().print(checks_table(checks))
    if any(check.state == "mend" for check in checks):
        raise typer.Exit(1)


@app.command()
def serve(
    prefect_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the Prefect server.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the MLflow UI.")] = 5000,
) -> None:
    """Starts a Prefect server, a worker and the MLflow UI on this machine, with all deployments registered."""
    from flows.servers import Addresses, served, tracking_store, wait_until_stopped

    addresses = Addresses(prefect_port, mlflow_port)
    with served(addresses, lambda text: typer.echo(text, err=True)) as children:
        store = tracking_store()
        typer.echo(f"Prefect   {addresses.prefect}   (runs, deployments, their forms)")
        typer.echo(f"MLflow    {store if store.startswith('http') else addresses.mlflow}   (runs, metrics, comparison)")
        typer.echo(f"Commands  export PREFECT_API_URL={addresses.prefect}/api")
        typer.echo("          prefect deployment run pipeline/pipeline")
        typer.echo("Ctrl-C ends all of it.")
        ended = wait_until_stopped(children)
        if ended is not None:
            typer.echo(f"failed: {ended.name} ended by itself; see {ended.log}", err=True)
        typer.echo("stopping the worker, then the servers ...", err=True)
    if ended is not None:
        raise typer.Exit(1)


@data_app.command()
def decompose(
    source: Annotated[Path, typer.Argument(help="File or folder of dialogues.")],
    out: Out,
    format: Format = "auto",
    as_json: Json = False,
) -> None:
    """Cuts dialogues into instances, one per assistant step; lists the rows that it cannot use, with the reason."""
    from flows.preflight import check_out, check_source

    check_source(source, format)
    check_out(out, needed=0.2)
    from awpo.data.decompose import decompose_source

    _stage(
        f"decompose {source.name}",
        out,
        as_json,
        lambda progress: decompose_source(source, out, format=format, progress=progress),
    )


@data_app.command()
def corpus(
    out: Out,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
    train: Annotated[int, typer.Option(min=1, help="Dialogues of the training split.")] = 4000,
    validation: Annotated[int, typer.Option(min=1, help="Dialogues of the validation split.")] = 120,
    test: Annotated[int, typer.Option(min=1, help="Dialogues of each of the two test splits.")] = 120,
    as_json: Json = False,
) -> None:
    """Writes the embedded corpus of tool-use dialogues."""
    from flows.preflight import check_out

    check_out(out, needed=0.2)
    from awpo.config import CorpusConfig
    from awpo.embedded.corpus import write_corpus

    config = CorpusConfig(seed=seed, train_dialogues=train, validation_dialogues=validation, test_dialogues=test)
    _stage("write corpus", out, as_json, lambda progress: write_corpus(out, config, progress=progress))


@data_app.command()
def rationales(
    instances: Annotated[Path, typer.Argument(help="Folder of instances.")],
    out: Out,
    endpoint: Annotated[
        str | None, typer.Option(help="Base URL of an OpenAI-compatible endpoint, ending in /v1.")
    ] = None,
    endpoint_model: Annotated[str | None, typer.Option(help="Model to ask the endpoint for.")] = None,
    as_json: Json = False,
) -> None:
    """Writes a reference rationale for each instance: offline, or by an endpoint (its key in OPENAI_API_KEY)."""
    from flows.preflight import check_file, check_out

    check_file(instances, "folder of instances")
    check_out(out, needed=0.2)
    if (endpoint is None) != (endpoint_model is None):
        raise UserError("an endpoint needs both --endpoint and --endpoint-model")
    from awpo.config import RationaleConfig
    from awpo.data.rationales import write_rationales

    asked = {"writer": "endpoint", "endpoint": {"base_url": endpoint, "model": endpoint_model}} if endpoint else {}
    config = RationaleConfig.read(asked, "awpo data rationales")
    _stage(
        "write rationales", out, as_json, lambda progress: write_rationales(instances, out, config, progress=progress)
    )


def _stage(title: str, out: Path, as_json: bool, work: Callable[[Any], Any]) -> None:
    """Runs a stage without Prefect and prints its counts."""
    with _progress():
        from tasks.progress import open_line

        line = open_line(title)
        try:
            manifest = work(line.update)
        except BaseException:
            line.end("failed")
            raise
        line.end("done")
    if as_json:
        _print_json({"out": str(out), **manifest.counts})
        return
    for key, value in manifest.counts.items():
        typer.echo(f"{key}: {json.dumps(value) if isinstance(value, dict) else value}")
    typer.echo(f"in {out}")


def _changed(settings: Any, values: dict[str, Any], nested: dict[str, dict[str, Any]]) -> Any:
    """Settings with the options that were given; checked like the file they came from. Raises UserError.

    Another model than the preset's brings the settings that its own preset has.
    """
    from awpo.models import resolve_model
    from flows.parameters import check_policy_method

    for name in values.get("methods") or ():
        check_policy_method(name)
    raw = settings.model_dump()
    model = values.get("model")
    if model and model != settings.model:
        for section, own in (resolve_model(model).settings or {}).items():
            raw[section] |= own
    raw |= {key: value for key, value in values.items() if value is not None}
    for section, changes in nested.items():
        raw[section] |= {key: value for key, value in changes.items() if value is not None}
    return type(settings).read(raw, "the options")


def _check_checkpoint(name: str) -> None:
    """Raises UserError for what is certainly no checkpoint, before any store or server is opened."""
    if not name.startswith("models:/"):
        from awpo.models import resolve_model
        from tasks.layout import checkpoint_of

        resolve_model(str(checkpoint_of(Path(name))))


def _run_pipeline(settings: Any, out: Path, verbose: bool, as_json: bool) -> None:
    from flows.preflight import check_out

    settings.check()
    check_out(out)
    start = time.monotonic()
    with _flow_session(verbose):
        from flows.pipeline import pipeline

        result = pipeline(out=str(out), **settings.parameters())
    if as_json:
        _print_json(_result_json(result))
        return
    from rich.console import Console

    from flows.screen import last_screen
    from tasks.tracking import tracking_uri

    last_screen(Console(), result, tracking_uri(), time.monotonic() - start)


def _result_json(result: dict[str, Any]) -> dict[str, Any]:
    """The run that was asked for: the last method's, with its numbers; beside it all rows."""
    last = result["methods"][-1]
    names = (
        "reward",
        "accuracy",
        "accuracy_low",
        "accuracy_high",
        "response_length",
        "seconds",
        "greedy",
        "train_reward",
    )
    return {
        "run_id": last["run_id"],
        "method": last["method"],
        "metrics": {name: last[name] for name in names},
        "pass_at": result["pass_at"],
        "methods": result["methods"],
        "parent_run_id": result["run_id"],
        "out": result["out"],
        "report": result["report"],
    }


@contextmanager
def _progress() -> Iterator[None]:
    """Bars where standard error is a terminal, a line now and then elsewhere; standard output is for results."""
    from rich.console import Console

    from tasks.progress import BarReporter, PlainReporter, reporting

    if sys.stderr.isatty():
        with BarReporter(Console(stderr=True)) as reporter, reporting(reporter):
            yield
    else:
        with reporting(PlainReporter()):
            yield


@contextmanager
def _flow_session(verbose: bool) -> Iterator[None]:
    """Prefect quiet unless asked, the running server joined where there is one, progress shown."""
    if not verbose:
        environment.quiet_prefect()
    from flows.prefect_server import join_running_server, temporary_server
    from flows.preflight import check_writable
    from tasks.layout import runs_root

    check_writable(runs_root(), "AWPO_RUNS")
    with ExitStack() as stack:
        if join_running_server() is None:
            typer.echo("starting Prefect ...", err=True)
            typer.echo(f"watch at {stack.enter_context(temporary_server()).removesuffix('/api')}", err=True)
        stack.enter_context(_progress())
        yield


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, default=str))


if __name__ == "__main__":
    app()
