"""What is checked before a command begins, so that bad input leaves nothing half written."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from awpo.artifacts import IN_PROGRESS, MANIFEST, is_worker_file
from awpo.config_training import PolicySettings
from awpo.errors import UserError
from awpo.launch import read_launch
from tasks.devices import check_machine
from tasks.layout import runs_root

GIGABYTE = 1e9
# A pipeline's checkpoints, resume states and stores stay below this for the embedded models.
NEEDED_DISK = 1.0


def nearest_existing(path: Path) -> Path:
    """`path`, or the closest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def check_writable(out: Path, option: str = "--out") -> None:
    """Raises UserError where `out` cannot become a folder with files in it; `option` is how to choose another.

    Leaves nothing behind.
    """
    place = nearest_existing(out)
    if not place.is_dir():
        raise UserError(f"cannot write to {out}: {place} is a file; choose another folder with {option}")
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write to {out}: {error.strerror}; choose a folder you may write to with {option}"
        ) from None


def check_disk(out: Path, needed: float = NEEDED_DISK) -> None:
    """Raises UserError where less than `needed` gigabytes are free where `out` lies."""
    place = nearest_existing(out)
    free = shutil.disk_usage(place).free / GIGABYTE
    if free < needed:
        raise UserError(
            f"only {free:.1f} GB free in {place}, about {needed:.1f} GB are needed; free some, or choose another disk with --out"
        )


def check_file(path: Path, what: str) -> None:
    """Raises UserError where there is no such file or folder, or none that may be looked at."""
    try:
        there = path.exists()
    except OSError as error:  # a folder above it that may not be entered, a name that is too long
        raise UserError(f"cannot read {what} {path!s:.200}: {error.strerror}; check the path") from None
    if not there:
        raise UserError(f"{what} {path} does not exist; check the path")


def check_source(path: Path, format: str) -> None:
    """Raises UserError where a source is missing or in no known format; reads its first rows at most.

    Of a set on the hub the files are fetched for that.
    """
    from awpo.data.hub import is_hub

    if not is_hub(path):
        check_file(path, "source")
    from awpo.data.sources import detect, get_source

    if format == "auto":
        detect(path)
    else:
        get_source(format)


def check_own(out: Path) -> None:
    """Raises UserError where `out` is a folder with files that no command of this project left there.

    Hidden files alone, such as a .gitkeep, are no hindrance.
    """
    if not out.is_dir() or out.absolute() == runs_root():
        return
    names = sorted(path.name for path in out.iterdir())
    visible = [name for name in names if not name.startswith(".") and not is_worker_file(name)]
    if not visible or any(_is_mark(out / name) for name in names):
        return
    raise UserError(
        f"{out} holds files that are no result of this project ({visible[0]}); choose a new or empty folder with --out"
    )


def _is_mark(path: Path) -> bool:
    """Whether a file of that name tells that its folder is ours: a stage's, a flow's, or what `awpo study` writes."""
    if path.name == MANIFEST:
        try:
            return {"stage", "fingerprint"} <= json.loads(path.read_text("utf-8")).keys()
        except (OSError, ValueError, AttributeError):
            return False  # a manifest of something else: web pages and packages have one, too
    if path.name.startswith(".") and path.name.endswith(".mlflow.json"):
        return True
    return path.name in (IN_PROGRESS, "cells.csv", "study.json")


def check_launch(launch: str, policy: PolicySettings, out: Path) -> None:
    """Raises UserError where `out` is to become a new result and this machine can't train so, by that launch preset:
    its processes, and rollouts by vLLM, which would be refused after fine-tuning only.

    What is in an older one may need no training any more.
    """
    if out.is_dir() and any(out.iterdir()):
        return
    settings, rollouts = read_launch(launch), policy.rollouts
    check_machine(settings)
    # Of a Python of its own nothing is known before it runs; asking torch costs seconds.
    if rollouts.engine != "trainer" and not settings.interpreter:
        import torch

        from awpo.serving.vllm import launch_for
        from awpo.training.vllm_arguments import check_rollouts
        from awpo.training.vllm_server import VllmClient

        python = launch_for(rollouts.engine, settings).interpreter if torch.cuda.is_available() else None
        check_rollouts(rollouts, settings.processes, python)
        if rollouts.url and not torch.cuda.is_available():  # on GPUs it is TRL that asks it, in a way of its own
            server = VllmClient(rollouts.url)
            try:
                server.check(policy.max_prompt_length + policy.max_completion_length)
            finally:
                server.close()


def check_out(out: Path, needed: float = NEEDED_DISK) -> None:
    """All of it: writable, nobody else's, and disk enough."""
    check_writable(out)
    check_own(out)
    check_disk(out, needed)
