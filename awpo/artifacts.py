"""Results that say where they came from: the manifest of a stage's folder.

A stage writes its results into a folder and `manifest.json` last. A folder without a manifest is unfinished
work and is never read as a result; a folder whose manifest names the same inputs, config and stage version
is a result that need not be made again. `.in_progress` marks work that has begun and says which, so that a later
attempt goes on with it, or can tell why it does not.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from awpo import __version__
from awpo.errors import UserError
from awpo.files import file_hash, flush_to_disk, name_meant, write_atomically
from awpo.folder_lock import alone_in
from awpo.full_disk import full_disk
from awpo.types import content_hash
from awpo.unfinished import Mark, differences

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
"""Of the form of manifests; those of before it was written down are of version 1, too."""
IN_PROGRESS = ".in_progress"
PREVIOUS = ".previous"  # an earlier result of the stage, until the new one is finished
# What `awpo.processes` puts into a worker's run folder, which is the stage's: there before the stage is opened, kept
# when it is emptied, no part of the result.
_WORKER_FILES = re.compile(r"job\.json|events\.jsonl|log(\.(rank|machine)-\d+)?\.txt")


def is_worker_file(name: str) -> bool:
    """Whether a file of a run folder is about the worker, and not about its result."""
    return bool(_WORKER_FILES.fullmatch(name))


def _is_kept(name: str) -> bool:
    return name == PREVIOUS or is_worker_file(name_meant(name))


@functools.cache
def code_version() -> str:
    """Package version and, in a git checkout, the commit ('+dirty' when files differ from it)."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return __version__

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False, timeout=20
        ).stdout.strip()

    try:
        commit, dirty = git("rev-parse", "--short=12", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.TimeoutExpired):
        return __version__
    return f"{__version__}+{commit}{'.dirty' if dirty else ''}" if commit else __version__


@dataclass
class Manifest:
    """What a stage did. `inputs` and `outputs` map a name to a SHA-256; for inputs, also to a fingerprint or to the
    settings in force of a method. `seconds` is the time of all `attempts` together."""

    stage: str
    fingerprint: str
    inputs: dict[str, Any]
    config: dict[str, Any]
    code: str
    counts: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    attempts: int = 1

    def begun(self) -> dict[str, Any]:
        """What is known before the work is done, and is the same however often it was interrupted."""
        return {key: getattr(self, key) for key in ("stage", "fingerprint", "inputs", "config", "code")}

    def to_json(self) -> dict[str, Any]:
        # Counts stand at the top level too: `rows_read`, `instances` and the like are what people look for.
        return {**self.counts, "manifest_version": MANIFEST_VERSION, **asdict(self)}


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a finished stage, or None. Raises UserError where the file cannot be understood."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        raw = {"attempts": 1, **json.loads(path.read_text("utf-8"))}
        if raw.get("manifest_version", 1) > MANIFEST_VERSION:
            raise UserError(
                f"{path} was written by a newer version of this project ({str(raw.get('code'))[:60]}); "
                "go on with that version, or give another folder"
            )
        manifest = Manifest(**{name: raw[name] for name in Manifest.__dataclass_fields__})
        if not all(
            isinstance(part, dict) for part in (manifest.inputs, manifest.config, manifest.outputs, manifest.counts)
        ):
            raise TypeError("inputs, config, outputs and counts must be mappings")
        return manifest
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is not a manifest this version can read ({error}); delete {folder} to redo it"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check that it is a file you may read") from None


def finished_result(folder: Path, *fingerprints: str) -> Manifest | None:
    """The manifest of a finished result of exactly this work with all its files there, or None.

    Work has one fingerprint, and perhaps another that earlier versions gave it.
    """
    known = read_manifest(folder)
    if known and known.fingerprint in fingerprints and all((folder / name).is_file() for name in known.outputs):
        return known
    return None


