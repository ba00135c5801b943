"""The command line: bad input of every kind ends in one line, exit code 2 and nothing written."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

from awpo.methods import METHODS
from flows.prefect_server import free_port

ROOT = Path(__file__).resolve().parents[2]


def awpo(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, in `folder`, as a person calls it."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("AWPO_", "PREFECT_", "MLFLOW_"))
    }
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def dialogues(folder: Path) -> Path:
    """A sound source."""
    path = folder.parent / "sound.jsonl"
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    path.write_text("".join(json.dumps({"messages": messages, "tools": [], "id": str(i)}) + "\n" for i in range(5)))
    return path


def other(folder: Path, name: str, content: str) -> str:
    path = folder.parent / name
    path.write_text(content)
    return str(path)


BAD: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "missing file": (lambda f: ["run", "--data", "no.json", "--out", "o"], "no.json does not exist"),
    "text for a source": (
        lambda f: ["run", "--data", other(f, "a.txt", "hello\nworld\n"), "--out", "o"],
        "give a JSON array of rows",
    ),
    "JSON of another form": (
        lambda f: ["data", "decompose", other(f, "a.json", '[{"speed": 3}]'), "--out", "o"],
        "no known format",
    ),
    "empty file": (lambda f: ["data", "decompose", other(f, "e.json", ""), "--out", "o"], ""),
    "missing source of data": (lambda f: ["data", "decompose", "no.json", "--out", "o"], "no.json does not exist"),
    "unknown format": (
        lambda f: ["data", "decompose", str(dialogues(f)), "--out", "o", "--format", "opneai"],
        "openai",
    ),
    "missing instances": (lambda f: ["data", "rationales", "no", "--out", "o"], "no does not exist"),
    "half an endpoint": (
        lambda f: ["data", "rationales", str(f), "--out", "o", "--endpoint", "http://x/v1"],
        "--endpoint-model",
    ),
    "unknown method": (
        lambda f: ["run", "--data", str(dialogues(f)), "--method", "awop", "--out", "o"],
        "did you mean 'awpo'",
    ),
    "a method without a policy": (
        lambda f: ["run", "--data", str(dialogues(f)), "--method", "sft", "--out", "o"],
        "trains no policy",
    ),
    "unknown model": (
        lambda f: ["run", "--data", str(dialogues(f)), "--model", "embeded-1m", "--out", "o"],
        "did you mean 'embedded-1m'",
    ),
    "a folder that is no model": (
        lambda f: ["run", "--data", str(dialogues(f)), "--model", str(f.parent), "--out", "o"],
        "config.json",
    ),
    "unknown start": (
        lambda f: ["run", "--data", str(dialogues(f)), "--init", "nowhere", "--out", "o"],
        "init",
    ),
    "batch that cannot be split": (
        lambda f: [
            *("train", "--out", "o", "--preset"),
            other(f, "p.yaml", "policy: {group_size: 3, micro_batch_size: 64}\n"),
        ],
        "micro-batches",
    ),
    "unwritable folder": (
        lambda f: ["run", "--data", str(dialogues(f)), "--out", "/proc/nowhere"],
        "cannot write to /proc/nowhere",
    ),
    "a file for a folder": (
        lambda f: ["train", "--out", other(f, "file", "x") + "/out"],
        "is a file",
    ),
    "unwritable folder of data": (
        lambda f: ["data", "decompose", str(dialogues(f)), "--out", "/proc/nowhere"],
        "cannot write to /proc/nowhere",
    ),
    "unknown preset": (lambda f: ["demo", "--preset", "dmeo", "--out", "o"], "did you mean 'demo'"),
    "preset with an unknown key": (
        lambda f: ["train", "--preset", other(f, "k.yaml", "modle: embedded-1m\n"), "--out", "o"],
        "did you mean 'model'",
    ),
    "preset that is no YAML": (lambda f: ["train", "--preset", other(f, "n.yaml", "a: [1\n"), "--out", "o"], "YAML"),
    "unknown checkpoint": (lambda f: ["evaluate", "embedded-2m", "--out", "o"], "did you mean"),
    "unknown benchmark": (lambda f: ["evaluate", "embedded-1m", "--out", "o", "--benchmark", "x"], "benchmarks"),
    "evaluation of missing instances": (
        lambda f: ["evaluate", "embedded-1m", "--out", "o", "--instances", "no"],
        "no does not exist",
    ),
    "comparison of nothing": (lambda f: ["compare", "a", "b"], "not a finished evaluation"),
    # More than 255 bytes, for which Path.exists raises OSError: tests/fuzz found it.
    "a folder of a name that is too long": (lambda f: ["train", "--preset", "quick", "--out", "x" * 300], "too long"),
    "a preset of such a name": (lambda f: ["train", "--preset", "x" * 300, "--out", "o"], "no pipeline"),
    "a checkpoint of such a name": (lambda f: ["evaluate", "x" * 300, "--out", "o"], "too long"),
    "a source of such a name": (lambda f: ["data", "decompose", "x" * 300, "--out", "o"], "too long"),
    "evaluations of such a name": (lambda f: ["compare", "x" * 300, "x" * 300], "too long"),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_bad_input_is_one_line_and_exit_code_2(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    arguments, expected = BAD[kind]
    done = awpo(*arguments(folder), folder=folder)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert expected in line
    assert done.stdout == ""
    assert list(folder.iterdir()) == [], "something was written"


@pytest.mark.parametrize("option", ["--prefect-port", "--mlflow-port"])
def test_a_port_in_use_says_how_to_choose_another(option: str, tmp_path: Path) -> None:
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        port, unused = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        other_option = {"--prefect-port": "--mlflow-port", "--mlflow-port": "--prefect-port"}[option]
        done = awpo("serve", option, str(port), other_option, str(unused), folder=tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        == f"error: port {port} is in use; stop what listens there, or choose another with {option} PORT"
    )
    assert list(tmp_path.iterdir()) == []


def test_one_port_for_two_servers_is_said_before_any_starts(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = awpo("serve", "--prefect-port", port, "--mlflow-port", port, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == f"error: both servers were given port {port}; choose another with --mlflow-port PORT"
    assert list(tmp_path.iterdir()) == []


def test_a_second_serve_of_one_runs_folder_is_refused(tmp_path: Path) -> None:
    """Two would share one Prefect database, and the end of the second would hide the first from all commands."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as first:
        Thread(target=first.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{first.server_port}/api"
        announcement = tmp_path / "runs" / "serve.json"
        announcement.parent.mkdir()
        announcement.write_text(json.dumps({"prefect_api_url": url}))
        done = awpo("serve", "--prefect-port", str(free_port()), "--mlflow-port", str(free_port()), folder=tmp_path)
        first.shutdown()
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("error: awpo serve runs already on ")
    assert url in line
    assert json.loads(announcement.read_text()) == {"prefect_api_url": url}


def test_too_little_disk_is_said_before_anything_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    from flows.cli import app

    usage = shutil.disk_usage(tmp_path)._replace(free=10_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 2
    assert "0.0 GB free" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [["run"], ["run", "--data"], ["nonsense"], ["methods", "--no-such"], ["train", "--out", "o", "--seed", "-1"]],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], tmp_path: Path) -> None:
    done = awpo(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "--help`" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("steps", "parts"), [("1", 1), ("2", 2), ("3", 2), ("4", 4), ("5", 4)])
