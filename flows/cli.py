"""The command `awpo`.

Imports that cost time stand inside the commands: `awpo --help` and `awpo methods` answer at once. What a person can
mend ends in one line on standard error and exit code 2; work that failed in one line and exit code 1.
"""

from __future__ import annotations

import flows.environment  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli_bench import bench_app
from flows.cli_compare import compare
from flows.cli_data import data_app
from flows.cli_evaluate import evaluate_app
from flows.cli_gc import gc
from flows.cli_judge import judge_app
from flows.cli_methods import methods
from flows.cli_migrate import migrate
from flows.cli_plan import plan
from flows.cli_serve import serve_one_model
from flows.cli_setup import doctor, setup
from flows.cli_study import study
from flows.cli_support import Commands, Format, Json, Model, Out, Seed, Verbose, changed, flow_session, print_json

app = typer.Typer(
    cls=Commands,
    help="Trains language models to use tools, compares methods, tracks it all in Prefect and MLflow.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")
app.add_typer(judge_app, name="judge")
app.add_typer(evaluate_app, name="evaluate")
app.add_typer(bench_app, name="bench")
app.command()(compare)
app.command()(study)
app.command()(methods)
app.command()(plan)
app.command()(doctor)
app.command()(setup)
app.command()(migrate)
app.command()(gc)


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

    preset = read_pipeline("run")
    # Fewer steps than a rollout batch is cut into are steps of larger parts.
    most = preset.policy.steps_per_rollout
    parts = next(n for n in range(min(steps or most, most), 0, -1) if most % n == 0)
    settings = changed(
        preset,
        {"data": str(data), "format": format, "methods": (method,), "init": init, "model": model, "seed": seed},
        {"policy": {"steps": steps, "steps_per_rollout": parts}, "sft": {"steps": sft_steps}},
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
    format: Annotated[str | None, typer.Option(help="Format of the source; auto looks at its rows.")] = None,
    launch: Annotated[
        str | None, typer.Option(help="Processes that train: a preset, such as cpu-2, or a file.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Runs a pipeline of your own: a preset or YAML file, changed by the options."""
    from flows.parameters import read_pipeline
    from flows.preflight import check_source
    from flows.several_machines import shared_by_machines

    changes: dict[str, Any] = {"model": model, "seed": seed, "init": init, "format": format, "launch": launch}
    changes |= {"data": str(data) if data else None, "methods": tuple(method) if method else None}
    settings = changed(read_pipeline(preset), changes, {}, settings_of_model=True)
    if settings.data:
        check_source(Path(settings.data), settings.format)
    with shared_by_machines(settings.launch) as leads:
        if leads:
            _run_pipeline(settings, out, verbose, as_json)


@app.command()
def serve(
    prefect_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the Prefect server.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the MLflow UI.")] = 5000,
    model: Annotated[str | None, typer.Option(help="Serve this checkpoint's folder instead of all that.")] = None,
    engine: Annotated[
        str, typer.Option(help="What computes the model: transformers, vllm, or auto for vllm where it is installed.")
    ] = "auto",
    served_name: Annotated[str | None, typer.Option(help="Name to ask for the model by; none: its folder's.")] = None,
    host: Annotated[str, typer.Option(help="Address that the model is served on.")] = "127.0.0.1",
    model_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the model; 0: a free one.")] = 0,
) -> None:
    """Starts a Prefect server, a worker and the MLflow UI on this machine, with all deployments registered.

    With --model it serves that model instead, in the OpenAI chat format.
    """
    if model is not None:
        serve_one_model(model, engine, served_name, host, model_port)
        return
    from flows.servers import Addresses, served, wait_until_stopped
    from tasks.layout import tracking_uri, without_password

    addresses = Addresses(prefect_port, mlflow_port)
    with served(addresses, lambda text: typer.echo(text, err=True)) as children:
        store = without_password(tracking_uri())
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


def _run_pipeline(settings: Any, out: Path, verbose: bool, as_json: bool) -> None:
    from flows.preflight import check_launch, check_out

    settings.check()
    check_out(out)
    check_launch(settings.launch, settings.policy, out)
    start = time.monotonic()
    with flow_session(verbose):
        from flows.pipeline import pipeline

        result = pipeline(out=str(out), **settings.parameters())
    if as_json:
        print_json(_result_json(result))
        return
    from rich.console import Console

    from flows.screen import last_screen
    from tasks.layout import tracking_uri, without_password

    last_screen(Console(), result, without_password(tracking_uri()), time.monotonic() - start)


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


if __name__ == "__main__":
    app()
