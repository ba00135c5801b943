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

from awpo.data.hub import HubSource, fetch_files
from awpo.errors import UserError
from awpo.files import file_hash, write_atomically

SETTING = "benchmark_data"
VARIABLES = ("AWPO_BENCHMARK_DATA", "AWPO_SHARED_DATA")
_RAW = "https://raw.githubusercontent.com"
_SECONDS = 60.0
_KNOCK_SECONDS = 10.0


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
    return _download(pinned, setting)


def find_any(names: Sequence[str], setting: Path | None = None) -> Path | None:
    """The first file of these names, folder by folder; None where no folder has one. Its bytes are not checked."""
    places = (folder / name for folder in folders(setting) for name in names)
    return next((path for path in places if path.is_file()), None)


def find_on_hub(source: HubSource, file: str, setting: Path | None, name: str) -> Path:
    """A file of a set on the hub, from the library's cache or fetched; UserError says what to do where neither.

    `file` is its place in the set's repository, `name` that below a data folder; `source` names the split that consists
    of it.
    """
    from huggingface_hub import try_to_load_from_cache

    known = try_to_load_from_cache(source.name, file, revision=source.revision, repo_type="dataset")
    if isinstance(known, str):
        return Path(known)
    try:
        _knock(source)
        return fetch_files(source)[0]
    except UserError as error:
        raise UserError(f"{error}; {_where_to_put(name, setting)}") from None


def _knock(source: HubSource) -> None:
    """Asks the hub for the set once. The libraries would ask six times in 24 seconds before they say that it is away."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(source.name, revision=source.revision, timeout=_KNOCK_SECONDS)
    except HfHubHTTPError:  # it answered; `fetch_files` says what its answer means
        return
    except (OSError, httpx2.HTTPError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{source} is not on this machine and cannot be fetched ({reason:.160})") from None


def check_folder(folder: Path, benchmark: str, files: Sequence[str]) -> None:
    """Raises UserError where a folder that somebody named for a benchmark's files has none of them."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; name one that holds {benchmark}'s files")
    if not any((folder / name).is_file() for name in files):
        raise UserError(f"{folder} holds none of the files that {benchmark} looks for there: {', '.join(files)}")


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


def _download(pinned: PinnedFile, setting: Path | None) -> Path:
    try:
        with urllib.request.urlopen(pinned.url, timeout=_SECONDS) as response:
            content = response.read()
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"{pinned.name} is not on this machine and cannot be fetched from {pinned.url} ({reason!s:.100}); "
            f"{_where_to_put(pinned.name, setting)}"
        ) from None
    if (found := hashlib.sha256(content).hexdigest()) != pinned.sha256:
        raise UserError(
            f"{pinned.url} gave other bytes than those pinned (SHA-256 {found[:12]}.., not {pinned.sha256[:12]}..); "
            "a proxy may have answered in its place"
        )
    path = cache_folder() / pinned.name
    write_atomically(path, content)
    return path


def _where_to_put(name: str, setting: Path | None) -> str:
    place = setting or f"a folder that {SETTING} or {VARIABLES[0]} names"
    return f"go online once, or put {name} into {place}"
