"""Each stage is killed at seeded moments of its work, run again, and compared with a run that nobody disturbed.

`make kill-matrix` runs 66 points: eleven kinds of work, three signals, moments drawn by the seed. A moment is the n-th
thing that the process does to a file of its run folder, or its n-th call of a function (the rollout, the backward pass,
the writing of a checkpoint, a batch sent to MLflow), and up to the time till the next one after it (`doomed.py`). After
the signal: nobody of the stage is left alive, and no file that is read as whole is half written. After the second run:
data and scores are the same to the byte, training bit for bit, each step stands once, in MLflow too, whose runs have
ended. Results are lines of JSON in `--output`; points that stand there are not run again. About half an hour on two
quiet cores; ends with status 1 where a point failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from awpo.artifacts import MANIFEST, read_manifest
from awpo.events import METRICS, Tail
from awpo.files import file_hash
from awpo.training.identity import RESUME, WHOLE

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
TURNS = 6  # of each kind of work, two for each signal
LEFT_SECONDS = 30.0  # that a stage's processes may take to notice the end of the one that was killed
RUN_SECONDS = 600.0

SFT = {"steps": 4, "batch_size": 4, "save_every": 1}
POLICY = {
    "steps": 4,
    "prompts_per_rollout": 2,
    "group_size": 2,
    "steps_per_rollout": 2,
    "micro_batch_size": 2,
    "max_completion_length": 16,
    "learning_rate": 1e-3,
    "save_every": 1,
}
EVALUATION = {
    "benchmarks": ["held_out"],
    "splits": ["test_phrasings", "test_tools"],
    "instances_per_split": 4,
    "samples": 2,
    "max_completion_length": 16,
    "batch_size": 4,
    "threads": 1,
}


@dataclass(frozen=True)
class Given:
    """What the stages start from, made once: a corpus, its instances, an untrained model."""

    folder: Path

    @property
    def dialogues(self) -> Path:
        return self.folder / "corpus" / "dialogues.jsonl"

    @property
    def instances(self) -> Path:
        return self.folder / "instances"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def make(self) -> None:
        from awpo.config import CorpusConfig, RationaleConfig
        from awpo.data.decompose import decompose_source
        from awpo.data.rationales import write_rationales
        from awpo.embedded.corpus import write_corpus
        from awpo.embedded.model import build_model

        config = CorpusConfig(train_dialogues=60, validation_dialogues=4, test_dialogues=4)
        write_corpus(self.folder / "corpus", config)
        decompose_source(self.dialogues, self.folder / "bare")
        write_rationales(self.folder / "bare", self.instances, RationaleConfig())
        build_model("embedded-1m", self.instances, self.model)
        (self.folder / "select.yaml").write_text("near_duplicates: {}\n", "utf-8")

    def store(self) -> Path:
        """An MLflow store with a champion, version 1, and a version 2, made once."""
        made = self.folder / "store"
        if not made.exists():
            code = (
                "import flows.environment, sys; from pathlib import Path\n"
                "from tasks.registry import Candidate, register\n"
                "from tasks.tracking_store import connect\n"
                "tracking = connect()\n"
                "versions = [register(Candidate(Path(sys.argv[1])), tracking) for _ in range(2)]\n"
                "tracking.client().set_registered_model_alias('awpo', 'champion', versions[0].version)\n"
            )
            run_python(["-c", code, str(self.model)], {"AWPO_RUNS": str(made)}, self.folder / "store.log")
        return made


Result = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of work: its command line, its moments (files where there are no functions), what must come of it."""

    command: Callable[[Given, Path], list[str]]
    result: Callable[[Path], Result]
    functions: tuple[str, ...] = ()
    tracked: bool = False
    check: Callable[[Path], Result] | None = field(default=None)


def cli(*arguments: str) -> Callable[[Given, Path], list[str]]:
    def command(given: Given, out: Path) -> list[str]:
        places = {"dialogues": given.dialogues, "instances": given.instances, "bare": given.folder / "bare"}
        places["select"] = given.folder / "select.yaml"
        return ["flows.cli", *(a.format(**places) for a in arguments), "--out", str(out / "stage")]

    return command


def worker(module: str, config: dict[str, Any], model: str = "model") -> Callable[[Given, Path], list[str]]:
    def command(given: Given, out: Path) -> list[str]:
        stage = out / "stage"
        stage.mkdir(parents=True, exist_ok=True)
        job = {model: str(given.model), "instances": str(given.instances), "out": str(stage), "config": config}
        (stage / "job.json").write_text(json.dumps(job), "utf-8")
        return ["awpo.worker", module, str(stage / "job.json")]

    return command


