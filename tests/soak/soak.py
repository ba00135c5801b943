"""Three pipelines at a time for an hour, while things are killed at random: is everything true and the same in the end?

`make soak` starts a Prefect server, an MLflow server and a worker, and lets the worker run small trainings of three
seeds, first undisturbed, then again and again while faults are drawn by `--seed`: a run's process or its training worker
is killed, the MLflow or the Prefect server is killed or stopped for a while and comes back, a run is cancelled. A run
that did not complete is started again with the same parameters. Ends with status 1 where, at the end,

- a run is in no final state in Prefect, or an MLflow run of a completed pipeline is not FINISHED;
- a pipeline's weights or scores are others than the undisturbed one's of its seed, or a step stands twice in MLflow;
- a process of a pipeline is left over;
- memory of a server or of the worker grew beyond `GROWTH` times what it was two minutes after its start, and
  `SLACK_MIB`, or its open files by more than `MORE_FILES`.

Figures go to `--output` as JSON. `--minutes` is the time of faults; the undisturbed runs and the end come on top.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from awpo.artifacts import file_hash
from awpo.processes import end_group

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 3
GROWTH, SLACK_MIB, MORE_FILES = 1.5, 64.0, 50
YOUNG_SECONDS = 120.0  # after which a process has loaded what it needs
SAMPLE_SECONDS = 10.0
PATIENCE_SECONDS = 1800.0
AWAY_SECONDS = (5.0, 60.0)
BETWEEN_SECONDS = (20.0, 60.0)
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
FAULTS = ("kill run", "kill worker", "kill MLflow", "stop MLflow", "kill Prefect", "stop Prefect", "cancel run")
SMALL: dict[str, Any] = {
    "method": "awpo",
    "corpus": {"train_dialogues": 20, "validation_dialogues": 3, "test_dialogues": 3},
    "sft": {"steps": 6, "batch_size": 4, "save_every": 2},
    "policy": {
        "steps": 12,
        "prompts_per_rollout": 2,
        "group_size": 2,
        "steps_per_rollout": 2,
        "micro_batch_size": 2,
        "max_completion_length": 16,
        "save_every": 2,
    },
    "evaluation": {
        "benchmarks": ["held_out"],
        "splits": ["test_phrasings"],
        "instances_per_split": 4,
        "samples": 1,
        "max_completion_length": 16,
    },
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Service:
    """A server or worker that is started again after it was killed, as a supervisor does, and is watched."""

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    lives: list[list[tuple[float, float, int]]] = field(default_factory=list)

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started = time.monotonic()
        self.lives.append([])

    def send(self, number: signal.Signals) -> None:
        assert self.process
        os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()

    def sample(self) -> None:
        """Resident MiB and open files of the process and those that it started and that are no run's."""
        assert self.process
        with suppress(OSError):
            status = Path(f"/proc/{self.process.pid}/statm").read_text("utf-8").split()
            mib = int(status[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            files = len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))
            self.lives[-1].append((time.monotonic() - self.started, mib, files))

    def growth(self) -> list[dict[str, float]]:
        """Of each life that was long enough: memory and open files two minutes after its start, and at its end."""
        found = []
        for life in self.lives:
            old = [sample for sample in life if sample[0] >= YOUNG_SECONDS]
            if len(old) >= 6:
                (_, mib, files), (_, late_mib, late_files) = old[0], old[-1]
                numbers = {"mib": mib, "mib_at_end": late_mib, "files": files, "files_at_end": late_files}
                found.append({"seconds": round(life[-1][0], 1), **{k: round(v, 1) for k, v in numbers.items()}})
        return found


@dataclass
class Pipeline:
    """A training of one seed in one folder, until it is completed; `flow_runs` are its attempts."""

    seed: int
    out: Path
    flow_runs: list[str] = field(default_factory=list)

    @property
    def result(self) -> dict[str, Any]:
        """What must not depend on faults: the hashes of weights, the scores without seconds."""
        weights = {
            str(p.relative_to(self.out)): file_hash(p) for p in sorted(self.out.rglob("checkpoint/*.safetensors"))
        }
        scores = {
            str(p.relative_to(self.out)): [
                {k: v for k, v in row.items() if k != "seconds"} for row in json.loads(p.read_text("utf-8"))
            ]
            for p in sorted(self.out.rglob("scores.json"))
        }
        return {"weights": weights, "scores": scores}


