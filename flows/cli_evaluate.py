"""The commands `awpo evaluate ...`: a checkpoint or an endpoint, two evaluations item by item, reference answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from awpo.errors import UserError
from flows.cli_support import Commands, Json, Out, Verbose, flow_session, print_json, progress_shown

if TYPE_CHECKING:
    from awpo.config import EndpointConfig
    from evaluation.diff import Diff

USUAL = "run"
"""The command that is meant where none is named."""
LONGEST_OUTPUT = 600


class EvaluateCommands(Commands):
    """`awpo evaluate CHECKPOINT` means `awpo evaluate run CHECKPOINT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [USUAL, *args]
        return super().parse_args(ctx, args)


evaluate_app = typer.Typer(
    cls=EvaluateCommands,
    help="Evaluates a checkpoint or an endpoint: `awpo evaluate CHECKPOINT --out FOLDER`, options in `run --help`.",
    no_args_is_help=True,
)


@evaluate_app.command(USUAL)
def run(
    out: Out,
    checkpoint: Annotated[
        str | None, typer.Argument(help="A checkpoint's folder, models:/NAME@ALIAS, or a model preset.")
    ] = None,
    instances: Annotated[Path | None, typer.Option(help="Folder of instances; none: the embedded corpus.")] = None,
    split: Annotated[list[str] | None, typer.Option(help="Split to evaluate on; give it again for more.")] = None,
    benchmark: Annotated[
        list[str] | None,
        typer.Option(help="held_out, bfcl_v3, bfcl_v4, api_bank or mmlu_pro; give it again for more."),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Base URL of an OpenAI-compatible endpoint, in place of a checkpoint.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask the endpoint for.")] = None,
    endpoint_preset: Annotated[
        str | None, typer.Option(help="Preset of infra/presets/endpoints, or a YAML file, in place of --endpoint.")
    ] = None,
    prompt_format: Annotated[
        str | None, typer.Option(help="native: the model's own tools; rlla: ToolRL's text prompt.")
    ] = None,
    thinking: Annotated[str | None, typer.Option(help="on, off, or auto for the template's own way.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="What computes a checkpoint: in_process, a server (transformers, vllm), or auto.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the files of API-Bank and MMLU-Pro.")] = None,
    preset: Annotated[
        str, typer.Option(help="Pipeline preset or YAML file whose evaluation settings these options change.")
    ] = "quick",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Evaluates one checkpoint, or the model behind an endpoint; what OUT holds already is not made again."""
    from evaluation.checks import check_evaluation
    from flows.parameters import read_pipeline
    from flows.preflight import check_file, check_out

    asked = _endpoint(checkpoint, endpoint, model, endpoint_preset)
    if instances:
        check_file(instances, "folder of instances")
    check_out(out)
    base = read_pipeline(preset).evaluation
    changes = {
        "splits": tuple(split) if split else None,
        "benchmarks": tuple(benchmark) if benchmark else None,
        "prompt_format": prompt_format,
        "thinking": thinking,
        "engine": engine,
        "benchmark_data": data,
    }
    given = {key: value for key, value in changes.items() if value is not None}
    settings = type(base).read({**base.model_dump(), **given}, "awpo evaluate")
    if asked is None:
        _check_checkpoint(str(checkpoint))
    check_evaluation(settings, instances, asked, splits=split or ())
    name = asked.model if asked else str(checkpoint)
    with flow_session(verbose):
        from flows.evaluate import evaluate as flow

        result = flow(name, str(instances) if instances else None, str(out), settings, endpoint=asked)
    if as_json:
        print_json({"run_id": result["run_id"], "scores": result["scores"], "out": result["out"]})
        return
    columns = ["benchmark", "split", "mode", "group", "accuracy", "low", "high", "items", "missing"]
    if any(row.get("no_room") for row in result["scores"]):
        columns.append("no_room")
    _print_table(f"Evaluation of {name}", columns, result["scores"])


@evaluate_app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="Folder of a finished evaluation.")],
    second: Annotated[Path, typer.Argument(help="Folder of another one.")],
    html: Annotated[Path | None, typer.Option(help="Also write the flipped items to this HTML file.")] = None,
    as_json: Json = False,
) -> None:
    """Lists the items that flipped between two evaluations, with both outputs."""
    from evaluation.compare import read_run
    from evaluation.diff import find_flips, write_html

    found = find_flips(read_run(first), read_run(second))
    if html:
        write_html(found, html)
    if as_json:
        print_json(found.to_json())
    else:
        _print_diff(found)


@evaluate_app.command()
def check_golds(
    benchmark: Annotated[str, typer.Option(help="held_out, bfcl_v3, bfcl_v4, api_bank or mmlu_pro.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder of instances (held_out) or of the benchmark's files; none: as usual.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Runs the reference answers of a benchmark through its whole scoring path, and counts the valid ones."""
    from awpo.config import EvaluationConfig
    from evaluation.benchmarks import get_benchmark
    from evaluation.checks import check_data
    from evaluation.golds import gold_report
    from flows.preflight import check_file

    chosen = get_benchmark(benchmark)
    if data and benchmark == "held_out":
        check_file(data, "folder of instances")
    elif data:
        check_data(data, [benchmark])
    with progress_shown():
        from tasks.progress import open_line

        line = open_line(f"reference answers of {benchmark}")
        verdicts = []
        for verdict in chosen.gold_verdicts(data, EvaluationConfig()):
            verdicts.append(verdict)
            line.update(len(verdicts), 0, "items")
        line.end("done")
    report = gold_report(benchmark, verdicts)
    if as_json:
        print_json(report)
        return
    rows = [{"split": name, **counts} for name, counts in report["splits"].items()]
    rows.append({"split": "all", "items": report["items"], "valid": report["valid"]})
    _print_table(f"Reference answers of {benchmark}", ("split", "items", "valid"), rows)
    for failed in report["failed"]:
        typer.echo(f"{failed['id']}: {failed['reason']}")


def _endpoint(checkpoint: str | None, url: str | None, model: str | None, preset: str | None) -> EndpointConfig | None:
    """The endpoint that the options name; None where they name a checkpoint. Raises UserError for both or neither."""
    from awpo.config import EndpointConfig
    from awpo.endpoint_presets import read_endpoint

    if sum(value is not None for value in (checkpoint, url, preset)) != 1:
        raise UserError(
            "give one of CHECKPOINT, --endpoint with --model, and --endpoint-preset; see `awpo evaluate run --help`"
        )
    if checkpoint is not None:
        if model is not None:
            raise UserError("--model is the name to ask an endpoint for; it goes with --endpoint or --endpoint-preset")
        return None
    if preset is not None:
        found = read_endpoint(preset)
        return found.model_copy(update={"model": model}) if model else found
    if model is None:
        raise UserError("--endpoint needs --model, the name to ask it for")
    return EndpointConfig.read({"base_url": url, "model": model}, "awpo evaluate")


def _check_checkpoint(name: str) -> None:
    """Raises UserError for what is certainly no checkpoint, before any store or server is opened."""
    if not name.startswith("models:/"):
        from awpo.models import resolve_model
        from tasks.layout import checkpoint_of

        resolve_model(str(checkpoint_of(Path(name))))


def _print_diff(found: Diff) -> None:
    columns = ("part", "compared", "fixed", "broken", "unanswered", "only_first", "only_second")
    _print_table(f"{found.second} against {found.first}", columns, found.counts())
    for flip in found.flips:
        item = flip.first
        typer.echo(f"\n{flip.change}  {item.benchmark}/{item.split}  {item.item_id}")
        if not flip.same_question:
            typer.echo("  the two were asked different questions")
        for side, told in (("first", flip.first), ("second", flip.second)):
            verdict = "right" if told.correct else "wrong"
            why = f" ({told.detail})" if told.detail else ""
            text = (
                told.completion if len(told.completion) <= LONGEST_OUTPUT else told.completion[:LONGEST_OUTPUT] + " ..."
            )
            typer.echo(f"  {side}, {verdict}{why}:")
            typer.echo("\n".join(f"    {line}" for line in (text or "(nothing)").splitlines()))


def _print_table(title: str, columns: Sequence[str], rows: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from flows.screen import plain_table, print_whole

    print_whole(Console(), plain_table(title, columns, [[row.get(name, "") for name in columns] for row in rows]))