def tracked(do: str, config: dict[str, Any]) -> Callable[[Given, Path], list[str]]:
    def command(given: Given, out: Path) -> list[str]:
        if not (out / "runs").exists():
            shutil.copytree(given.store(), out / "runs")
        job = {"do": do, "model": str(given.model), "instances": str(given.instances), "config": config}
        (out / "job.json").write_text(json.dumps({**job, "out": str(out / "stage")}), "utf-8")
        return [str(HERE / "tracked.py"), str(out / "job.json")]

    return command


def data_result(out: Path) -> Result:
    manifest = read_manifest(out / "stage")
    assert manifest is not None
    counts = {name: value for name, value in manifest.counts.items() if "seconds" not in name}
    return {"outputs": manifest.outputs, "counts": json.loads(json.dumps(counts))}


def training_result(out: Path) -> Result:
    stage = out / "stage"
    rows = [
        [row["step"], {name: value for name, value in row["metrics"].items() if "seconds" not in name}]
        for row in Tail(stage / METRICS)
    ]
    weights = {p.name: file_hash(p) for p in sorted((stage / "checkpoint").iterdir()) if p.name != "training_args.bin"}
    samples = stage / "judge_samples.jsonl"
    return {
        "manifest": read_manifest(stage) is not None,
        "metrics": rows,
        "weights": weights,
        "samples": samples.read_text("utf-8") if samples.exists() else "",
    }


def scores_result(out: Path) -> Result:
    items = pq.read_table(out / "stage" / "items.parquet").drop_columns(["seconds"])
    text = json.dumps(items.to_pylist(), ensure_ascii=False)
    scores = json.loads((out / "stage" / "scores.json").read_text("utf-8"))
    return {
        "manifest": read_manifest(out / "stage") is not None,
        "items": hashlib.sha256(text.encode()).hexdigest(),
        "scores": [{k: v for k, v in row.items() if k != "seconds"} for row in scores],
    }


def store_of(out: Path, code: str) -> Any:
    """What some lines of Python print as JSON of the store."""
    opening = "import flows.environment, json; from tasks.tracking_store import connect; client = connect().client()\n"
    log = out / "asked.log"
    run_python(["-c", opening + code], {"AWPO_RUNS": str(out / "runs")}, log)
    return json.loads(log.read_text("utf-8").strip().splitlines()[-1])


RUNS = """
runs = client.search_runs([client.get_experiment_by_name("awpo").experiment_id])
histories = [[[m.step, m.value] for m in client.get_metric_history(run.info.run_id, "loss")] for run in runs]
print(json.dumps({"states": sorted({run.info.status for run in runs}), "runs": len(runs), "loss": sorted(histories)}))
"""
ALIAS = """
model = client.get_registered_model("awpo")
print(json.dumps({"champion": int(model.aliases["champion"]), "tags": sorted(model.tags)}))
"""


def told_result(out: Path) -> Result:
    found = store_of(out, RUNS)
    steps = [step for history in found["loss"] for step, _ in history]
    assert len(steps) == len(set(steps)), f"steps in MLflow: {steps}"
    return {**training_result(out), "mlflow": {"states": found["states"], "loss": found["loss"]}}


def promotion_result(out: Path) -> Result:
    return {**scores_result(out), **store_of(out, ALIAS)}


def promotion_between(out: Path) -> Result:
    """What is true after the kill: the alias has moved only where a tag says where it came from, or for good."""
    found = store_of(out, ALIAS)
    moved = found["champion"] == 2
    assert not moved or found["tags"] or (out / "stage" / MANIFEST).exists(), f"moved without a trace: {found}"
    return found


