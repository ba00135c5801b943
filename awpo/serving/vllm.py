"""A checkpoint served by vLLM: `python -m awpo.serving.vllm LOCATION [-- ARGUMENTS OF VLLM]`.

vLLM for CPUs asks for other versions of what the project uses (CONTRIBUTING.md), so that it runs with the interpreter
that the environment variable AWPO_VLLM_PYTHON names, or that of the checkout's `.venv-vllm` (`make install-vllm`), or
with this one where it has vLLM.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from awpo.errors import UserError
from awpo.launch import LaunchSettings
from awpo.processes import StageFailed
from awpo.serving.server import listening_socket, servable, serve_from_arguments, shown_address

VARIABLE = "AWPO_VLLM_PYTHON"
START_SECONDS = 600.0


def vllm_python() -> Path:
    """The interpreter of vLLM's environment. Raises UserError where there is none."""
    told = os.environ.get(VARIABLE)
    path = Path(told) if told else Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
    if path.is_file():
        return path
    if not told and importlib.util.find_spec("vllm"):
        return Path(sys.executable)
    hint = f"set {VARIABLE} to the Python of an environment that has it" + ("" if told else ", or make install-vllm")
    raise UserError(f"vLLM is not installed: there is no {path}; {hint}")


def launch_for(engine: str, launch: LaunchSettings) -> LaunchSettings:
    """The launch of policy training whose rollouts `engine` samples: by vLLM's Python where vLLM runs in the training
    processes, unless the launch names another, or there is none."""
    if engine == "vllm_colocate" and not launch.interpreter:
        with suppress(UserError):  # training says what it lacks, unless its result is there already
            return launch.model_copy(update={"interpreter": str(vllm_python())})
    return launch


def engine_at_hand(other: str = "transformers") -> str:
    """What `auto` is on this machine: vllm where there is a Python that has it, for a GPU or for CPUs, else `other`."""
    try:
        vllm_python()
    except UserError:
        if os.environ.get(VARIABLE):  # it was meant to be there
            raise
        return other
    return "vllm"


def serve_model(
    location: str,
    *,
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[str, str], None] = lambda url, name: None,
    further: Sequence[str] = (),
) -> None:
    """Serves a model until SIGTERM or SIGINT; as `awpo.serving.server.serve_model`. `further` are arguments for vLLM.

    Raises UserError where vLLM, the model or the port cannot be had, StageFailed where vLLM ends by itself.
    """
    choice = servable(location)
    name = name or (Path(location).resolve().name if Path(location).is_dir() else location)
    with listening_socket(host, port) as probe:  # a free port, told to vLLM once it is closed again
        port = probe.getsockname()[1]
    command = [str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", choice.location]
    command += ["--served-model-name", name, "--host", host, "--port", str(port)]
    command += ["--revision", choice.revision] if choice.revision else []
    if _is_float32(Path(choice.location)):  # vLLM would round it to 16 bits
        command += ["--dtype", "float32"]
    command += further
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # PYTHONSAFEPATH: else a folder here of a package's name (z3 was seen) is imported in its place.
    environment |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONSAFEPATH": "1"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; without a GPU it would take half of the memory
    # By itself vLLM binds its threads to cores, each server to the same ones, whoever else computes there.
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    url = f"http://{shown_address(host)}:{port}"
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    def stop(*_: object) -> None:
        process.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    _wait(process, url)
    if process.poll() is None:
        ready(f"{url}/v1", name)
    code = process.wait()
    if code not in (0, -signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM):
        raise StageFailed(f"vLLM ended with code {code}; its last lines say why")


def _is_float32(folder: Path) -> bool:
    """Whether a checkpoint's config.json says so."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("dtype", config.get("torch_dtype")) == "float32"


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None:
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            if response.status == 200:
                return
        if time.monotonic() > deadline:
            process.kill()
            raise StageFailed(f"vLLM gave no answer within {START_SECONDS:.0f} s; its last lines say why")
        time.sleep(0.2)


if __name__ == "__main__":
    serve_from_arguments(serve_model, __doc__, further=True)
