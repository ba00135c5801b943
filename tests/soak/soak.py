"""Three trainings at a time for an hour, while things are killed at random: is everything true and the same in the end?

`make soak` starts a Prefect server, an MLflow server and a worker, and lets the worker run small pipelines of three
seeds, one of them in two processes, and evaluations of a model that is served: first undisturbed, then again and again
under faults that are drawn by `--seed` (`FAULTS`). A run that did not complete is started again with the same
parameters. Ends with status 1 where, at the end,

- a run is in no final state in Prefect, an MLflow run of a completed pipeline is not FINISHED, any is RUNNING, or one is
  FINISHED whose attempt did not complete;
- a pipeline's weights, scores or answers are others than the undisturbed one's, or a step stands twice in MLflow;
- a process is left over, a slot is held, a folder is locked;
- memory or open files of a server, of the worker, of the processes of runs or of stages grew beyond the bound that
  stands in `soak_watch.py`. So that each server lives long enough to tell, the second half of the time stops them and
  kills none.

Every sample, fault and end of an attempt is a line of `--output` at once, the figures of the whole are its last line.
`--minutes` is the time of faults; the undisturbed runs and the end come on top.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak_checks import looked_at, result_of, status_of_parent
from soak_servers import SERVED, Servers
from soak_watch import Peaks, Process, processes_of, too_much

SAMPLE_SECONDS = 10.0
PATIENCE_SECONDS = 1800.0
AWAY_SECONDS = (5.0, 60.0)
BETWEEN_SECONDS = (40.0, 120.0)
STUCK_SECONDS = 300.0
"""A run that has no process so long after it left the queue was lost by its worker; a person would cancel it."""
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
OF_SERVERS = ("kill MLflow", "kill Prefect", "kill model", "kill worker", "end worker")
FAULTS = (
    *OF_SERVERS,
    *("stop MLflow", "stop Prefect", "stop model"),
    *("kill run", "end run", "kill stage", "end stage", "kill rank", "end rank"),
    *("cancel run", "fill disk"),
)
EVALUATION = {
    "benchmarks": ["held_out"],
    "splits": ["test_phrasings"],
    "instances_per_split": 4,
    "samples": 1,
    "max_completion_length": 16,
}
SMALL: dict[str, Any] = {
    "method": "awpo",
    "corpus": {"train_dialogues": 20, "validation_dialogues": 1, "test_dialogues": 3},
    "sft": {"steps": 4, "batch_size": 4, "save_every": 2},
    "policy": {
        "steps": 6,
        "prompts_per_rollout": 2,
        "group_size": 2,
        "steps_per_rollout": 2,
        "micro_batch_size": 2,
        "max_completion_length": 16,
        "save_every": 2,
    },
    "evaluation": EVALUATION,
}
TRAININGS = {
    0: {"launch": "cpu", "init": "sft"},
    1: {"launch": "cpu-2", "init": "base"},
    2: {"launch": "cpu", "init": "base"},
}
"""The lanes by their seed: one with fine-tuning, one in two processes."""


@dataclass
class Pipeline:
    """A training of one seed, or an evaluation of the served model (no seed), in one folder until it is completed.

    `flow_runs` are its attempts, `faults` those that struck the one under way.
    """

    seed: int | None
    out: Path
    flow_runs: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    began: float = 0.0
    under_way: bool = False

    @property
    def lane(self) -> str:
        return "served" if self.seed is None else f"seed {self.seed}, {TRAININGS[self.seed]['launch']}"


class Soak:
    def __init__(self, servers: Servers, output: Path, seed: int) -> None:
        self.servers, self.draw, self._output = servers, random.Random(seed), output
        self._bag: list[str] = []
        self.faults: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.problems: list[str] = []
        self.pipelines: list[Pipeline] = []
        self.instances = Path()
        self.peaks = {"runs": Peaks(), "stages": Peaks()}
        self._began, self._sampled = time.monotonic(), 0.0

    def tell(self, kind: str, **row: Any) -> None:
        """A line of the output, and of the screen unless it is a sample."""
        row = {"kind": kind, "seconds": round(time.monotonic() - self._began, 1), **row}
        with open(self._output, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if kind not in ("sample", "figures"):
            print(f"{time.strftime('%H:%M:%S')} {json.dumps(row)}", flush=True)

    def problem(self, text: str) -> None:
        self.problems.append(text)
        self.tell("problem", text=text)

    # pipelines

    def begin(self, pipeline: Pipeline) -> None:
        """Starts an attempt. Raises OSError where Prefect is away."""
        parameters: dict[str, Any] = {"out": str(pipeline.out)}
        if pipeline.seed is None:
            name = "evaluate"
            endpoint = {"base_url": self.servers.model, "model": SERVED, "concurrency": 2, "timeout_seconds": 30}
            evaluation = {**EVALUATION, "samples": 16, "max_completion_length": 48}
            parameters |= {"checkpoint": SERVED, "instances": str(self.instances)}
            parameters |= {"endpoint": endpoint, "evaluation": evaluation}
        else:
            name = "train"
            parameters |= {**SMALL, "seed": pipeline.seed, **TRAININGS[pipeline.seed]}
        # The same key again where the answer to the last request was lost with its server: one run is made of both.
        body = {"parameters": parameters, "idempotency_key": f"{pipeline.out} {len(pipeline.flow_runs)}"}
        made = self.servers.ask(f"deployments/{self.servers.deployments[name]}/create_flow_run", body)
        pipeline.flow_runs.append(made["id"])
        pipeline.under_way, pipeline.faults, pipeline.began = True, [], time.monotonic()

    def go_on(self, pipelines: Iterable[Pipeline], alive: dict[int, Process]) -> list[Pipeline]:
        """Starts again what has ended without success; returns what is completed."""
        completed = []
        for pipeline in pipelines:
            with suppress(OSError):  # a server that is away
                if not pipeline.under_way:
                    self.begin(pipeline)
                    continue
                run = self.servers.ask(f"flow_runs/{pipeline.flow_runs[-1]}")
                processes = [p for p in alive.values() if p.flow_run == pipeline.flow_runs[-1]]
                if run["state_type"] not in FINAL:
                    self._free_stuck(pipeline, run, processes)
                    continue
                if processes:
                    continue
                pipeline.under_way = False  # and begun again at the next look, where it did not complete
                whole = run["state_type"] == "COMPLETED" and complete(pipeline)
                self._end_attempt(pipeline, run, whole)
                if whole:
                    completed.append(pipeline)
        return completed

    def _free_stuck(self, pipeline: Pipeline, run: dict[str, Any], processes: list[Process]) -> None:
        """A run that its worker lost before or after its process: told, and ended as a person would."""
        if run["state_type"] == "SCHEDULED" or processes or time.monotonic() - pipeline.began < STUCK_SECONDS:
            return
        if "worker" in self.servers.away or "Prefect" in self.servers.away or "stuck" in pipeline.faults:
            return
        pipeline.faults.append("stuck")
        pipeline.began = time.monotonic()
        self.tell("stuck", lane=pipeline.lane, run=run["id"], state=run["state_name"])
        self._set_state(run["id"], "CANCELLED")

    def _set_state(self, run: str, state: str) -> None:
        self.servers.ask(
            f"flow_runs/{run}/set_state", {"state": {"type": state, "name": state.capitalize()}, "force": True}
        )

    def _end_attempt(self, pipeline: Pipeline, run: dict[str, Any], whole: bool) -> None:
        state = run["state_type"] if whole or run["state_type"] != "COMPLETED" else "COMPLETED in part"
        told = None if self.servers.away else status_of_parent(self.servers.mlflow, pipeline.out)
        if told == "FINISHED" and run["state_type"] != "COMPLETED":
            self.problem(f"{pipeline.out}: {state} in Prefect, FINISHED in MLflow")
        self.ends[state] += 1
        message = (run["state"].get("message") or "").splitlines()
        self.tell(
            "attempt",
            lane=pipeline.lane,
            out=pipeline.out.name,
            number=len(pipeline.flow_runs),
            state=state,
            mlflow=told,
            faults=pipeline.faults,
            message=message[0][:300] if message else "",
            took=round(time.monotonic() - pipeline.began, 1),
        )

    # faults

    def strike(self, pipelines: list[Pipeline], alive: dict[int, Process], servers_die: bool) -> None:
        """One fault. Each kind comes once before any comes again, but where it finds nobody now."""
        kinds = [fault for fault in FAULTS if servers_die or fault not in OF_SERVERS]
        self._bag = [fault for fault in self._bag if fault in kinds] or self.draw.sample(kinds, len(kinds))
        later = self.draw.sample(kinds, len(kinds))
        for fault in [*self._bag, *(fault for fault in later if fault not in self._bag)]:
            victim = self._strike(fault, pipelines, alive)
            if victim is not None:
                self._bag = [other for other in self._bag if other != fault]
                self.faults[fault] += 1
                self.tell("fault", fault=fault, victim=victim)
                return

    def _strike(self, fault: str, pipelines: list[Pipeline], alive: dict[int, Process]) -> str | None:
        """Whom it struck; None where it found nobody."""
        deed, _, whom = fault.partition(" ")
        if whom in self.servers.services:
            if self.servers.away:
                return None  # one at a time
            seconds = self.draw.uniform(*AWAY_SECONDS)
            self.servers.take_away(whom, deed, seconds)
            return f"for {seconds:.0f} s"
        found = [(pipeline, process) for pipeline in pipelines for process in victims(whom, pipeline, alive)]
        if not found:
            return None
        victim, target = self.draw.choice(found)
        try:
            if fault == "cancel run":
                state = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
                self.servers.ask(f"flow_runs/{target.flow_run}/set_state", state)
            elif fault == "fill disk":
                # For one process the disk is full: it may write no file beyond its first kilobyte.
                resource.prlimit(target.number, resource.RLIMIT_FSIZE, (1024, 1024))
            else:
                os.kill(target.number, signal.SIGKILL if deed == "kill" else signal.SIGTERM)
        except OSError:  # Prefect is away, or the process has just ended
            return None
        victim.faults.append(fault)
        return victim.lane

    # the whole

    def sample(self, alive: dict[int, Process]) -> None:
        if time.monotonic() - self._sampled < SAMPLE_SECONDS:
            return
        self._sampled = time.monotonic()
        for process in alive.values():
            if process.flow_run:
                self.peaks["stages" if process.stage else "runs"].see(process)
        self.tell("sample", services=self.servers.sample())

    def run(self, pipelines: list[Pipeline], minutes: float, whole: dict[int | None, dict[str, Any]]) -> list[Pipeline]:
        """Runs pipelines, with faults for `minutes` and each followed by another of its lane; returns the completed.

        Without `minutes` each runs once, undisturbed.
        """
        done: list[Pipeline] = []
        now = time.monotonic()
        half, until, end = now + 30 * minutes, now + 60 * minutes, now + 60 * minutes + PATIENCE_SECONDS
        at = now + self.draw.uniform(*BETWEEN_SECONDS)
        self.pipelines += pipelines
        while pipelines and (now := time.monotonic()) < end:
            over = now >= until
            for text in self.servers.come_back(all_of_them=over):
                self.problem(text)
            alive = processes_of(self.servers.folder)
            for pipeline in self.go_on(pipelines, alive):
                done.append(pipeline)
                pipelines.remove(pipeline)
                found = result_of(pipeline.out)
                if whole and found != whole[pipeline.seed]:
                    self.problem(f"{pipeline.out} is another result than the undisturbed one: {found}")
                if not over:
                    out = self.servers.folder / "out" / f"{len(done)}-{pipeline.lane.split(',')[0].replace(' ', '-')}"
                    pipelines.append(Pipeline(pipeline.seed, out))
                    self.pipelines.append(pipelines[-1])
            if not over and now >= at:
                self.strike(pipelines, alive, servers_die=now < half)
                at = now + self.draw.uniform(*BETWEEN_SECONDS)
            self.sample(alive)
            time.sleep(1.0)
        for pipeline in pipelines:
            self.problem(f"{pipeline.out} was never completed")
        return done

    def grown(self) -> dict[str, Any]:
        """Memory and open files over time; what is beyond the bound is a problem."""
        lives = [life.growth() for service in self.servers.services.values() for life in service.lives]
        found: dict[str, Any] = {"lives": [life for life in lives if life]}
        for life in found["lives"]:
            before, after = (life["mib_warm"], life["files_warm"]), (life["mib_at_end"], life["files_at_end"])
            self.problems += too_much(life["name"], before, after)
        for name, peaks in self.peaks.items():
            if told := peaks.thirds():
                found[name] = told
                first = told["mib_of_first_third"], told["files_of_first_third"]
                last = told["mib_of_last_third"], told["files_of_last_third"]
                self.problems += too_much(f"a process of {name}", first, last)
        return found


def victims(whom: str, pipeline: Pipeline, alive: dict[int, Process]) -> list[Process]:
    """The processes of a pipeline's attempt that a fault may strike: that of the run, or those of a stage or rank."""
    if not pipeline.under_way:
        return []
    of_run = [process for process in alive.values() if process.flow_run == pipeline.flow_runs[-1]]
    match whom:
        case "run":
            return [p for p in of_run if p.parent not in alive or not alive[p.parent].flow_run]
        case "rank":
            return [p for p in of_run if p.stage and p.rank]
        case _:
            return [p for p in of_run if p.stage]


