"""A disk that is really small: a file system in memory, filled up and emptied by tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 2**20


class SmallDisk:
    """A mounted file system."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._ballast = folder, folder / "ballast"

    def fill(self, leave: int = 0) -> None:
        """Until only about `leave` bytes are free."""
        with open(self._ballast, "ab", buffering=0) as file:
            while (free := self.free()) > leave:
                try:
                    file.write(bytes(min(free - leave, 2**16)))
                except OSError:
                    return

    def free(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def make_room(self) -> None:
        self._ballast.unlink()


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[SmallDisk]:
    """A file system of `size` bytes at `folder`; the test is skipped where none may be mounted."""
    folder.mkdir()
    made = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(made, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system is mounted for this, which needs root and the right to mount")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