class Soak:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw, self.runs = folder, random.Random(seed), folder / "runs"
        self.runs.mkdir(parents=True)
        prefect, mlflow = free_port(), free_port()
        self.prefect, self.mlflow = f"http://127.0.0.1:{prefect}", f"http://127.0.0.1:{mlflow}"
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "AWPO_"))}
        common = {
            **plain,
            "AWPO_RUNS": str(self.runs),
            "AWPO_ROOTS": str(folder),
            "OMP_NUM_THREADS": "1",
            "DO_NOT_TRACK": "true",
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": f"{self.prefect}/api",
            "PYTHONPATH": str(ROOT),
        }
        server = {**common, "PREFECT_SERVER_API_HOST": "127.0.0.1", "PREFECT_SERVER_API_PORT": str(prefect)}
        store = {
            "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{self.runs / 'mlflow.db'}",
            "MLFLOW_DEFAULT_ARTIFACT_ROOT": str(self.runs / "artifacts"),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
        self.environment = {**common, "MLFLOW_TRACKING_URI": self.mlflow}
        python = [sys.executable, "-m"]
        mlflow_command = [*python, "mlflow", "server", "--host", "127.0.0.1", "--port", str(mlflow), "--workers", "1"]
        worker = [*python, "prefect", "worker", "start", "--pool", "awpo-local"]
        self.services = {
            "Prefect": Service("Prefect", [*python, "prefect", "server", "start"], server, folder / "prefect.log"),
            "MLflow": Service("MLflow", mlflow_command, {**common, **store}, folder / "mlflow.log"),
            "worker": Service("worker", worker, self.environment, folder / "worker.log"),
        }
        self.away: dict[str, float] = {}  # until when, by the monotonic clock
        self.faults: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._sampled = 0.0

    def __enter__(self) -> Soak:
        for name, address in (("Prefect", f"{self.prefect}/api/health"), ("MLflow", f"{self.mlflow}/health")):
            self.services[name].start()
            self.wait(lambda address=address: answers(address), f"{name} answers", 300)  # type: ignore[misc]
        setup = [sys.executable, "-m", "flows.cli", "setup"]
        subprocess.run(setup, env=self.environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        self.services["worker"].start()
        [found] = self.ask("deployments/filter", {"deployments": {"name": {"any_": ["train"]}}})
        self.deployment = found["id"]
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("worker", "MLflow", "Prefect"):
            service = self.services[name]
            if service.process:
                with suppress(ProcessLookupError):
                    os.killpg(service.process.pid, signal.SIGCONT)
                end_group(service.process)

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
        end = time.monotonic() + seconds
        while True:
            with suppress(OSError):
                if found := condition():
                    return found
            if time.monotonic() > end:
                raise RuntimeError(f"not seen within {seconds:g} s: {what}; logs are in {self.folder}")
            time.sleep(1.0)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.prefect}/api/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as response:
            return json.loads(response.read() or "null")

    def begin(self, pipeline: Pipeline) -> None:
        parameters = {**SMALL, "seed": pipeline.seed, "out": str(pipeline.out)}
        made = self.ask(f"deployments/{self.deployment}/create_flow_run", {"parameters": parameters})
        pipeline.flow_runs.append(made["id"])

    def began(self, pipeline: Pipeline) -> bool:
        self.begin(pipeline)
        return True

    def state(self, pipeline: Pipeline) -> str:
        return str(self.ask(f"flow_runs/{pipeline.flow_runs[-1]}")["state_type"])

    def go_on(self, pipelines: list[Pipeline]) -> list[Pipeline]:
        """Starts again what has ended without success; returns what is completed."""
        completed = []
        for pipeline in pipelines:
            with suppress(OSError):  # a server that is away
                state = self.state(pipeline)
                if state not in FINAL or (state != "COMPLETED" and alive_in(pipeline.out)):
                    continue
                self.attempts[state] += 1
                if state == "COMPLETED":
                    completed.append(pipeline)
                else:
                    self.begin(pipeline)
        return completed

    def sample(self) -> None:
        if time.monotonic() - self._sampled >= SAMPLE_SECONDS:
            self._sampled = time.monotonic()
            for name, service in self.services.items():
                if name not in self.away:
                    service.sample()

    def come_back(self, *, all_of_them: bool = False) -> None:
        for name, until in list(self.away.items()):
            if all_of_them or time.monotonic() >= until:
                service = self.services[name]
                assert service.process
                if service.process.poll() is None:
                    service.send(signal.SIGCONT)
                else:
                    service.start()
                del self.away[name]

    def strike(self, pipelines: list[Pipeline]) -> None:
        """One fault; a server that is away already is left alone, and at most one is away at a time."""
        fault = self.draw.choice(FAULTS)
        deed, _, whom = fault.partition(" ")
        victim = self.draw.choice(pipelines)
        if whom in self.services:
            if self.away:
                return
            self.services[whom].send(signal.SIGKILL if deed == "kill" else signal.SIGSTOP)
            self.away[whom] = time.monotonic() + self.draw.uniform(*AWAY_SECONDS)
        elif fault == "cancel run":
            try:
                self.ask(
                    f"flow_runs/{victim.flow_runs[-1]}/set_state",
                    {"state": {"type": "CANCELLING", "name": "Cancelling"}},
                )
            except OSError:
                return
        else:
            of_run = flow_process(victim.flow_runs[-1]) if whom == "run" else alive_in(victim.out)
            if not of_run:
                return
            with suppress(ProcessLookupError):
                os.kill(self.draw.choice(of_run), signal.SIGKILL)
        self.faults[fault] += 1
        print(f"{time.strftime('%H:%M:%S')} {fault}, seed {victim.seed}", flush=True)

    def run(self, pipelines: list[Pipeline], until: float, whole: dict[int, dict[str, Any]]) -> list[Pipeline]:
        """Runs pipelines, each followed by another of its seed, with faults until `until`; returns the completed."""
        done: list[Pipeline] = []
        at = time.monotonic() + self.draw.uniform(*BETWEEN_SECONDS)
        end = max(until, time.monotonic()) + PATIENCE_SECONDS
        for pipeline in pipelines:
            self.begin(pipeline)
        while pipelines and time.monotonic() < end:
            over = time.monotonic() >= until
            self.come_back(all_of_them=over)
            for pipeline in self.go_on(pipelines):
                done.append(pipeline)
                pipelines.remove(pipeline)
                if whole and pipeline.result != whole[pipeline.seed]:
                    self.problems.append(f"{pipeline.out} is another result than the undisturbed one")
                if not over:
                    following = Pipeline(pipeline.seed, self.folder / "out" / f"{len(done)}-seed-{pipeline.seed}")
                    pipelines.append(following)
                    self.wait(lambda following=following: self.began(following), "a run is made", 300)  # type: ignore[misc]
            if not over and time.monotonic() >= at:
                self.strike(pipelines)
                at = time.monotonic() + self.draw.uniform(*BETWEEN_SECONDS)
            self.sample()
            time.sleep(1.0)
        self.problems += [f"{pipeline.out} was never completed" for pipeline in pipelines]
        return done

    def look(self, done: list[Pipeline]) -> dict[str, Any]:
        """What both servers say in the end."""
        import mlflow

        every = [one for pipeline in done for one in pipeline.flow_runs]
        states = Counter(self.ask(f"flow_runs/{one}")["state_type"] for one in every)
        if open_ones := set(states) - FINAL:
            self.problems.append(f"runs are still {sorted(open_ones)} in Prefect")
        client = mlflow.MlflowClient(self.mlflow)
        experiment = client.get_experiment_by_name("awpo")
        assert experiment
        found = client.search_runs([experiment.experiment_id], max_results=5000)
        statuses = Counter(run.info.status for run in found)
        for pipeline in done:
            for path in sorted(pipeline.out.rglob(".*.mlflow.json")):
                run = client.get_run(json.loads(path.read_text("utf-8"))["run_id"])
                if run.info.status != "FINISHED":
                    self.problems.append(f"{path} is {run.info.status} in MLflow")
                steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")]
                if len(steps) != len(set(steps)):
                    self.problems.append(f"steps of {path} stand twice in MLflow")
        if statuses["RUNNING"]:
            self.problems.append(f"{statuses['RUNNING']} runs are still RUNNING in MLflow")
        if left := alive_in(self.folder / "out"):
            self.problems.append(f"processes are left over: {left}")
        return {"prefect": dict(states), "mlflow": dict(statuses)}

    def grown(self) -> dict[str, list[dict[str, float]]]:
        found = {name: service.growth() for name, service in self.services.items()}
        for name, lives in found.items():
            for life in lives:
                if life["mib_at_end"] > GROWTH * life["mib"] + SLACK_MIB:
                    self.problems.append(f"{name} grew from {life['mib']} to {life['mib_at_end']} MiB")
                if life["files_at_end"] > life["files"] + MORE_FILES:
                    self.problems.append(f"{name} holds {life['files_at_end']} files, and held {life['files']}")
        return found


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def alive_in(folder: Path) -> list[int]:
    """Processes whose command line names the folder: the workers of its stages."""
    return _processes(lambda path: str(folder).encode() in (path / "cmdline").read_bytes())


def flow_process(flow_run: str) -> list[int]:
    """The process of a flow run, by the variable that Prefect's worker gives to it."""
    told = f"PREFECT__FLOW_RUN_ID={flow_run}".encode()
    return _processes(lambda path: told in (path / "environ").read_bytes().split(b"\0"))


def _processes(wanted: Callable[[Path], bool]) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted(path):
                found.append(int(path.name))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of faults")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="pipelines at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--output", type=Path, default=Path(".soak.json"), help="figures, as JSON")
    parser.add_argument("--folder", type=Path, help="where to work; none: the system's folder for temporary files")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=arguments.folder)).absolute()
    began = time.monotonic()
    with Soak(folder, arguments.seed) as soak:
        whole = {}
        for pipeline in soak.run(
            [Pipeline(n, folder / "undisturbed" / f"{n}") for n in range(arguments.at_once)], 0.0, {}
        ):
            whole[pipeline.seed] = pipeline.result
        if len(whole) < arguments.at_once:
            raise SystemExit(f"the undisturbed runs did not complete; logs are in {folder}")
        print(f"undisturbed after {time.monotonic() - began:.0f} s", flush=True)
        pipelines = [Pipeline(n, folder / "out" / f"first-seed-{n}") for n in range(arguments.at_once)]
        done = soak.run(pipelines, time.monotonic() + 60 * arguments.minutes, whole)
        soak.wait(lambda: not alive_in(folder / "out"), "all processes have ended", 60)
        figures: dict[str, Any] = {
            "minutes": arguments.minutes,
            "seed": arguments.seed,
            "completed": len(done),
            "attempts": dict(soak.attempts),
            "faults": dict(soak.faults),
            **soak.look(done),
            "growth": soak.grown(),
            "problems": soak.problems,
        }
    arguments.output.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    print(f"{len(done)} pipelines completed; ends of attempts: {dict(soak.attempts)}; faults: {dict(soak.faults)}")
    print(f"{'':10}{'seconds':>9}{'MiB':>9}{'at end':>9}{'files':>8}{'at end':>8}")
    for name, lives in figures["growth"].items():
        for life in lives:
            print(
                f"{name:10}"
                + "".join(f"{life[k]:9.0f}" for k in ("seconds", "mib", "mib_at_end", "files", "files_at_end"))
            )
    for problem in soak.problems:
        print(f"problem: {problem}")
    return bool(soak.problems)


if __name__ == "__main__":
    sys.exit(main())
