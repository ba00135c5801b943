"""The task that makes a starting model at hand: built, converted, or found where it lies."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from awpo.models import ModelChoice, resolve_model
from awpo.settings import Settings
from tasks.layout import runs_root
from tasks.stage_run import Work, stage_run
from tasks.tracking_store import Tracking


class ModelSettings(Settings):
    """What an embedded model is built by."""

    size: str
    seed: int


@task(name="model", task_run_name="build model {model} · seed {seed}", cache_policy=NO_CACHE)
def build_model(model: str, instances: Path, out: Path, seed: int, tracking: Tracking) -> str:
    """Makes the starting model at hand; returns its folder, or the hub id and revision of one that is loaded by id.

    Raises UserError for an unknown name.
    """
    choice = resolve_model(model)
    if choice.kind in ("folder", "hub"):
        return choice.address
    if choice.kind == "smollm2":  # converted, not drawn: the same for every seed and data, so kept once
        out = runs_root() / "models" / choice.name
    title = f"build model {choice.name} · seed {seed}"
    settings = ModelSettings(size=choice.location, seed=seed)
    inputs = {"instances": instances} if choice.kind == "embedded" else {}
    work = Work("model", title, out, inputs, settings, {"model": choice.name, "seed": seed, "method": "base"})
    with stage_run(work, tracking) as stage:
        _build(choice, instances, out, seed, stage.progress)
        if not stage.already_told:
            stage.run.checkpoint(f"{choice.name}-base", out, work.labels)
    return str(out)


def _build(choice: ModelChoice, instances: Path, out: Path, seed: int, progress: object) -> None:
    if choice.kind == "smollm2":
        from awpo.embedded.smollm2 import build_smollm2

        build_smollm2(out)
    else:
        from awpo.embedded.model import build_model as build

        build(choice.location, instances, out, seed=seed, progress=progress)  # type: ignore[arg-type]
