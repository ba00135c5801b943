"""DeepSpeed's extension for messages between processes on CPUs, compiled once, before it is used (a minute).

    python -m awpo.extension

DeepSpeed compiles it where it is first used. torch marks that by a file named `lock`, and waits for ever for one that a
killed process left. So it is compiled here, into a folder of this environment's own, by one process at a time, which
holds that folder: whoever holds it knows that a mark it finds is left over.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = "TORCH_EXTENSIONS_DIR"
"""The variable that torch reads."""


def compile_extension(*, needed: bool = True) -> None:
    """Lets this process, and those that it starts, find the extension; it is compiled where it is `needed`.

    Without `needed` only the folder of extensions is chosen: what `TORCH_EXTENSIONS_DIR` says, or one in the folder of
    this Python's environment. Raises what compiling ends with.
    """
    os.environ.setdefault(FOLDER, str(Path(sys.prefix) / "torch_extensions"))
    # ninja is a program of this environment, which need not be the one that is activated.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if not needed:
        return
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    with _held(folder):
        for mark in folder.glob("*/lock"):
            print(f"{mark} was left by a process that was killed; removed", file=sys.stderr, flush=True)
            mark.unlink()
        os.environ["DS_ACCELERATOR"] = "cpu"
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        ShareMemCommBuilder().load(verbose=False)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Waits until no other process holds the folder; what holds it goes with the process, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    compile_extension()