def complete(pipeline: Pipeline) -> bool:
    """Whether a completed run has its whole result: an evaluation may lack answers, and is taken up again then."""
    manifests = [json.loads(p.read_text("utf-8")) for p in pipeline.out.rglob("evaluation/**/manifest.json")]
    return bool(manifests) and not any(manifest["counts"].get("missing") for manifest in manifests)


def undisturbed(soak: Soak, folder: Path) -> dict[int | None, dict[str, Any]]:
    """The results of each lane without faults, made where they are not in `folder`; serves the model of one of them.

    Raises SystemExit where one does not complete.
    """
    lanes = [Pipeline(seed, folder / f"seed-{seed}") for seed in TRAININGS]
    soak.run([lane for lane in lanes if not complete(lane)], 0.0, {})
    if all(map(complete, lanes)):
        [soak.instances] = {path.parent for path in lanes[0].out.rglob("rationales/manifest.json")}
        [checkpoint] = {path.parent for path in lanes[0].out.rglob("awpo*/checkpoint/config.json")}
        soak.servers.serve(checkpoint)
        lanes.append(Pipeline(None, folder / "served"))
        soak.run([lane for lane in lanes if not complete(lane)], 0.0, {})
    if not all(map(complete, lanes)) or len(lanes) == len(TRAININGS):
        raise SystemExit(f"the undisturbed runs did not complete; logs are in {soak.servers.folder}")
    return {lane.seed: result_of(lane.out) for lane in lanes}


