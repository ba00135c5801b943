"""Several processes that do one piece of work (ranks 0, 1, ...): started together, and their end told truly.

    python -m awpo.ranks (torchrun OPTIONS | accelerate OPTIONS) -m awpo.worker MODULE JOB.json

Both launchers watch the processes with torch's elastic agent, which ends all when one fails. They put each into a
session of its own and outlive their parent; so they are run in this process, which ends with its parent, and the
processes with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from awpo.errors import UserError
from awpo.events import RunLog
from awpo.extension import compile_extension
from awpo.launch import NO_DEEPSPEED, NO_GPU, check_gpus
from awpo.processes import PARENT, end_with_parent


def torchrun(arguments: list[str]) -> None:
    from torch.distributed import run

    run.run(run.parse_args(arguments))


def accelerate(arguments: list[str]) -> None:
    """Raises UserError where the machine lacks what accelerate's config takes."""
    import torch
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command, launch_command_parser
    from accelerate.utils import DistributedType, is_deepspeed_available

    options = launch_command_parser().parse_args(arguments)
    config, count = load_config_from_file(options.config_file), options.num_processes // (options.num_machines or 1)
    on_cpus = config.use_cpu or os.environ.get("DS_ACCELERATOR") == NO_GPU["DS_ACCELERATOR"]
    if not on_cpus:
        check_gpus(count, torch.cuda.device_count())
    if config.distributed_type == DistributedType.DEEPSPEED and not is_deepspeed_available():
        raise UserError(NO_DEEPSPEED)
    if config.distributed_type == DistributedType.DEEPSPEED:
        compile_extension(needed=on_cpus)
    launch_command(options)


LAUNCHERS: dict[str, Callable[[list[str]], None]] = {"torchrun": torchrun, "accelerate": accelerate}


def main() -> None:
    launcher, *arguments = sys.argv[1:]
    end_with_parent()
    os.environ[PARENT] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        LAUNCHERS[launcher](arguments)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        RunLog(Path(arguments[-1]).parent).event("ranks", codes=codes)
        sys.exit(1)
    except UserError as error:
        RunLog(Path(arguments[-1]).parent).event("error", kind="user", message=str(error))
        sys.exit(2)
    except subprocess.CalledProcessError as error:  # accelerate's way with one process
        sys.exit(error.returncode if error.returncode > 0 else 128 - error.returncode)
    except SignalException as error:
        print(f"asked to end by {signal.Signals(error.sigval).name}", file=sys.stderr)
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()
