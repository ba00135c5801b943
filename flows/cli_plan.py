"""The command `awpo plan`: memory, tokens and hours of a training before it is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli_support import Json, Model, print_json

if TYPE_CHECKING:
    from awpo.training.plan import Plan

PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimiser": "AdamW: states, masters, temporary",
    "reference": "reference model (KL)",
    "gathered": "gathered or copied weights",
    "buckets": "buckets of gradients",
    "activations": "activations of the layers",
    "vocabulary": "output head and its gradient",
    "rollouts": "rollouts: caches, vLLM",
    "overhead": "CUDA, NCCL (assumed)",
}


def plan(
    gpus: Annotated[str, typer.Option(help="GPUs, as number x GiB of each: 8x80.")],
    preset: Annotated[str, typer.Option(help="Preset of infra/presets/pipelines, or a YAML file.")] = "quick",
    model: Model = None,
    method: Annotated[str | None, typer.Option(help="Method to train by; none: the preset's last.")] = None,
    launch: Annotated[
        str | None, typer.Option(help="Processes that train: a preset, such as zero3-8, or a file.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="Speed of each GPU: a100, h100 or h200.")] = "h100",
    mfu: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Share of the GPU's peak that passes reach; none: 0.35.")
    ] = None,
    decoding: Annotated[
        float | None,
        typer.Option(min=0.01, max=1, help="Share of the GPU's bandwidth that decoding reaches; none: 0.4, or 0.1."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Computes what policy training takes: memory of each GPU, tokens, hours. Exit code 2 where it can't fit.

    Settings are those of the model's preset, or of a pipeline of your own. Nothing is launched and no GPU is needed.
    """
    from awpo.training.plan_search import proposals

    asked = _asked(gpus, preset, model, method, launch, _throughput(gpu, mfu, decoding))
    instead = [] if asked.fits else proposals(asked)
    if as_json:
        found = [{"changes": other.changes(asked), **other.to_json()} for other in instead]
        print_json({**asked.to_json(), "gpu": gpu, "model": model, "method": asked.method.name, "proposals": found})
    else:
        _show(asked, gpu)
    if asked.fits:
        return
    for obstacle in asked.obstacles:
        typer.echo(f"does not fit: {obstacle}", err=True)
    for other in instead:
        peak = f"{_gib(other.memory.peak)} GiB"
        if other.memory.host:
            peak += f" (and {_gib(other.memory.host)} GiB of host memory)"
        typer.echo(f"would fit, with a peak of {peak}: {'; '.join(other.changes(asked))}", err=True)
    if not instead:
        typer.echo("nothing that was tried fits, on up to 1024 such GPUs; shorten prompts, or train adapters", err=True)
    raise typer.Exit(2)


def _throughput(gpu: str, mfu: float | None, decoding: float | None) -> Any:
    from dataclasses import replace

    from awpo.errors import UserError
    from awpo.training.plan import GPUS

    if gpu.lower() not in GPUS:
        raise UserError(f"no numbers of a GPU {gpu!r}; known: {', '.join(GPUS)}")
    found = GPUS[gpu.lower()]
    changes = {name: value for name, value in (("mfu", mfu), ("decoding", decoding)) if value is not None}
    return replace(found, **changes)


