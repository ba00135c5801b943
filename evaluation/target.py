"""What is evaluated, and whether a result of it is whole; for those who start evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from awpo.artifacts import IN_PROGRESS, MANIFEST, input_identity, read_manifest
from awpo.config import EndpointConfig, EvaluationConfig
from awpo.errors import UserError
from awpo.files import write_atomically
from awpo.serving.vllm import engine_at_hand
from awpo.types import content_hash
from evaluation.benchmarks import identities

STAGE = "evaluation"

Target = Path | EndpointConfig
"""A checkpoint's folder, or an endpoint."""


def evaluation_identity(
    target: Target, instances: Path | None, config: EvaluationConfig
) -> tuple[dict[str, str], dict[str, Any]]:
    """What an evaluation depends on: inputs, and settings. `instances` count where a benchmark is made of them.

    Raises UserError where an input does not exist, or a benchmark's package or data is missing.
    """
    config = with_engine(config)
    if isinstance(target, EndpointConfig):
        inputs = {"endpoint": endpoint_identity(target)}
    else:
        inputs = {"checkpoint": input_identity(target)}
    if "held_out" in config.benchmarks:
        inputs["instances"] = input_identity(needed(instances))
    return {**inputs, **identities(config)}, config.identity()


def with_engine(config: EvaluationConfig) -> EvaluationConfig:
    """The config with the engine that `auto` is on this machine: no two engines round alike, so a result is known by
    the one that made it. Raises UserError where AWPO_VLLM_PYTHON names no Python."""
    if config.engine != "auto":
        return config
    return config.model_copy(update={"engine": engine_at_hand("in_process")})


def needed(instances: Path | None) -> Path:
    """The folder of instances, or UserError where none is given."""
    if instances is None:
        raise UserError("the benchmark held_out needs 'instances': the folder that the stage decompose wrote")
    return instances


def endpoint_identity(config: EndpointConfig) -> str:
    """A model behind an endpoint: its name, its host, the further fields of every request."""
    host = urlsplit(config.base_url).hostname or ""
    return f"{config.model} at {host}" + (f", options {content_hash(config.options)}" if config.options else "")


def take_up_again(out: Path) -> bool:
    """Makes a finished result that lacks answers unfinished work, so that the stage asks for those; whether it was one."""
    manifest = read_manifest(out)
    if not manifest or manifest.stage != STAGE or not manifest.counts.get("missing"):
        return False
    write_atomically(out / IN_PROGRESS, manifest.fingerprint)
    (out / MANIFEST).unlink()
    return True