def test_a_run_of_few_steps_cuts_its_rollouts_into_fewer_parts(
    steps: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preset's rollout batch is for four steps; a run of fewer is not refused for that."""
    import flows.cli

    asked = []
    monkeypatch.setattr(flows.cli, "_run_pipeline", lambda settings, *_: asked.append(settings.policy))
    source = str(dialogues(tmp_path / "out"))
    done = CliRunner().invoke(flows.cli.app, ["run", "--data", source, "--out", str(tmp_path / "o"), "--steps", steps])
    assert done.exit_code == 0, done.output
    assert [(policy.steps, policy.steps_per_rollout) for policy in asked] == [(int(steps), parts)]


def test_methods_as_json_are_those_of_the_registry(tmp_path: Path) -> None:
    done = awpo("methods", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)["methods"]
    assert [entry["name"] for entry in listed] == list(METHODS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["methods", "--json"], ["data", "decompose", "--help"]])
def test_what_only_tells_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        f"sys.argv = ['awpo', *{arguments!r}]\n"
        "from flows.cli import app\n"
        "try:\n    app()\nexcept SystemExit:\n    pass\n"
        "print(*(name for name in ('torch', 'prefect', 'mlflow', 'transformers') if name in sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_decompose_leaves_instances_and_counts(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    source = dialogues(folder)
    with open(source, "a") as file:
        file.write("{not json\n")
    done = awpo("data", "decompose", str(source), "--out", "out", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    for key in ("rows_read", "dialogues", "instances", "rejected"):
        assert printed[key] == manifest[key]
    assert manifest["rows_read"] == manifest["dialogues"] + sum(manifest["rejected"].values()) == 6
    assert list((folder / "out").glob("*.parquet"))


def test_telemetry_is_off_and_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import flows.environment, os, json\n"
        "print(json.dumps({k: os.environ.get(k) for k in flows.environment.DEFAULTS}))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key not in ("DO_NOT_TRACK",)}
    environment["PREFECT_SERVER_ANALYTICS_ENABLED"] = "true"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["DO_NOT_TRACK"] == "true"
    assert found["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert found["PREFECT_SERVER_ANALYTICS_ENABLED"] == "true"
