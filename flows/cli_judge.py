"""The commands `awpo judge ...`: what a judge is worth. No server is needed; MLflow is told where it is asked for."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli_support import Commands, Json, print_json, progress_shown

SAMPLED = 500
"""Instances whose prompts an estimate is made from."""

judge_app = typer.Typer(cls=Commands, help="Measures judges of thoughts.", no_args_is_help=True)


@judge_app.callback()
def _judge() -> None:
    """Measures judges of thoughts."""


@judge_app.command()
def evaluate(
    instances: Annotated[Path, typer.Option(help="Folder of instances with rationales.")],
    judge: Annotated[str, typer.Option(help="Preset of infra/presets/judges, or a YAML file.")] = "rubric",
    items: Annotated[int, typer.Option(min=1, help="Instances, drawn by seed.")] = 200,
    split: Annotated[list[str] | None, typer.Option(help="Only of this split; give it again for more.")] = None,
    thoughts: Annotated[
        Path | None, typer.Option(help="The same instances with rationales by another writer: the right thoughts.")
    ] = None,
    reword: Annotated[bool, typer.Option("--reword", help="Put the right thoughts in other words.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the instances and of what is spoilt.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; none: one by the judge's name.")] = None,
    track: Annotated[bool, typer.Option("--track", help="Record the figures as a run in MLflow.")] = False,
    as_json: Json = False,
) -> None:
    """Measures a judge on right and wrong thoughts and actions: can AWPO work with it?"""
    from awpo.endpoint_presets import read_judge
    from flows.preflight import check_file, check_out

    config = read_judge(judge)
    check_file(instances, "folder of instances")
    if thoughts:
        check_file(thoughts, "folder of instances")
    if out is None:
        from tasks.layout import runs_root

        out = runs_root() / "judges" / Path(judge).stem
    check_out(out, needed=0.2)
    from awpo.judge_evaluation import write_evaluation

    with progress_shown():
        from tasks.progress import open_line

        line = open_line(f"judge by {config.label}")
        try:
            summary = write_evaluation(
                instances,
                out,
                config,
                items=items,
                seed=seed,
                splits=tuple(split or ()),
                thoughts_folder=thoughts,
                reword=reword,
                progress=line.update,
            )
        except BaseException:
            line.end("failed")
            raise
        line.end("done")
    if track:
        from tasks.judge import track_evaluation
        from tasks.tracking_store import connect

        track_evaluation(connect(), config, out, summary)
    if as_json:
        print_json({"out": str(out), **summary})
        return
    for text in judge_report(config.label, summary):
        typer.echo(text)
    typer.echo(f"in {out}")


@judge_app.command()
def estimate(
    instances: Annotated[Path, typer.Option(help="Folder of instances with rationales.")],
    thoughts: Annotated[int, typer.Option(min=1, help="Rollouts of a run: rollout batches x prompts x group size.")],
    judge: Annotated[str, typer.Option(help="Preset of infra/presets/judges, or a YAML file.")] = "paper",
    as_json: Json = False,
) -> None:
    """Says what judging a training run will take, before it begins: requests, tokens and, with prices, cost."""
    from awpo.endpoint_presets import read_judge
    from flows.preflight import check_file

    config = read_judge(judge)
    check_file(instances, "folder of instances")
    from awpo.judge_cost import estimate_judgements
    from awpo.judge_evaluation import sampled_instances

    found = estimate_judgements(sampled_instances(instances, SAMPLED, seed=0), config, thoughts)
    if as_json:
        print_json(asdict(found) if found else {"requests": 0})
    elif found is None:
        typer.echo(f"the judge {config.label} asks no model and costs nothing")
    else:
        typer.echo(f"{config.label}: {found}")


def judge_report(label: str, summary: dict[str, Any]) -> list[str]:
    """The figures as lines of at most 80 columns."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    lines = [f"Judge {label}"[:80], f"{'kind':27}{'pairs':>6}{'accuracy (95%)':>18}{'right':>7}{'wrong':>7}{'lift':>8}"]
    for kind in summary["kinds"]:
        interval = "" if kind["accuracy"] is None else f" {kind['low']:.2f}-{kind['high']:.2f}"
        lines.append(
            f"{kind['kind']:27}{kind['pairs']:6}{number(kind['accuracy']) + interval:>18}"
            f"{number(kind['right']):>7}{number(kind['wrong']):>7}"
            + ("" if kind["lift"] is None else f"{kind['lift']:+8.3f}")
        )
    figures = (
        ("accuracy, mean over the kinds", "accuracy"),
        ("length: score and words, one thought padded", "length_padded"),
        ("length: score and words, right thoughts", "length_right"),
        ("judged again: mean difference", "again"),
        ("judged again: pairs in the same order", "again_same"),
        ("tools reversed: mean difference", "order"),
        ("tools reversed: pairs in the same order", "order_same"),
        ("correlation with the outcome, within instances", "outcome_within"),
        ("correlation with the outcome, pooled", "outcome_pooled"),
    )
    lines += ["", *(f"{name:50}{number(summary[key]):>8}" for name, key in figures)]
    lines.append(f"{summary['judged']} thoughts judged, {summary['failed']} failed; seed {summary['seed']}")
    if left_out := summary.get("without_thought"):
        lines.append(f"left out, as the other writer has no thought for them: {left_out} instances")
    if summary["unusable"]:
        lines += ["", "AWPO cannot work with this judge:"]
        for reason in summary["unusable"]:
            lines += textwrap.wrap(reason, 76, initial_indent="- ", subsequent_indent="  ")
        if summary["failed"] and summary["last_error"]:
            lines += textwrap.wrap(f"last: {summary['last_error']}", 78, initial_indent="  ", subsequent_indent="  ")
    else:
        lines += ["", "Nothing in these figures speaks against this judge."]
    if summary["thoughts"] == "the references":
        lines.append("The right thoughts are the references word for word; --reword and --thoughts are")
        lines.append("harder, and closer to what a policy writes.")
    return lines