KINDS: dict[str, Kind] = {
    "decomposition": Kind(cli("data", "decompose", "{dialogues}"), data_result),
    "selection": Kind(cli("data", "select", "{instances}", "--config", "{select}"), data_result),
    "rationales": Kind(cli("data", "rationales", "{bare}"), data_result),
    "sft": Kind(worker("awpo.training.sft", SFT), training_result),
    "rollout": Kind(
        worker("awpo.training.policy", POLICY),
        training_result,
        ("awpo.training.policy_trainer:PolicyTrainer._roll_out",),
    ),
    "backward": Kind(worker("awpo.training.policy", POLICY), training_result, ("torch:Tensor.backward",)),
    "checkpoint": Kind(
        worker("awpo.training.policy", POLICY),
        training_result,
        (
            "awpo.training.resumable_trainer:ResumableTrainer._save_checkpoint",
            "transformers.trainer:Trainer._save_optimizer_and_scheduler",
            "awpo.training.resumable_trainer:ResumableTrainer._save_rng_state",
            "awpo.training.checkpoints:MarkWholeCheckpoints.on_save",
            "transformers:PreTrainedModel.save_pretrained",
        ),
    ),
    "policy": Kind(worker("awpo.training.policy", POLICY), training_result),
    "evaluation": Kind(worker("evaluation", EVALUATION, "checkpoint"), scores_result),
    "mlflow": Kind(
        tracked("train", SFT), told_result, ("tasks.tracking:TrackedRun.send", "tasks.tracking:TrackedRun.save"), True
    ),
    "promotion": Kind(
        tracked("promote", EVALUATION),
        promotion_result,
        (
            "mlflow:MlflowClient.set_registered_model_tag",
            "mlflow:MlflowClient.set_registered_model_alias",
            "mlflow:MlflowClient.delete_registered_model_tag",
            "evaluation.run:_kept",
        ),
        True,
        promotion_between,
    ),
}


def own_environment() -> dict[str, str]:
    """This process's, without stores and servers: what was called before in it, MLflow too, writes them there."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("AWPO_", "MLFLOW_", "PREFECT_"))}


def environment_of(out: Path) -> dict[str, str]:
    runs = {"AWPO_RUNS": str(out / "runs"), "PREFECT_HOME": str(out / "prefect"), "PYTHONPATH": str(ROOT)}
    return {**own_environment(), "OMP_NUM_THREADS": "1", "PREFECT_LOGGING_LEVEL": "ERROR", **runs}


def run_python(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    with open(log, "w", encoding="utf-8") as file:
        found = subprocess.run(
            [sys.executable, *arguments],
            env={**own_environment(), "PYTHONPATH": str(ROOT), **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            check=False,
            timeout=RUN_SECONDS,
        )
    if found.returncode:
        raise RuntimeError(f"{arguments[:2]} ended with code {found.returncode}: {log.read_text('utf-8')[-1500:]}")


def start(kind: Kind, given: Given, out: Path, plan: dict[str, Any]) -> int:
    """Runs the kind of work by a plan of `doomed.py`; returns its exit code. What it says is in `out`/log."""
    out.mkdir(parents=True, exist_ok=True)
    command = kind.command(given, out)
    (out / "plan.json").write_text(json.dumps({"watch": str(out / "stage"), "functions": kind.functions, **plan}))
    with open(out / "log", "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "doomed.py"), str(out / "plan.json"), *command],
            env=environment_of(out),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            return process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise RuntimeError(f"it hung: {out / 'log'}") from None


def alive_in(out: Path) -> list[str]:
    """Command lines of this machine's processes that name the folder or work in it.

    A process that is just beginning has no command line for a moment, but has its folder.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            if str(out) in line or os.readlink(path / "cwd").startswith(str(out)):
                found.append(f"{path.name}: {line[:200]}")
    return found


def all_gone(out: Path) -> None:
    end = time.monotonic() + LEFT_SECONDS
    while left := alive_in(out):
        assert time.monotonic() < end, f"orphans: {left}"
        time.sleep(0.2)


def all_whole(stage: Path) -> None:
    """Every file that some reader takes as whole is whole."""
    if not stage.exists():
        return
    if manifest := read_manifest(stage):
        wrong = [name for name, known in manifest.outputs.items() if file_hash(stage / name) != known]
        assert not wrong, f"not what the manifest says: {wrong}"
    for path in stage.glob("**/*"):
        among_parts = ".parts" in path.relative_to(stage).parts
        if path.name.startswith(".") or not (path.parent == stage or among_parts):
            continue
        if path.suffix == ".parquet":
            pq.read_table(path)
        elif path.suffix == ".json":
            json.loads(path.read_text("utf-8"))
    for mark in stage.glob(f"{RESUME}/checkpoint-*/{WHOLE}"):
        from safetensors import safe_open

        for weights in mark.parent.glob("*.safetensors"):
            with safe_open(weights, "np") as file:
                assert [file.get_tensor(name).shape for name in file.keys()]  # noqa: SIM118 - no mapping


@dataclass(frozen=True)
class Undisturbed:
    """A run of each kind that nobody killed: its result, and when its moments came."""

    result: Result
    times: list[float]

    @property
    def moments(self) -> int:
        return len(self.times) - 2


