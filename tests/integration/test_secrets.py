"""Planted keys of every kind, a whole pipeline with a judge behind an endpoint and a crash in it: then they are looked for.

Every file is read that the run left: logs, Prefect's database, MLflow's database and artifacts, manifests, cached answers,
samples of judgements, what the crash printed. (Databases with passwords: tests/integration/test_postgres.py; the
webhook's address on a lasting server: test_servers.py.)
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.servers]

ROOT = Path(__file__).resolve().parents[2]
# Of letters that encodings change, and long enough for no accident.
SECRETS = {
    "TEAM_JUDGE_KEY": "sk-judge+7f3a/9c1e=b2d4",
    "OPENAI_API_KEY": "sk-openai+55aa/77cc=99ee",
    "HF_TOKEN": "hf_planted4b8d2f6a0c",
    "AWS_SECRET_ACCESS_KEY": "aws+planted/1a2b3c4d5e6f",
    "AWPO_NOTIFY_URL": "http://127.0.0.1:9/hook?token=notify-2468ace0",
}
SIGN = "judge-of-the-secrets-test"  # stands where secrets must not: shows that the search finds what is there
# The second training step of the policy crashes once, with a traceback through the frames that hold the judge.
CRASH = f"""
import os, sys
class CrashOnce:
    def find_spec(self, name, path, target=None):
        if name == "awpo.training.policy_trainer":
            sys.meta_path.remove(self)
            from awpo.training.scoring import Scorer
            write = Scorer.write_samples
            def crash(self, step, *rest, **named):
                if step > 1 and not os.path.exists(os.environ["CRASHED"]):
                    open(os.environ["CRASHED"], "w").close()
                    raise RuntimeError("a crash on purpose near {SIGN}")
                write(self, step, *rest, **named)
            Scorer.write_samples = crash
sys.meta_path.insert(0, CrashOnce())
"""
TINY: dict[str, Any] = {
    "model": "embedded-1m",
    "methods": ["awpo"],
    "init": "base",
    "corpus": {"train_dialogues": 8, "validation_dialogues": 3, "test_dialogues": 3},
    "sft": {"steps": 1, "batch_size": 2},
    "policy": {
        "steps": 2,
        "prompts_per_rollout": 2,
        "group_size": 2,
        "steps_per_rollout": 1,
        "micro_batch_size": 2,
        "max_completion_length": 16,
        "save_every": 1,
    },
    "evaluation": {
        "benchmarks": ["held_out"],
        "instances_per_split": 2,
        "samples": 1,
        "max_completion_length": 16,
    },
}


@dataclass
class Ran:
    folder: Path
    printed: str
    asked: list[dict[str, Any]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, fault_server: Any) -> Ran:
    folder = tmp_path_factory.mktemp("secrets")
    told = f"so; your key was {SECRETS['TEAM_JUDGE_KEY']}"
    answer = json.dumps({"reason": told, "coherence": 8, "correctness": 6, "appropriateness": 4})
    refusal = {"do": "status", "status": 500, "message": f"no; your key was {SECRETS['TEAM_JUDGE_KEY']}", "times": 1}
    fault_server.script(refusal, default={"do": "answer", "text": answer})
    endpoint = {
        "base_url": fault_server.url,
        "model": SIGN,
        "api_key_variable": "TEAM_JUDGE_KEY",
        "cache": str(folder / "runs" / "answers.sqlite"),  # an endpoint of this machine has none by itself
    }
    policy = {**TINY["policy"], "judge": {"kind": "endpoint", "endpoint": endpoint}}
    (folder / "preset.yaml").write_text(yaml.safe_dump({**TINY, "policy": policy}))
    (folder / "judge.yaml").write_text(yaml.safe_dump(policy["judge"]))
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(CRASH)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    environment = {
        **kept,
        **SECRETS,
        "AWPO_RUNS": str(folder / "runs"),
        "CRASHED": str(folder / "crashed"),
        "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "DO_NOT_TRACK": "true",
    }
    out, printed = folder / "runs" / "out", ""
    train = ("train", "--preset", str(folder / "preset.yaml"), "--out", str(out), "--verbose")
    # Untrained, the policy has no thoughts to be judged; those of the data are.
    judged = ("judge", "evaluate", "--judge", str(folder / "judge.yaml"), "--items", "4", "--track")
    for command in (train, (*judged, "--instances", str(out / "data" / "rationales"))):
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        printed += done.stdout + done.stderr
    assert (folder / "crashed").exists()
    return Ran(folder, printed, fault_server.log())


def encodings(secret: str) -> set[bytes]:
    """A secret as it is, and as logs, addresses, JSON and headers may spell it."""
    raw = secret.encode()
    found = {raw, quote(secret, safe="").encode(), quote_plus(secret).encode(), raw.hex().encode()}
    found |= {json.dumps(secret)[1:-1].encode(), secret.replace("/", "\\/").encode(), repr(secret)[1:-1].encode()}
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for shift in range(3):  # within a longer text: its first and last letters depend on their neighbours
            whole = encode(b"x" * shift + raw)
            found.add(whole[4 if shift else 0 : len(whole) - 4])
    return found


def files_with(folder: Path, wanted: set[bytes]) -> list[str]:
    read = [path for path in folder.rglob("*") if path.is_file() and "site" not in path.parts]
    assert len(read) > 50
    return [str(path.relative_to(folder)) for path in read if any(one in path.read_bytes() for one in wanted)]


def test_the_key_is_sent_to_its_endpoint_and_no_other_key_is(ran: Ran) -> None:
    sent = {request["headers"]["authorization"] for request in ran.asked}
    assert sent == {f"Bearer {SECRETS['TEAM_JUDGE_KEY']}"}
    everything = json.dumps(ran.asked)
    assert not [name for name, secret in SECRETS.items() if name != "TEAM_JUDGE_KEY" and secret in everything]


@pytest.mark.parametrize("name", SECRETS)
def test_no_file_and_no_line_holds_a_secret(ran: Ran, name: str) -> None:
    secret = SECRETS[name].rpartition("token=")[2]
    wanted = encodings(secret)
    assert files_with(ran.folder, wanted) == []
    assert not [one for one in wanted if one in ran.printed.encode()]


def test_the_search_looks_where_secrets_could_be(ran: Ran) -> None:
    """What is no secret stands in all of these, the crash with its traceback in those that tell of it."""
    found = files_with(ran.folder / "runs", {SIGN.encode()})
    for place in ("mlflow.db", "prefect/", "mlartifacts/", "manifest.json", "log.txt", "answers.sqlite"):
        assert any(place in name for name in found), (place, found)
    crashed = files_with(ran.folder / "runs", {b"a crash on purpose near"})
    for place in ("log.txt", "prefect/", "mlartifacts/"):
        assert any(place in name for name in crashed), (place, crashed)
    assert "a crash on purpose" in ran.printed


def test_an_encoded_secret_would_be_found() -> None:
    secret = SECRETS["TEAM_JUDGE_KEY"]
    for before in ("", "a", "ab", "abc"):
        text = base64.b64encode(f"{before}{secret} and more".encode())
        assert any(one in text for one in encodings(secret))
    assert any(one in quote(f"http://x/?key={secret}", safe="").encode() for one in encodings(secret))
