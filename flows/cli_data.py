"""The commands `awpo data ...`: stages of data preparation without any server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from awpo.errors import UserError
from flows.cli_support import Commands, Format, Json, Out, print_json, progress_shown

data_app = typer.Typer(cls=Commands, help="Prepares data, without any server.", no_args_is_help=True)


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
    with progress_shown():
        from tasks.progress import open_line

        line = open_line(title)
        try:
            manifest = work(line.update)
        except BaseException:
            line.end("failed")
            raise
        line.end("done")
    if as_json:
        print_json({"out": str(out), **manifest.counts})
        return
    for key, value in manifest.counts.items():
        typer.echo(f"{key}: {json.dumps(value) if isinstance(value, dict) else value}")
    typer.echo(f"in {out}")