def undisturbed(name: str, given: Given) -> Undisturbed:
    out = given.folder / "undisturbed" / name
    kind, counted = KINDS[name], out / "counted.json"
    if not counted.exists() and (code := start(kind, given, out, {"counted": str(counted)})):
        raise RuntimeError(f"{name} ended with code {code}: {(out / 'log').read_text('utf-8')[-2000:]}")
    times = json.loads(counted.read_text("utf-8"))["times"]
    assert len(times) > 2, f"{name} has no moments"
    return Undisturbed(json.loads(json.dumps(kind.result(out))), times)


def one_point(name: str, turn: int, seed: int, given: Given, whole: Undisturbed) -> Result:
    """Kills, looks, runs again, compares; returns what happened."""
    draw = random.Random(f"{seed}-{name}-{turn}")
    said = SIGNALS[turn % len(SIGNALS)]
    at = draw.randint(1, whole.moments)
    delay = draw.choice((0.0, draw.random())) * min(2.0, whole.times[at + 1] - whole.times[at])
    row: Result = {"kind": name, "turn": turn, "seed": seed, "signal": said, "at": at, "of": whole.moments}
    row |= {"delay": round(delay, 4)}
    kind, out = KINDS[name], given.folder / "points" / f"{name}-{turn}"
    began = time.monotonic()
    try:
        plan = {"signal": int(signal.Signals[said]), "at": at, "delay": delay}
        row["code"] = start(kind, given, out, plan)
        assert row["code"] or delay or at == whole.moments, "the signal did nothing"
        all_gone(out)
        all_whole(out / "stage")
        row["finished"] = (out / "stage" / MANIFEST).exists()
        if kind.check:
            kind.check(out)
        code = start(kind, given, out, {"counted": str(out / "counted.json")})
        assert code == 0, f"the second run ended with code {code}: {(out / 'log').read_text('utf-8')[-1500:]}"
        all_whole(out / "stage")
        found = json.loads(json.dumps(kind.result(out)))
        other = [key for key, value in whole.result.items() if found[key] != value]
        assert not other, f"another result: {other}; see {out}"
        row["passed"] = True
    except (AssertionError, RuntimeError, OSError, ValueError, KeyError) as error:
        row |= {"passed": False, "problem": f"{type(error).__name__}: {error}"[:3000]}
    row["seconds"] = round(time.monotonic() - began, 1)
    if row["passed"]:
        shutil.rmtree(out)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=TURNS, help="points of each kind of work")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(KINDS), action="append", help="this kind of work alone")
    parser.add_argument("--at-once", type=int, default=2, help="points at a time")
    parser.add_argument("--output", type=Path, default=Path(".kill-matrix.jsonl"))
    parser.add_argument(
        "--folder", type=Path, help="where to work; it and the undisturbed runs are kept, for the same code"
    )
    arguments = parser.parse_args()
    rows = [row for row in Tail(arguments.output) if row.get("seed") == arguments.seed]
    done = {(row["kind"], row["turn"]) for row in rows if row.get("passed")}
    points = [(name, turn) for turn in range(arguments.turns) for name in arguments.only or KINDS]
    todo = [point for point in points if point not in done]
    with tempfile.TemporaryDirectory(prefix="kill-matrix-") as scratch:
        given = Given((arguments.folder or Path(scratch)).absolute())
        if not given.model.exists():
            given.make()
        kinds = sorted({name for name, _ in todo})
        if any(KINDS[name].tracked for name in kinds):
            given.store()
        shutil.rmtree(given.folder / "points", ignore_errors=True)
        with ThreadPoolExecutor(arguments.at_once) as threads:
            whole = dict(zip(kinds, threads.map(lambda name: undisturbed(name, given), kinds), strict=True))

            def run(point: tuple[str, int]) -> Result:
                name, turn = point
                row = one_point(name, turn, arguments.seed, given, whole[name])
                with open(arguments.output, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps({k: v for k, v in row.items() if k != "seed"}), flush=True)
                return row

            kept = [row for row in rows if row.get("passed") and (row["kind"], row["turn"]) in points]
            rows = kept + list(threads.map(run, todo))
    failed = [row for row in rows if not row["passed"]]
    print(f"{'':16}{'points':>7}{'passed':>8}{'killed before the end':>24}")
    for name in KINDS:
        its = [row for row in rows if row["kind"] == name]
        cut = sum(not row.get("finished", False) for row in its)
        print(f"{name:16}{len(its):7}{sum(row['passed'] for row in its):8}{cut:24}")
    print(f"{len(rows) - len(failed)} of {len(rows)} points passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
