"""How a training is started: in how many processes, by which launcher, with which Python.

The presets of `infra/presets/launch` have names; a YAML file of one's own does as well. One process is started as it
is; several by torchrun, or by `accelerate launch` where a config of accelerate says how they share the model. (On CPUs
by torchrun alone: `accelerate launch --cpu --num_processes 2` started one process.)
"""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from awpo.errors import UserError
from awpo.machines import MACHINES, machines_given, meeting_point
from awpo.settings import Settings, preset_path, read_yaml

ROOT = Path(__file__).resolve().parents[1]
INFRA = ROOT / "infra"
LAUNCHES = INFRA / "presets" / "launch"
ACCELERATE = INFRA / "accelerate"
DEFAULT = "cpu"
# How torchrun is asked to end the others once a process has failed; by itself it would wait 30 s.
SHUTDOWN_SECONDS = 5
# The device of DeepSpeed, and that torch sees no other.
NO_GPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
NO_DEEPSPEED = "the launch preset takes DeepSpeed, which is not there; run `make install-deepspeed`"
# Keys of accelerate's config that say where processes are, and not what comes of their work.
PLACES = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "same_network")


class LaunchSettings(Settings):
    """How the processes of a training are started."""

    processes: int = Field(1, ge=1, le=1024, description="Processes, on each machine")
    machines: int = Field(1, ge=1, le=1024, description=f"Machines; {MACHINES} in the environment says another number")
    accelerate: str | None = Field(
        None,
        min_length=1,
        description="Config of accelerate: a name of infra/accelerate, or a YAML file's path; none: torchrun",
    )
    interpreter: str | None = Field(
        None, min_length=1, description="Python that trains, of an environment of its own; none: the one that runs this"
    )

    device: Literal["auto", "cpu"] = Field(
        "auto", description="auto: a GPU for each process where there are any; cpu: none is used, and gloo speaks"
    )

    @model_validator(mode="after")
    def _there(self) -> Self:
        try:
            config = self.accelerate_config()
        except UserError as error:
            raise ValueError(f"accelerate: {error}") from None
        if config.get("use_cpu") and self.processes > 1:
            raise ValueError(
                f"accelerate = {self.accelerate!r} is of CPUs (use_cpu), where accelerate starts one process and not "
                f"{self.processes}; leave accelerate out, which starts them by torchrun"
            )
        if self.interpreter and not os.access(self.interpreter, os.X_OK):
            raise ValueError(f"interpreter: {self.interpreter} is no program; give the path of a Python")
        return self

    def accelerate_file(self) -> Path | None:
        """The file of accelerate's config; None without one. Raises UserError where it isn't there."""
        if self.accelerate is None:
            return None
        names = sorted(path.stem for path in ACCELERATE.glob("*.yaml"))
        path = ACCELERATE / f"{self.accelerate}.yaml" if self.accelerate in names else Path(self.accelerate)
        if not os.path.isfile(path):  # unlike Path.is_file, also where a name is too long to be one
            near = difflib.get_close_matches(self.accelerate, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}, or a YAML file's path"
            raise UserError(f"no config {self.accelerate!r}; {hint}")
        return path.absolute()

    def accelerate_config(self) -> dict[str, Any]:
        """What accelerate's config holds; empty without one. Raises UserError where it can't be read."""
        path = self.accelerate_file()
        return read_yaml(path) if path else {}

    def effect(self) -> dict[str, Any]:
        """What the result depends on, empty for one process without accelerate.

        Gradients of several processes are sums in another order, so that the last bits are others; where weights are
        in shards, a checkpoint has another form, too.
        """
        config = {key: value for key, value in self.accelerate_config().items() if key not in PLACES}
        several = {"processes": self.total} if self.total > 1 else {}
        return several | ({"accelerate": config} if config else {})

    @property
    def total(self) -> int:
        """Processes of all machines."""
        return self.processes * self.machines

    def command(self, module: str, job_file: Path) -> list[str]:
        """The command line that runs the worker `module` on `job_file` in all processes of this machine.

        `awpo.worker` and `awpo.ranks` end with who started them. Free ports are chosen by the launchers, unless there
        are several machines, which meet where the environment says. Raises UserError where it does not say.
        """
        python = self.interpreter or sys.executable
        worker = ["-m", "awpo.worker", module, str(job_file)]
        if config := self.accelerate_file():
            options = ["--config_file", str(config), "--num_processes", str(self.total)]
            if self.machines > 1:
                here = meeting_point(self.machines)
                options += ["--num_machines", str(self.machines), "--machine_rank", str(here.rank)]
                options += ["--main_process_ip", here.address, "--main_process_port", str(here.port), "--same_network"]
            else:
                options += ["--main_process_port", "0"]
            return [python, "-m", "awpo.ranks", "accelerate", *options, *worker]
        if self.total == 1:
            return [python, *worker]
        options = [f"--nproc-per-node={self.processes}", f"--shutdown-timeout={SHUTDOWN_SECONDS}"]
        if self.machines > 1:
            here = meeting_point(self.machines)
            options += [f"--nnodes={self.machines}", f"--node-rank={here.rank}"]
            options += [f"--master-addr={here.address}", f"--master-port={here.port}"]
        else:
            options += ["--standalone"]
        return [python, "-m", "awpo.ranks", "torchrun", *options, *worker]

    def environment(self, threads: int) -> dict[str, str]:
        """The environment of the processes, with `threads` OpenMP threads for each."""
        found = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        found.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Threads that wait by spinning take the core that the others need: with anything else running on two cores, a
        # step of 0.3 s took 4.7 s.
        found.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if self.device == "cpu":
            found |= NO_GPU
        if self.interpreter and (ROOT / "pyproject.toml").exists():  # its environment need not have this project
            found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), found.get("PYTHONPATH", "")]))
        return found

    def threads_of_each(self, cores: int, asked: int) -> int:
        """OpenMP threads of each process: `asked` of a process that is alone, else all `cores` shared out."""
        return max(1, min(asked, cores) if self.total == 1 else cores // self.processes)


def check_gpus(needed: int, there: int) -> None:
    """Raises UserError where a launch takes more GPUs of this machine than are there."""
    if there < needed:
        raise UserError(
            f"the launch preset takes {needed} GPU{'s' if needed > 1 else ''} of a machine, and this one has {there}; "
            "choose a preset of fewer processes, or cpu or cpu-2"
        )


def launch_presets() -> list[str]:
    """The names of the launch presets, sorted."""
    return sorted(path.stem for path in LAUNCHES.glob("*.yaml"))


def read_launch(name_or_path: str) -> LaunchSettings:
    """A preset by name, or a YAML file by path, for as many machines as the environment says.

    Raises UserError where there is none, or it is wrong, or the environment is.
    """
    path = preset_path(LAUNCHES, name_or_path, "launch preset")
    settings = LaunchSettings.read(read_yaml(path), str(path))
    machines = machines_given()
    return settings if machines is None else settings.model_copy(update={"machines": machines})