def soaked(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Figures and problems of a soak in `folder`, servers started and ended."""
    try:
        with Servers(folder, arguments.undisturbed) as servers:
            soak = Soak(servers, arguments.output, arguments.seed)
            figures = under_faults(soak, arguments)
        if left := processes_of(folder):
            soak.problem(f"processes are left over: {[process.command for process in left.values()]}")
    finally:
        for number in processes_of(folder):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
    soak.tell("figures", **figures, problems=soak.problems)
    return figures, soak.problems


def under_faults(soak: Soak, arguments: argparse.Namespace) -> dict[str, Any]:
    """The undisturbed runs, those under faults, and what is found in the end."""
    folder = soak.servers.folder
    whole = undisturbed(soak, arguments.undisturbed or folder / "undisturbed")
    soak.tell("undisturbed", folder=str(folder))
    before, began = len(soak.pipelines), time.monotonic()
    soak.ends.clear()
    lanes = [Pipeline(seed, folder / "out" / f"first-{seed}") for seed in (*TRAININGS, None)]
    done = soak.run(lanes, arguments.minutes, whole)
    figures: dict[str, Any] = {
        "minutes_of_faults": arguments.minutes,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "seed": arguments.seed,
        "pipelines_begun": len(soak.pipelines) - before,
        "pipelines_completed": len(done),
        "ends_of_attempts": dict(soak.ends),
        "faults": dict(soak.faults),
    }
    flow_runs = [one for pipeline in soak.pipelines for one in pipeline.flow_runs]
    figures |= looked_at(soak.servers, [pipeline.out for pipeline in soak.pipelines], flow_runs, soak.problem)
    return figures | {"growth": soak.grown()}


def show(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        if name != "growth":
            print(f"{name}: {value}")
    for life in figures["growth"].pop("lives"):
        print(life)
    for name, told in figures["growth"].items():
        print(f"{name}: {told}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of faults")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--output", type=Path, default=Path(".soak.jsonl"), help="figures, as lines of JSON")
    parser.add_argument("--folder", type=Path, help="where to work; none: the system's folder for temporary files")
    parser.add_argument("--undisturbed", type=Path, help="undisturbed results that an earlier soak of this code kept")
    parser.add_argument("--keep", action="store_true", help="keep the folder also where all is well")
    arguments = parser.parse_args()
    arguments.output = arguments.output.absolute()
    if arguments.undisturbed:
        arguments.undisturbed = arguments.undisturbed.resolve()
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=arguments.folder)).resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures, problems = soaked(arguments, folder)
    show(figures)
    for problem in problems:
        print(f"problem: {problem}")
    if problems or arguments.keep:
        print(f"all of it is in {folder}")
    else:
        shutil.rmtree(folder)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
