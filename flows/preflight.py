"""What is checked before a command begins, so that bad input leaves nothing half written."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from awpo.errors import UserError

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
    """Raises UserError where there is no such file or folder."""
    if not path.exists():
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


def check_out(out: Path, needed: float = NEEDED_DISK) -> None:
    """Both: writable, and disk enough."""
    check_writable(out)
    check_disk(out, needed)