def stage_fingerprint(stage: str, inputs: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The identity of a piece of work: same stage, inputs and config, same fingerprint."""
    return content_hash([stage, dict(inputs), dict(config)])


class Stage:
    """A folder in the making; see `open_stage`.

    `resumed`: unfinished work was found that this attempt goes on with. `changes` says how what lay here differed,
    where it could not be gone on with ("steps was 40 and is 80"), or how it was taken further.
    """

    def __init__(self, folder: Path, name: str, inputs: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self.folder = folder
        self.manifest = Manifest(
            name, stage_fingerprint(name, inputs, config), dict(inputs), dict(config), code_version()
        )
        self.finished = False
        self.resumed = False
        self.changes = ""
        self.earlier: list[float] = []
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long all attempts together have worked so far."""
        return sum(self.earlier) + time.monotonic() - self._start

    def finish(self, counts: Mapping[str, Any] | None = None) -> Manifest:
        """Hashes the files and writes the manifest: from here on the folder is a result."""
        self.manifest.counts = dict(counts or {})
        self.manifest.outputs = {
            file.relative_to(self.folder).as_posix(): file_hash(file)
            for file in sorted(self.folder.rglob("*"))
            if file.is_file()
            and not is_worker_file(file.relative_to(self.folder).as_posix())
            and not any(p.startswith(".") for p in file.relative_to(self.folder).parts)
        }
        self.manifest.seconds = round(self.seconds, 3)
        self.manifest.attempts = len(self.earlier) + 1
        text = json.dumps(self.manifest.to_json(), indent=2, ensure_ascii=False, default=str)
        for name in self.manifest.outputs:
            flush_to_disk(self.folder / name)  # a power cut must not leave the manifest without what it names
        write_atomically(self.folder / MANIFEST, text + "\n")
        (self.folder / IN_PROGRESS).unlink(missing_ok=True)
        shutil.rmtree(self.folder / PREVIOUS, ignore_errors=True)
        self.finished = True
        return self.manifest

    def mark(self, *, ended: bool = False) -> None:
        """Writes down what is being worked on since when; with `ended`, how long this attempt took."""
        seconds = [*self.earlier, round(time.monotonic() - self._start, 3)] if ended else self.earlier
        known = self.manifest
        mark = Mark(known.fingerprint, known.inputs, known.config, None if ended else time.time(), seconds)
        write_atomically(self.folder / IN_PROGRESS, mark.text())


@contextmanager
def open_stage(
    folder: Path,
    name: str,
    inputs: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    growing: Sequence[str] = (),
    former: str = "",
    leads: bool = True,
) -> Iterator[Stage]:
    """Opens a stage's output folder.

    If it holds a finished result of the same stage, inputs and config, the yielded stage is `finished` and
    nothing should be done. If it holds unfinished work of the same fingerprint, or work in which only numbers of the
    keys `growing` of the config were less, that is kept for resuming (`resumed` is true). Anything else of the same
    stage is removed first, and a result of which files are missing is made again; the result of another stage, or a
    folder that was not made by a stage, is never touched. Where a UserError ends work that left nothing to go on
    from, the folder is as it was before.

    `former` is the fingerprint that earlier versions gave to the same work, where it was another.
    Of several processes that share the work one `leads`; the others, which come after it, write nothing here.

    Raises UserError where the folder cannot be written, holds files that no stage wrote, or another stage's result,
    where another process works in it, and where the disk is full at any time.
    """
    stage = Stage(folder, name, inputs, config)
    if done := finished_result(folder, stage.manifest.fingerprint, former):
        stage.manifest, stage.finished = done, True
        yield stage
        return
    if not leads:
        yield stage
        return
    made = not folder.is_dir()
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(alone_in(folder))
            if done := finished_result(folder, stage.manifest.fingerprint, former):  # by another process, just now
                stage.manifest, stage.finished = done, True
            else:
                _begin(stage, growing, former)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}; choose a folder you may write to") from None
        if stage.finished:
            yield stage
            return
        try:
            yield stage
        except BaseException as error:
            with suppress(OSError):
                stage.mark(ended=True)
            if isinstance(error, UserError) and not stage.resumed:
                _take_back(folder, made)
            elif isinstance(error, Exception) and (told := full_disk(error, folder)):
                raise told from error
            raise