def _asked(gpus: str, preset: str, model: str | None, method: str | None, launch: str | None, throughput: Any) -> Plan:
    """The plan of a pipeline's settings, changed by the options. Raises UserError."""
    from pydantic import ValidationError

    from awpo.errors import UserError
    from awpo.launch import DEFAULT, read_launch
    from awpo.methods import get_method
    from awpo.models import resolve_model
    from awpo.training.memory import sharding_of
    from awpo.training.model_shapes import shape_of
    from awpo.training.plan import Gpus, Plan, spread
    from flows.cli_support import changed
    from flows.parameters import POLICY_METHODS, read_pipeline

    there = Gpus.read(gpus)
    if method and not get_method(method).trains:
        raise UserError(
            f"the plan is of policy training, and {method!r} is none; give one of {', '.join(POLICY_METHODS)}"
        )
    options = {"model": model, "launch": launch, "methods": (method,) if method else None}
    settings = changed(read_pipeline(preset), options, {}, settings_of_model=True)
    name = settings.methods[-1]
    try:
        config = settings.policy.with_method(name, settings.seed)
    except ValidationError as error:
        raise UserError(f"policy: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    started = read_launch(settings.launch)
    if launch is None and settings.launch != DEFAULT:  # the way the preset shares the model, on the GPUs that there are
        started = spread(started, there.count)
    shape = shape_of(resolve_model(settings.model))
    return Plan(shape, config, get_method(name), started, sharding_of(started), there, throughput)


def _gib(size: float) -> str:
    return _rounded(size / 2**30)


def _rounded(value: float) -> str:
    """One decimal, or what a small model has of a number."""
    return f"{value:,.1f}" if value >= 0.05 or value == 0 else f"{value:.2g}"


def _show(asked: Plan, gpu: str) -> None:
    from rich.console import Console

    from awpo.training.plan import launch_name
    from flows.screen import plain_table, text_table

    console = Console(highlight=False)
    moments = asked.memory.moments
    rows = [
        [label, *(_gib(getattr(parts, part)) for parts in moments.values())]
        for part, label in PARTS.items()
        if any(getattr(parts, part) for parts in moments.values())
    ]
    rows.append(["total", *(_gib(parts.total) for parts in moments.values())])
    title = f"GiB of each GPU, {_gib(asked.usable)} of {asked.gpus.gib:g} to plan with"
    console.print(plain_table(title, ("part", *moments), rows))
    console.print(text_table("Training", ("", ""), _facts(asked, launch_name(asked.launch))))
    console.print(text_table("Estimate, not measured", ("", ""), _estimate(asked, gpu)))


def _facts(asked: Plan, launch: str) -> list[tuple[str, str]]:
    config = asked.config
    facts = [
        ("parameters", f"{asked.shape.parameters:,}"),
        ("launch", f"{launch}; {asked.processes} of {asked.gpus.count} GPUs"),
        ("micro-batch", f"{asked.micro_batch} rollouts per GPU"),
        ("rollouts by", config.rollouts.engine),
        ("optimiser steps", f"{config.steps} ({asked.rollout_batches:g} rollout batches)"),
        ("rollouts", f"{asked.rollouts:,.0f} ({config.prompts_per_rollout} prompts x {config.group_size} a batch)"),
    ]
    if asked.memory.host:
        facts.insert(4, ("host memory", f"{_gib(asked.memory.host)} GiB for what is offloaded, all processes"))
    if config.rollouts.engine == "vllm_colocate":
        settings = config.rollouts
        share = f"share {settings.gpu_memory_utilization:g} of each GPU, tensor parallel {settings.tensor_parallel}"
        facts.insert(4, ("vLLM", f"{share}, room for {max(0, asked.requests):.0f} rollouts at once"))
    return facts


def _estimate(asked: Plan, gpu: str) -> list[tuple[str, str]]:
    rows = []
    for name, amount in (("at most", asked.most), ("expected", asked.expected)):
        hours = asked.hours(amount)
        tokens = f"{_rounded(amount.generated / 1e6)}M generated, {_rounded(amount.trained / 1e6)}M trained on"
        each = f"prompts of {amount.prompt:g} and completions of {amount.completion:g}"
        rows.append((f"tokens {name}", f"{tokens} ({each})"))
        parts = ", ".join(f"{_rounded(value)} {part}" for part, value in hours.items())
        rows.append(
            (f"hours {name}", f"{_rounded(sum(hours.values()))} ({parts}); without judge, saving, evaluation, offload")
        )
    speed = asked.throughput
    share = speed.decoding_share(asked.config.rollouts.engine)
    assumed = f"{gpu}: {speed.tflops:g} TFLOP/s x mfu {speed.mfu:g}, {speed.bandwidth:g} TB/s x decoding {share:g}"
    return [*rows, ("assumed", assumed)]
