"""The commands `awpo data ...`: stages of data preparation without any server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from awpo.data.hub import is_hub
from awpo.errors import UserError
from flows.cli_support import Commands, Format, Json, Out, print_json, progress_shown

data_app = typer.Typer(cls=Commands, help="Prepares data, without any server.", no_args_is_help=True)


@data_app.command()
def decompose(
    source: Annotated[Path, typer.Argument(help="File or folder of dialogues.")],
    out: Out,
    format: Format = "auto",
    invalid_calls: Annotated[
        str, typer.Option(help="Dialogues with a call that doesn't fit its tool's schema: keep or drop.")
    ] = "keep",
    mask: Annotated[
        float | None, typer.Option(help="Share of training dialogues whose tools get random names; none if not given.")
    ] = None,
    irrelevance: Annotated[
        float | None, typer.Option(help="Share of training dialogues that lose the right tool.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the masks.")] = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes for a large source; all cores if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Cuts dialogues into instances, one per assistant step; lists the rows that it cannot use, with the reason.

    SOURCE may be hub:OWNER/NAME@COMMIT[:SPLIT], a set on the Hugging Face Hub.
    """
    from awpo.data.settings import DecomposeConfig
    from flows.preflight import check_out, check_source

    asked: dict[str, Any] = {"invalid_calls": invalid_calls}
    if mask is not None or irrelevance is not None:
        asked["masking"] = {"seed": seed, "share": mask or 0.0, "irrelevance": irrelevance or 0.0}
    config = DecomposeConfig.read(asked, "awpo data decompose")
    check_source(source, format)
    check_out(out, needed=0.2)
    from awpo.data.decompose import decompose_source

    _stage(
        f"decompose {source.name}",
        out,
        as_json,
        lambda progress: decompose_source(
            source, out, format=format, config=config, progress=progress, workers=workers
        ),
    )


@data_app.command()
def select(
    instances: Annotated[list[Path], typer.Argument(help="Folders of instances, one or several.")],
    out: Out,
    config: Annotated[
        Path, typer.Option(help="YAML: near_duplicates, decontamination, lengths, mixture, each where it is wanted.")
    ],
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes for what is large; all cores if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Takes of instances what is to be trained on: no near-duplicates, no benchmark's questions, lengths, shares."""
    from awpo.data.settings import SelectConfig
    from awpo.settings import read_yaml
    from flows.preflight import check_file, check_out

    for folder in instances:
        check_file(folder, "folder of instances")
    check_file(config, "config")
    settings = SelectConfig.read(read_yaml(config), str(config))
    check_out(out, needed=0.2)
    from awpo.data.selection import select_instances

    _stage(
        "select",
        out,
        as_json,
        lambda progress: select_instances(instances, out, settings, progress=progress, workers=workers),
    )


@data_app.command(name="inspect")
def inspect_data(
    source: Annotated[Path, typer.Argument(help="Folder or file of instances, or a source of dialogues.")],
    number: Annotated[int, typer.Option(min=0, help="How many instances are shown.")] = 3,
    kind: Annotated[str | None, typer.Option(help="Only of this kind: call, reply or call+reply.")] = None,
    of_source: Annotated[str | None, typer.Option("--source", help="Only of this source.")] = None,
    format: Format = "auto",
    whole: Annotated[bool, typer.Option("--whole", help="Long texts are shown to their end.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page of HTML instead; it needs no other file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as one JSON object, no instances.")] = False,
) -> None:
    """Shows instances as a person reads them, and counts by source, kind, depth, length and tools."""
    from typing import get_args

    from rich.console import Console

    from awpo.data.inspect import draw, inspect_instances, read_any, to_html
    from awpo.files import write_atomically
    from awpo.types import Kind
    from flows.preflight import check_file, check_writable

    if not is_hub(source):
        check_file(source, "source")
    if kind is not None and kind not in get_args(Kind):
        raise UserError(f"unknown kind {kind!r}; known: {', '.join(get_args(Kind))}")
    if html is not None:
        check_writable(html.parent, "--html")
    chosen, summary = inspect_instances(read_any(source, format), number=number, kind=kind, source=of_source)
    if not summary.instances:
        wanted = [f"kind {kind}"] * (kind is not None) + [f"source {of_source}"] * (of_source is not None)
        raise UserError(
            f"{source} holds no instance" + (f" of {' and '.join(wanted)}" if wanted else " that can be read")
        )
    if html is not None:
        write_atomically(html, to_html(draw(chosen, summary, whole=whole), f"instances of {source.name}"))
    if as_json:
        print_json({**summary.to_json(), **({"html": str(html)} if html else {})})
    elif html is not None:
        typer.echo(f"in {html}")
    else:
        Console(highlight=False).print(draw(chosen, summary, whole=whole))


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
    writer: Annotated[
        str | None, typer.Option(help="Preset of infra/presets/endpoints, or a YAML file, in place of those two.")
    ] = None,
    spending_limit: Annotated[float | None, typer.Option(help="Most to spend; needs the writer's prices.")] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Only say what it would take.")] = False,
    as_json: Json = False,
) -> None:
    """Writes a reference rationale for each instance: offline, or by an endpoint (its key in the environment)."""
    from flows.preflight import check_file, check_out

    check_file(instances, "folder of instances")
    if (endpoint is None) != (endpoint_model is None):
        raise UserError("an endpoint needs both --endpoint and --endpoint-model")
    if writer and endpoint:
        raise UserError("--writer and --endpoint name two writers; give one")
    from awpo.config import RationaleConfig
    from awpo.data.rationales import estimate as estimate_rationales
    from awpo.data.rationales import write_rationales
    from awpo.endpoint_presets import read_endpoint

    asked: dict[str, Any] = {"base_url": endpoint, "model": endpoint_model} if endpoint else {}
    if writer:
        asked = read_endpoint(writer).model_dump()
    if spending_limit is not None:
        asked["spending_limit"] = spending_limit
    settings = {"writer": "endpoint", "endpoint": asked} if asked else {}
    config = RationaleConfig.read(settings, "awpo data rationales")
    if config.endpoint:
        found = estimate_rationales(instances, out, config)
        if estimate and as_json and found:
            print_json(asdict(found))
            return
        typer.echo(f"{config.endpoint.model}: {found}", err=not estimate)
    if estimate:
        if not config.endpoint:
            typer.echo("the offline writer asks nobody and costs nothing")
        return
    check_out(out, needed=0.2)
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
    if manifest.counts.get("rejected"):
        _show_examples(out / "rejected.jsonl", "rows that are not used, one of each reason")
    if manifest.counts.get("invalid_calls"):
        _show_examples(out / "invalid_calls.jsonl", "calls that don't fit their schema, one of each reason")
    typer.echo(f"in {out}")


def _show_examples(path: Path, title: str) -> None:
    """What a reader could not use, so that it can be seen without opening a file: the first line of each reason."""
    first: dict[tuple[str, str], dict[str, Any]] = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            item = json.loads(line)
            first.setdefault((item.get("source", ""), item["reason"]), item)
    typer.echo(f"{title} (all in {path}):")
    for (source, reason), item in first.items():
        parts = [item.get("tool", ""), item.get("where", ""), item["detail"]]
        detail = ", ".join(" ".join(part.split()) for part in parts if part)
        label = f"{source}: {reason}" if source else reason
        typer.echo(f"  {label}: {item['file']} row {item['row']}" + (f", {detail[:200]}" if detail else ""))
