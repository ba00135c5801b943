"""Sources on the Hugging Face Hub: `hub:owner/name@REVISION[:split]`.

The revision is a commit's full hash: a branch or a tag can move, and the same words would name other data. Which
files make up a split is told by `datasets`; the files themselves are fetched as they are and read as local ones are,
because a table of `datasets` gives every row of an object the keys of all rows. They stay in the library's own cache.

A gated set is fetched with the token in HF_TOKEN or of `hf auth login`, by whoever has accepted its terms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from awpo.errors import UserError
from awpo.types import content_hash

PREFIX = "hub:"
_FORM = "hub:OWNER/NAME@REVISION, or with :SPLIT after it"
_SPEC = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^:@/]*))?(?::(?P<split>[\w.-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_IN_REPOSITORY = re.compile(r"hf://datasets/[^/]+/[^/@]+@(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass(frozen=True, slots=True)
class HubSource:
    """A set on the hub at one commit; `split` None is all of its splits."""

    name: str
    revision: str
    split: str | None = None

    def __str__(self) -> str:
        return f"{PREFIX}{self.name}@{self.revision}" + (f":{self.split}" if self.split else "")

    @property
    def identity(self) -> str:
        """What stands for the content in a manifest: a commit's hash names its bytes."""
        return content_hash(str(self))


def is_hub(source: str | Path) -> bool:
    """Whether a source is named as one on the hub."""
    return str(source).startswith(PREFIX)


def parse_source(source: str | Path) -> HubSource:
    """Takes `hub:owner/name@REVISION[:split]` apart. Raises UserError where it isn't that, or not pinned."""
    match = _SPEC.fullmatch(str(source))
    if match is None:
        raise UserError(f"{source} names no set on the hub; write {_FORM}")
    if not match["revision"]:
        raise UserError(f"{source} names no revision; pin the commit that you mean: {_FORM}")
    if not _COMMIT.fullmatch(match["revision"]):
        raise UserError(
            f"{source}: the revision {match['revision']!r} can move; pin the commit by its 40 hex digits "
            "(on the set's page: Files and versions, History)"
        )
    return HubSource(match["name"], match["revision"], match["split"])


def files_of_splits(data_files: Mapping[str, Sequence[str]], source: HubSource) -> list[str]:
    """The files of the split asked for, or of all, each once and in order. Raises UserError for an unknown split."""
    if source.split is not None and source.split not in data_files:
        raise UserError(f"{source}: there is no split {source.split!r}; known: {', '.join(map(str, data_files))}")
    chosen = [source.split] if source.split is not None else list(data_files)
    return list(dict.fromkeys(str(file) for split in chosen for file in data_files[split]))


def fetch_files(source: HubSource) -> list[Path]:
    """The set's data files on this machine, fetched where they are not there yet.

    Raises UserError, in one line, where the set is gated, missing or cannot be reached.
    """
    from datasets import load_dataset_builder
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        builder = load_dataset_builder(source.name, revision=source.revision)
        files = []
        for url in files_of_splits(builder.config.data_files or {}, source):
            inside = _IN_REPOSITORY.fullmatch(url)
            if inside is None:
                raise UserError(f"{source} keeps data outside of its repository ({url:.100}); fetch it yourself")
            local = hf_hub_download(
                source.name, inside["path"], repo_type="dataset", revision=inside["revision"], token=None
            )
            files.append(Path(local))
    except (GatedRepoError, DatasetNotFoundError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        if isinstance(error, GatedRepoError) or "gated" in str(error):
            raise UserError(
                f"{source} is gated: accept its terms on https://huggingface.co/datasets/{source.name}, "
                "then set HF_TOKEN to a token of that account"
            ) from None
        raise UserError(
            f"{source} is not on the hub, or is private: check owner, name and commit, or set HF_TOKEN"
        ) from None
    except OSError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"{source} cannot be reached ({reason:.160}); check the network, or give a file that you fetched yourself"
        ) from None
    except (ValueError, RuntimeError) as error:  # a set made by a script, or of no data file that the library knows
        reason = next(iter(str(error).splitlines()), "")
        raise UserError(f"{source} cannot be read ({reason:.160}); fetch its files yourself") from None
    if not files:
        raise UserError(f"{source} holds no data file; check the split")
    return files
