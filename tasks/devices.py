"""Which GPUs a piece of work gets: each its own, among all processes of this machine.

A slot of the limit `gpu` says that there is room for one more process, and not on which card: left alone, each would take
the first. A lock on a file for each card, which goes with the process that holds it, says which are taken.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from awpo.errors import UserError
from awpo.launch import NO_DEEPSPEED, LaunchSettings, check_gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices() -> list[str]:
    """The names of the GPUs that this process may use, as CUDA takes them in `CUDA_VISIBLE_DEVICES`; empty on a CPU."""
    told = os.environ.get(VISIBLE)
    if told is None:
        numbers = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
        return sorted((match[1] for match in numbers if match), key=int)
    names = [name.strip() for name in told.split(",")]
    # CUDA sees the devices up to the first that is none.
    return names[: next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))]


def check_machine(launch: LaunchSettings) -> None:
    """Raises UserError where the launch shares a model on more GPUs than this machine has, or by DeepSpeed, not there.

    Of a Python of its own (`interpreter`) nothing is known before it runs.
    """
    config = launch.accelerate_config()
    if not config or launch.interpreter:
        return
    if launch.device != "cpu" and not config.get("use_cpu") and len(visible_devices()) < launch.processes:
        import torch  # sees GPUs without device files, too, as under WSL

        check_gpus(launch.processes, torch.cuda.device_count())
    if config.get("distributed_type") == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        raise UserError(NO_DEEPSPEED)


@contextmanager
def own_devices(count: int) -> Iterator[dict[str, str]]:
    """Holds `count` GPUs while the block runs; yields the environment that shows a process these alone.

    Empty, which shows it all of them, where that many are not free: on a CPU, and where a person let more processes
    compute than there are GPUs, which then share them.
    """
    found: list[str] = []
    with ExitStack() as held:
        for name in visible_devices():
            if len(found) < count and _take(name, held):
                found.append(name)
        if len(found) < count:
            held.close()
        yield {VISIBLE: ",".join(found)} if found and len(found) == count else {}


def _take(name: str, held: ExitStack) -> bool:
    """Locks a device until `held` ends; whether it was free."""
    folder = Path(tempfile.gettempdir()) / f"awpo-devices-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with ExitStack() as mine:
        file = mine.enter_context(open(folder / re.sub(r"[^\w.-]", "_", name), "w", encoding="utf-8"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        held.push(mine.pop_all())
    return True
