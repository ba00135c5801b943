"""What TRL is told of vLLM, and what this machine or interpreter cannot have: refused before anything is loaded."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from awpo.config_rollouts import RolloutSettings
from awpo.config_training import PolicyConfig
from awpo.errors import UserError
from awpo.serving.vllm import VARIABLE, vllm_python

TRL_WANTS = ("0.22.0", "0.31.0")
"""The versions of vLLM that TRL's own path takes, both included."""


def vllm_arguments(config: PolicyConfig) -> dict[str, Any]:
    """The arguments of GRPOConfig for vLLM, beside whether TRL starts it: how it corrects, and of TRL's own engine."""
    rollouts = config.rollouts
    if rollouts.engine == "trainer":
        return {}
    found: dict[str, Any] = {
        "vllm_importance_sampling_mode": rollouts.correction,
        "vllm_importance_sampling_clip_max": rollouts.correction_limit,
        "vllm_importance_sampling_clip_min": None,
    }
    if not torch.cuda.is_available():
        return found
    if rollouts.engine == "vllm_server":
        return found | {"vllm_mode": "server", "vllm_server_base_url": rollouts.url}
    return found | {
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": rollouts.gpu_memory_utilization,
        "vllm_tensor_parallel_size": rollouts.tensor_parallel,
        "vllm_max_model_length": config.max_prompt_length + config.max_completion_length,
        "vllm_enable_sleep_mode": rollouts.sleep,
        "vllm_model_impl": "vllm",
    }


def check_rollouts(rollouts: RolloutSettings, processes: int, python: str | None = None) -> None:
    """Raises UserError where this machine, or the interpreter `python` (None: this one), cannot have the rollouts that
    are asked for."""
    if rollouts.engine == "trainer":
        return
    if not torch.cuda.is_available():
        if rollouts.engine == "vllm_colocate":
            raise UserError("policy.rollouts: vllm_colocate needs GPUs, and there is none; set engine: vllm_server")
        if rollouts.url is None:
            vllm_python()
        return
    if rollouts.engine == "vllm_server" and rollouts.url is None:
        raise UserError(
            "policy.rollouts: on GPUs a vLLM server is started apart, on GPUs of its own (docs/training.md); give its "
            "url, or set engine: vllm_colocate"
        )
    if processes % rollouts.tensor_parallel:
        raise UserError(
            f"policy.rollouts: {processes} processes cannot share vLLMs of tensor_parallel = {rollouts.tensor_parallel} "
            f"GPUs; choose a divisor of {processes}"
        )
    check_version(python)


def check_version(python: str | None = None) -> None:
    """Raises UserError where the interpreter `python` (None: this one) has no vLLM, or one that TRL does not take."""
    least, most = TRL_WANTS
    hint = (
        f"TRL takes vLLM {least} to {most}; name a Python that has one as the launch preset's `interpreter`, or by "
        f"{VARIABLE} where rollouts are by vllm_colocate"
    )
    trains = f"the Python that trains ({python})" if python else "the Python that trains"
    found = _version_in(python) if python else _version_here()
    if found is None:
        raise UserError(f"policy.rollouts: {trains} has no vLLM; {hint}")
    if not _numbers(least) <= _numbers(found) <= _numbers(most):
        raise UserError(f"policy.rollouts: {trains} has vLLM {found}; {hint}")


def _version_here() -> str | None:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def _version_in(python: str) -> str | None:
    """That of another interpreter, which is not asked to import it: that takes long."""
    code = "from importlib.metadata import version; print(version('vllm'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"policy.rollouts: {python} cannot be run ({error.strerror})") from None
    return done.stdout.strip() if done.returncode == 0 else None


def _numbers(told: str) -> tuple[int, ...]:
    """Major, minor and patch of a version, whatever is behind them."""
    return tuple(int(number) for number in re.findall(r"\d+", told)[:3])
