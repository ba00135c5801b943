"""Where the files of benchmarks are found, and from where they are fetched.

Looked for in this order: the folder of the setting `benchmark_data`, those that the environment variables
AWPO_BENCHMARK_DATA and AWPO_SHARED_DATA name, the folder shared/data beside the checkout, the cache. What is in none of
them is fetched at a pinned commit, checked, and kept in the cache ($XDG_CACHE_HOME, else ~/.cache, then
awpo/benchmarks).
A file with a pinned hash is refused wherever it lies if its bytes are others: a score is of the benchmark's own items.
"""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from awpo.artifacts import file_hash, write_atomically
from awpo.data.hub import HubSource, fetch_files
from awpo.errors import UserError

SETTING = "benchmark_data"
VARIABLES = ("AWPO_BENCHMARK_DATA", "AWPO_SHARED_DATA")
_RAW = "https://raw.githubusercontent.com"
_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file of a public repository at one commit: `name` is its place below a data folder, `sha256` of its bytes."""

    name: str
    repository: str
    commit: str
    path: str
    sha256: str

    @property
    def url(self) -> str:
        return f"{_RAW}/{self.repository}/{self.commit}/{self.path}"


def find(pinned: PinnedFile, setting: Path | None = None) -> Path:
    """The file on this machine, fetched where it is nowhere yet.

    `setting` is the value of the setting `benchmark_data`. Raises UserError, in one line, where a named folder does not
    exist, the file's bytes are others than those pinned, or it is nowhere and cannot be fetched.
    """
    for folder in (*folders(setting), cache_folder()):
        path = folder / pinned.name
        if path.is_file():
            if file_hash(path) != pinned.sha256:
                raise UserError(
                    f"{path} is not the benchmark's file (its SHA-256 is not {pinned.sha256[:12]}..); "
                    f"remove it, or fetch it anew from {pinned.url}"
                )
            return path
    return _download(pinned)


def find_any(names: Sequence[str], setting: Path | None = None) -> Path | None:
    """The first file of these names, folder by folder; None where no folder has one. Its bytes are not checked."""
    places = (folder / name for folder in folders(setting) for name in names)
    return next((path for path in places if path.is_file()), None)


def find_on_hub(source: HubSource, setting: Path | None = None) -> list[Path]:
    """The files of a set on the hub, from the library's cache or fetched; UserError says what to do where neither."""
    try:
        return fetch_files(source)
    except UserError as error:
        raise UserError(f"{error}; {_where_to_put(setting)}") from None


def folders(setting: Path | None = None) -> Iterator[Path]:
    """The data folders in the order in which they are looked at; UserError where one that is named is missing."""
    if setting is not None:
        if not setting.is_dir():
            raise UserError(f"{SETTING}: there is no folder {setting}; create it, or leave the setting out")
        yield setting
    for variable in VARIABLES:
        if named := os.environ.get(variable):
            if not Path(named).is_dir():
                raise UserError(f"{variable} names {named}, which is no folder; create it, or unset the variable")
            yield Path(named)
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    if beside.is_dir():
        yield beside


def cache_folder() -> Path:
    """Where fetched files are kept; it may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "awpo" / "benchmarks"


def _download(pinned: PinnedFile) -> Path:
    try:
        with urllib.request.urlopen(pinned.url, timeout=_SECONDS) as response:
            content = response.read()
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"{pinned.name} is not on this machine and cannot be fetched from {pinned.url} ({reason!s:.100}); "
            f"{_where_to_put(None)}"
        ) from None
    if (found := hashlib.sha256(content).hexdigest()) != pinned.sha256:
        raise UserError(
            f"{pinned.url} gave other bytes than those pinned (SHA-256 {found[:12]}.., not {pinned.sha256[:12]}..); "
            "a proxy may have answered in its place"
        )
    path = cache_folder() / pinned.name
    write_atomically(path, content)
    return path


def _where_to_put(setting: Path | None) -> str:
    place = setting or f"a folder that {SETTING} or {VARIABLES[0]} names"
    return f"go online once, or put the file under {place}"
