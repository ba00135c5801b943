"""Where benchmark files are found; fetching is tried against a server of this machine."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from awpo.errors import UserError
from evaluation import benchmark_data
from evaluation.benchmark_data import VARIABLES, PinnedFile, cache_folder, find, find_any

CONTENT = b'[{"a": 1}]\n'
COMMIT = "c" * 40
FILE = PinnedFile("made/items.json", "owner/name", "c" * 40, "data/items.json", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No folder is named, the cache is empty, and nobody answers under the address of downloads."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(benchmark_data, "_RAW", "http://127.0.0.1:9")


def put(folder: Path, content: bytes = CONTENT) -> Path:
    path = folder / FILE.name
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file as a server holds it; change it to serve other bytes."""
    root = tmp_path / "served"
    path = root / FILE.repository / FILE.commit / FILE.path
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setattr(benchmark_data, "_RAW", f"http://127.0.0.1:{server.server_address[1]}")
        yield path
        server.shutdown()


def test_folders_are_looked_at_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected: list[Path] = []
    for name in ("cache/awpo/benchmarks", "shared", "benchmark", "setting"):
        expected.insert(0, put(tmp_path / name))
    monkeypatch.setenv("AWPO_SHARED_DATA", str(tmp_path / "shared"))
    monkeypatch.setenv("AWPO_BENCHMARK_DATA", str(tmp_path / "benchmark"))
    for path in expected:
        assert find(FILE, tmp_path / "setting") == path
        path.unlink()
    with pytest.raises(UserError, match="cannot be fetched"):
        find(FILE, tmp_path / "setting")


def test_the_first_folder_that_has_any_of_the_names_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder, name in (("setting", "b"), ("shared", "a"), ("shared", "b")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).touch()
    monkeypatch.setenv("AWPO_SHARED_DATA", str(tmp_path / "shared"))
    assert find_any(["a", "b"], tmp_path / "setting") == tmp_path / "setting" / "b"
    assert find_any(["a", "b"]) == tmp_path / "shared" / "a"
    assert find_any(["no such name"], tmp_path / "setting") is None


def test_a_named_folder_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"benchmark_data: there is no folder .*nowhere"):
        find(FILE, tmp_path / "nowhere")
    monkeypatch.setenv("AWPO_BENCHMARK_DATA", str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"AWPO_BENCHMARK_DATA names .*gone, which is no folder"):
        find(FILE)


def test_a_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "setting", b"[]")
    with pytest.raises(UserError, match="is not the benchmark's file"):
        find(FILE, tmp_path / "setting")


def test_offline_and_missing_is_one_line_that_says_what_to_do() -> None:
    with pytest.raises(UserError) as raised:
        find(FILE)
    message = str(raised.value)
    assert "\n" not in message
    for part in (FILE.name, FILE.url, "refused", "benchmark_data or AWPO_BENCHMARK_DATA"):
        assert part in message


def ask_for_a_set(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Looks for a set on the hub in a process of its own: the library reads its settings when it is imported."""
    code = f"""
from awpo.data.hub import HubSource
from awpo.errors import UserError
from evaluation.benchmark_data import find_on_hub
try:
    print(find_on_hub(HubSource("a/b", {COMMIT!r}, "test"), "data/x.parquet", None, "made/x.parquet"))
except UserError as error:
    print(error)
"""
    environment = {**os.environ, "HF_HOME": str(folder), **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [({"HF_ENDPOINT": "http://127.0.0.1:9"}, "refused"), ({"HF_HUB_OFFLINE": "1"}, "offline mode is enabled")],
)
def test_a_hub_that_is_away_is_asked_once_at_most(tmp_path: Path, environment: dict[str, str], reason: str) -> None:
    done = ask_for_a_set(tmp_path, **environment)
    assert done.stderr == ""  # the library tells there when it asks again
    [line] = done.stdout.splitlines()
    assert line.startswith(f"hub:a/b@{COMMIT}:test is not on this machine and cannot be fetched (")
    assert reason in line
    assert line.endswith("or put made/x.parquet into a folder that benchmark_data or AWPO_BENCHMARK_DATA names")


def test_what_the_hubs_library_keeps_needs_no_hub(tmp_path: Path) -> None:
    kept = tmp_path / "hub" / "datasets--a--b" / "snapshots" / COMMIT / "data" / "x.parquet"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert ask_for_a_set(tmp_path, HF_ENDPOINT="http://127.0.0.1:9").stdout.strip() == str(kept)


def test_a_missing_file_is_fetched_once_and_kept(served: Path) -> None:
    path = find(FILE)
    assert path == cache_folder() / FILE.name
    assert path.read_bytes() == CONTENT
    served.unlink()
    assert find(FILE) == path


def test_an_answer_of_other_bytes_is_not_kept(served: Path) -> None:
    served.write_bytes(b"<html>sign in</html>")
    with pytest.raises(UserError, match="gave other bytes than those pinned"):
        find(FILE)
    assert not (cache_folder() / FILE.name).exists()
    served.unlink()
    with pytest.raises(UserError, match="File not found"):  # the server's 404
        find(FILE)