def _begin(stage: Stage, growing: Sequence[str], former: str) -> None:
    """Keeps what the stage goes on from, clears away what it replaces, and marks the folder as being worked on."""
    folder, known = stage.folder, read_manifest(stage.folder)
    for path in folder.iterdir():  # of a process that was killed while it wrote its mark
        if path.name != IN_PROGRESS and name_meant(path.name) == IN_PROGRESS:
            path.unlink()
    if known and known.stage != stage.manifest.stage:
        raise UserError(f"{folder} holds the result of another stage, {known.stage!r}; choose another folder")
    mark = Mark.read(folder / IN_PROGRESS)
    if left := mark or known:
        stage.changes = differences(left, stage.manifest)
    if mark and (mark.fingerprint == former or mark.goes_on_as(stage.manifest, growing)):
        stage.resumed, stage.earlier = True, mark.attempts(_written(folder))
    elif found := [path for path in folder.iterdir() if not _is_kept(path.name)]:
        if not left:
            raise UserError(f"{folder} holds files that no stage of this project wrote; choose another folder")
        for path in found:
            if known:
                (folder / PREVIOUS).mkdir(exist_ok=True)
                path.rename(folder / PREVIOUS / path.name)
            else:
                _remove(path)
    stage.mark()


def _written(folder: Path) -> Iterator[Path]:
    """The files that attempts wrote into their folder, without those that who starts the next one writes, too."""
    for path in folder.rglob("*"):
        of_starter = path.name != "events.jsonl" and is_worker_file(path.name)
        if path.is_file() and not of_starter and PREVIOUS not in path.parts:
            yield path


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _take_back(folder: Path, made: bool) -> None:
    """Undoes a failed attempt, unless it left hidden files: those are what a later attempt goes on from."""
    hidden = {path.name for path in folder.iterdir() if path.name.startswith(".") and not _is_kept(path.name)}
    if hidden - {IN_PROGRESS}:
        return
    for path in folder.iterdir():
        if not _is_kept(path.name):
            _remove(path)
    if (folder / PREVIOUS).is_dir():
        for path in (folder / PREVIOUS).iterdir():
            path.rename(folder / path.name)
        (folder / PREVIOUS).rmdir()
    elif made and not any(folder.iterdir()):
        folder.rmdir()


def input_identity(path: Path) -> str:
    """The identity of an input: the fingerprint-bound outputs of a stage's folder, else the hash of the bytes.

    Raises UserError where the input does not exist, or what a stage wrote is no longer what it wrote.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; give the path of a file or of a stage's folder")
    check_outputs(path)
    manifest = read_manifest(path) if path.is_dir() else None
    return content_hash(manifest.outputs) if manifest else file_hash(path)


def check_outputs(path: Path) -> None:
    """Raises UserError, naming the file, where files at or in `path`, which a finished stage wrote, are others by now.

    `path` is the stage's folder, or a file or folder directly in it, as its checkpoint. Files are hashed once a process,
    and again when their size or time of change is another.
    """
    folder = path if (path / MANIFEST).is_file() else path.parent
    if not (manifest := read_manifest(folder)):
        return
    inside = f"{path.name}/" if folder != path else ""
    for name, expected in manifest.outputs.items():
        if not (name.startswith(inside) or name == path.name):
            continue
        file = folder / name
        try:
            found = file.stat()
            damaged = _known_hash(file, found.st_size, found.st_mtime_ns) != expected
        except OSError as error:
            raise UserError(
                f"{file}, which the stage {manifest.stage!r} wrote, cannot be read: {error.strerror}; put it "
                f"back, or delete {folder} and run that stage again"
            ) from None
        if damaged:
            raise UserError(
                f"{file} is not what the stage {manifest.stage!r} wrote (its hash is another): damaged or changed; put "
                f"the file back, or delete {folder} and run that stage again"
            )


@functools.lru_cache(maxsize=4096)
def _known_hash(file: Path, size: int, changed: int) -> str:
    """The hash of a file as it is with this size and time of change, of which it depends."""
    return file_hash(file)
