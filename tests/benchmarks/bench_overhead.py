"""What Prefect and MLflow cost: a pipeline as a flow, against the same stages called as plain functions.

`make bench-overhead` starts the servers, then runs both in turn, each in a process of its own and an empty folder: the
command `awpo train`, which finds the server, and the stages with nothing around them, in the same order, two at a time
where the flow has two at a time. The flow also compares and reports, which the plain stages don't. Aim: at most 10% and
20 s more. Both end with the same checkpoints, to the byte; status 1 where they don't. A quiet machine, some ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("grpo", "awpo")
MOST_SHARE, MOST_SECONDS = 0.10, 20.0


def plain(preset: str, out: Path) -> None:
    """All stages of a pipeline, without a flow, a task or a tracked run."""
    from awpo.data.decompose import decompose_source
    from awpo.data.rationales import write_rationales
    from awpo.embedded.corpus import write_corpus
    from awpo.embedded.model import build_model
    from awpo.models import resolve_model
    from awpo.processes import run_worker
    from flows.parameters import read_pipeline

    settings = read_pipeline(preset)
    corpus, instances, rationales, base = (out / name for name in ("corpus", "instances", "rationales", "base"))
    write_corpus(corpus, settings.corpus)
    decompose_source(corpus, instances, format=settings.format, config=settings.decomposition)
    write_rationales(instances, rationales, settings.rationales)
    build_model(resolve_model(settings.model).location, rationales, base, seed=settings.seed)

    def train(stage: str, start: Path, folder: Path, config: object, threads: int) -> Path:
        job = {"model": str(start), "instances": str(rationales), "out": str(folder), "config": config}
        run_worker(f"awpo.training.{stage}", job, folder, threads=threads)
        return folder / "checkpoint"

    def evaluate(checkpoint: Path, folder: Path, threads: int, **changes: object) -> None:
        config = settings.evaluation.model_copy(update=changes).model_dump(mode="json")
        job = {"checkpoint": str(checkpoint), "instances": str(rationales), "out": str(folder), "config": config}
        run_worker("evaluation", job, folder, threads=threads)

    def train_and_evaluate(method: str) -> None:
        config = settings.policy.with_method(method, settings.seed).model_dump(mode="json")
        evaluate(train("policy", sft, out / method, config, 1), out / "evaluations" / method, 1)

    sft = train("sft", base, out / "sft", settings.sft.with_seed(settings.seed).model_dump(mode="json"), 2)
    before = {"benchmarks": ("held_out",), "splits": ("validation",), "samples": max(8, settings.evaluation.samples)}
    evaluate(sft, out / "before", 2, temperature=settings.policy.temperature, **before)
    with ThreadPoolExecutor(2) as pool:
        work = [pool.submit(train_and_evaluate, method) for method in METHODS]
        work += [pool.submit(evaluate, start, out / "evaluations" / start.name, 1) for start in (base, sft)]
        for one in work:
            one.result()


def checkpoints(out: Path) -> dict[str, str]:
    """Hash of the trained weights by stage."""
    from awpo.files import file_hash

    found = sorted(out.rglob("checkpoint/model.safetensors"))
    return {path.parents[1].name: file_hash(path) for path in found}


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Seconds of wall time and of the processor, all children together. Raises CalledProcessError."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Runs both in turn and prints a table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="quick", help="pipeline that is run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain:
        plain(arguments.preset, arguments.plain)
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-overhead-") as name:
        os.environ["AWPO_RUNS"] = f"{name}/runs"  # before the modules below read it
        from flows.prefect_server import free_port
        from flows.servers import Addresses, served

        with served(Addresses(free_port(), free_port()), lambda text: print(text, flush=True)):
            return compare(Path(name), arguments.preset, arguments.rounds)


def compare(folder: Path, preset: str, rounds: int) -> int:
    methods = [part for method in METHODS for part in ("--method", method)]
    taken: dict[str, list[tuple[float, float]]] = {"plain": [], "flow": []}
    weights = []
    for number in range(rounds):
        for kind in ("plain", "flow") if number % 2 == 0 else ("flow", "plain"):
            out = folder / f"{kind}-{number}"
            command = {
                "plain": [sys.executable, __file__, "--preset", preset, "--plain", str(out)],
                "flow": [sys.executable, "-m", "flows.cli", "train", "--preset", preset, *methods, "--out", str(out)],
            }[kind]
            taken[kind].append(timed(command, {**os.environ, "PYTHONPATH": str(ROOT)}))
            weights.append(checkpoints(out))
            print(
                f"{kind:6}{taken[kind][-1][0]:8.1f} s of wall time {taken[kind][-1][1]:8.1f} s of the processor",
                flush=True,
            )
    middle = {kind: [statistics.median(column) for column in zip(*rows, strict=True)] for kind, rows in taken.items()}
    over = middle["flow"][0] - middle["plain"][0]
    allowed = MOST_SHARE * middle["plain"][0] + MOST_SECONDS
    print(f"the flow takes {over:.1f} s longer ({over / middle['plain'][0]:.1%}); aim: at most {allowed:.1f} s")
    print(json.dumps({"wall_seconds": middle, "over_seconds": over, "allowed_seconds": allowed}))
    if any(one != weights[0] for one in weights) or not weights[0]:
        print("problem: the flow and the plain stages ended with other checkpoints")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
