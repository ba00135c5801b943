"""The command `awpo bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli_support import Commands, Json, print_json

if TYPE_CHECKING:
    from awpo.training.step_benchmark import Shape

bench_app = typer.Typer(cls=Commands, help="Measures this software against what it is built on.", no_args_is_help=True)


@bench_app.callback()
def bench() -> None:
    """Measures this software against what it is built on."""


@bench_app.command()
def step(
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 1024,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 64,
    group: Annotated[int, typer.Option(help="Answers of a prompt.", min=2)] = 8,
    prompts: Annotated[int, typer.Option(help="Prompts of a step.", min=1)] = 4,
    model: Annotated[str, typer.Option(help="3m or 30m, a Qwen3 of random weights; or a checkpoint's folder.")] = "3m",
    repeats: Annotated[int, typer.Option(help="Steps of each side that are counted.", min=1)] = 5,
    as_json: Json = False,
) -> None:
    """A training step, rollout and update, of stock TRL and of AWPO in turn, on a CPU: minutes, longer for long prompts."""
    from rich.console import Console

    from awpo.training.step_benchmark import Shape, measure

    errors = Console(stderr=True, highlight=False)
    shape = Shape(prompt, answer, group, prompts, model)
    found = measure(shape, repeats, errors.print)
    if as_json:
        print_json(found)
        return
    from flows.screen import text_table

    console = Console(highlight=False)
    console.print(text_table(_title(shape), ("", "stock TRL", "AWPO"), _rows(found)))
    console.print(
        f"stock time / ours: {found['ratio_median']:.2f} ({found['ratio_min']:.2f} to {found['ratio_max']:.2f}); "
        f"log-probabilities differ by at most {found['max_logprob_difference']:.1e}, gradients by "
        f"{found['gradient_difference']:.1e} of their norm"
    )


def _title(shape: Shape) -> str:
    return f"{shape.prompts} prompts of {shape.prompt} tokens, {shape.group} answers of {shape.answer} tokens each"


def _rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    sides = [found[side] for side in ("stock", "ours")]
    lines = [
        ("step, s of processor time", "processor_seconds", 1.0),
        ("of it the rollout", "rollout_seconds", 1.0),
        ("of it the update", "update_seconds", 1.0),
        ("tokens per second", "tokens_per_second", 1.0),
        ("peak memory, MiB", "peak_memory", 2.0**20),
    ]
    return [
        ("micro-batch", str(found["micro_batch_stock"]), str(found["micro_batch_ours"])),
        *((name, *(f"{side[key] / unit:.2f}" for side in sides)) for name, key, unit in lines),
    ]
