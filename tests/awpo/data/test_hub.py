"""Sources on the hub: how they are named, which files a split has, and what is said where nothing can be fetched.

There is no network here, so nothing is fetched; the libraries' own errors come from the libraries.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from awpo.data.hub import HubSource, fetch_files, files_of_splits, is_hub, parse_source
from awpo.data.rows import source_identity
from awpo.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_source_is_named_with_its_commit() -> None:
    assert parse_source(f"hub:Team-ACE/ToolACE@{COMMIT}") == HubSource("Team-ACE/ToolACE", COMMIT)
    assert parse_source(Path(f"hub:a/b.c_d@{COMMIT}:train")) == HubSource("a/b.c_d", COMMIT, "train")
    assert str(parse_source(f"hub:a/b@{COMMIT}:train")) == f"hub:a/b@{COMMIT}:train"
    assert is_hub(Path(f"hub:a/b@{COMMIT}"))
    assert not is_hub(Path("data/hub.json"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hub:a/b", "names no revision; pin the commit"),
        ("hub:a/b@", "names no revision"),
        ("hub:a/b:train", "names no revision"),
        ("hub:a/b@main", "the revision 'main' can move"),
        ("hub:a/b@v1.0:train", "the revision 'v1.0' can move"),
        (f"hub:a/b@{COMMIT[:12]}", "can move"),
        (f"hub:a/b@{COMMIT}0", "can move"),
        (f"hub:b@{COMMIT}", "names no set on the hub"),
        (f"hub:a/b@{COMMIT}:", "names no set on the hub"),
        ("hub:", "names no set on the hub"),
    ],
)
def test_what_is_not_pinned_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_source(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_identity_is_the_pinned_name() -> None:
    names = [f"hub:a/b@{COMMIT}", f"hub:a/b@{COMMIT}:train", f"hub:a/b@{COMMIT[::-1]}"]
    assert len({source_identity(Path(name)) for name in names}) == 3
    assert source_identity(Path(names[0])) == source_identity(Path(names[0]))


def test_the_files_of_splits_are_those_that_the_library_finds(tmp_path: Path) -> None:
    from datasets import load_dataset_builder

    for name in ("data/train-00000.jsonl", "data/train-00001.jsonl", "data/test-00000.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"a": 1}\n')
    data_files = load_dataset_builder(str(tmp_path)).config.data_files

    def found(split: str | None) -> list[str]:
        return [Path(file).name for file in files_of_splits(data_files, HubSource("a/b", COMMIT, split))]

    assert found("train") == ["train-00000.jsonl", "train-00001.jsonl"]
    assert found(None) == ["train-00000.jsonl", "train-00001.jsonl", "test-00000.jsonl"]
    with pytest.raises(UserError, match="there is no split 'dev'; known: train, test"):
        found("dev")


def test_the_files_are_fetched_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    import huggingface_hub

    url = f"hf://datasets/a/b@{COMMIT}/data/x.json"
    config = type("Config", (), {"data_files": {"train": [url]}})
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, revision: type("B", (), {"config": config}))
    asked: list[Any] = []

    def fetched(name: str, path: str, **options: Any) -> str:
        asked.append((name, path, options["revision"], options["repo_type"]))
        return str(tmp_path / "x.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetched)
    assert fetch_files(HubSource("a/b", COMMIT)) == [tmp_path / "x.json"]
    assert asked == [("a/b", "data/x.json", COMMIT, "dataset")]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("Dataset 'a/b' is a gated dataset on the Hub. You must be authenticated to access it.", "is gated: accept its terms on https://huggingface.co/datasets/a/b, then set HF_TOKEN"),
        ("Dataset 'a/b' doesn't exist on the Hub or cannot be accessed.", "is not on the hub, or is private"),
    ],
)  # fmt: skip
def test_a_gated_set_says_what_to_do(monkeypatch: pytest.MonkeyPatch, error: str, said: str) -> None:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    def refuses(name: str, revision: str) -> Any:
        raise DatasetNotFoundError(error)

    monkeypatch.setattr(datasets, "load_dataset_builder", refuses)
    with pytest.raises(UserError) as caught:
        fetch_files(HubSource("a/b", COMMIT))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_network_the_error_is_one_line(tmp_path: Path) -> None:
    """In a process of its own, because the library reads its switch when it is imported."""
    source = f"hub:nobody/nothing@{COMMIT}"
    code = f"""
from pathlib import Path
from awpo.data.sources import detect
from awpo.errors import UserError
try:
    detect(Path({source!r}))
except UserError as error:
    print(error)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"{source} cannot be reached (")
