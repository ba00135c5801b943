"""Training steps of stock TRL and of AWPO at many shapes: `awpo bench step` for each, gone on with where it stood.

    python tests/benchmarks/bench_step.py [--shapes full|three] [--repeats N] [--out FILE]

`make bench` measures three shapes and asks whether the aims are met: at least 3 times stock TRL at 1,024 + 64 tokens and
8 answers, at least 5 times at 2,048 + 64 and 16; nowhere slower than 0.95 of it; no more memory. Status 1 where one is
not. The full grid on 3 million parameters takes hours; three shapes of it are also measured on 30 million.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from awpo.training.step_benchmark import Shape, measure

THREE = [Shape(256, 64, 4), Shape(1024, 64, 8), Shape(2048, 64, 16)]
GRID = [Shape(prompt, answer, group) for group in (4, 8, 16) for answer in (64, 256) for prompt in (256, 1024, 2048)]
LARGER = [Shape(prompt, 64, 8, model="30m") for prompt in (256, 1024, 2048)]
AIMS = {(1024, 64, 8, "3m"): 3.0, (2048, 64, 16, "3m"): 5.0}
SLOWEST = 0.95


def key(found: dict[str, Any]) -> tuple[int, int, int, str]:
    return found["prompt"], found["answer"], found["group"], found["model"]


def missed(found: dict[str, Any]) -> list[str]:
    """The aims that one shape misses, a sentence each."""
    aim = AIMS.get(key(found), SLOWEST)
    reasons = [] if found["ratio_median"] >= aim else [f"{found['ratio_median']} times stock TRL, the aim is {aim}"]
    if found["ours"]["peak_memory"] > found["stock"]["peak_memory"]:
        reasons.append("more memory than stock TRL")
    if found["max_logprob_difference"] > 1e-5 or found["gradient_difference"] > 1e-4:
        reasons.append("other log-probabilities or gradients than stock TRL")
    return reasons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=("three", "full"), default="three")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(".bench-step.jsonl"))
    arguments = parser.parse_args()
    known = {}
    if arguments.out.exists():
        known = {key(row): row for row in map(json.loads, arguments.out.read_text("utf-8").splitlines())}
    for shape in THREE if arguments.shapes == "three" else [*GRID, *LARGER]:
        name = (shape.prompt, shape.answer, shape.group, shape.model)
        if name in known:
            continue
        print(f"# {shape}", file=sys.stderr, flush=True)
        known[name] = measure(shape, arguments.repeats, lambda text: print(text, file=sys.stderr, flush=True))
        with open(arguments.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(known[name]) + "\n")
    print(
        "| model | prompt + answer | group | micro-batch, stock / ours | stock, s | ours, s | ratio | smallest, largest | "
        "memory, stock / ours, MiB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    failed = []
    for found in known.values():
        stock, ours = found["stock"], found["ours"]
        print(
            f"| {found['model']} | {found['prompt']} + {found['answer']} | {found['group']} | "
            f"{found['micro_batch_stock']} / {found['micro_batch_ours']} | {stock['processor_seconds']:.2f} | {ours['processor_seconds']:.2f} | {found['ratio_median']:.2f} | "
            f"{found['ratio_min']:.2f}, {found['ratio_max']:.2f} | {stock['peak_memory'] / 2**20:.0f} / "
            f"{ours['peak_memory'] / 2**20:.0f} |"
        )
        failed += [f"{key(found)}: {reason}" for reason in missed(found)]
    for line in failed:
        print(f"missed: {line}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
