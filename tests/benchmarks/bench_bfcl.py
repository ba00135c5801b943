"""What scoring all 4,441 items of BFCL v3 from stored outputs costs, here and by the official script.

    python tests/benchmarks/bench_bfcl.py [--rounds N]

Both read the same files of outputs and reach a verdict on every item, in turn, in processes of their own. Counted is
processor time, user and system: that of the whole process and its children, and that without imports (of ours, the
checkers' process is counted with its imports). The official script is that of the package installed here, with
stand-ins for the vendors' clients, whose imports would cost it several seconds more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PEER = ROOT / "tests" / "peer"
sys.path[:0] = [str(ROOT), str(PEER)]

import bfcl_outputs  # noqa: E402
from official_bfcl import MODEL  # noqa: E402

OURS = """
import json, resource, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from peer_bfcl import score
started = time.process_time()
made = {}
for path in Path(sys.argv[1]).glob("*/*_result.json"):
    rows = map(json.loads, path.read_text("utf-8").splitlines())
    made[path.name[len("BFCL_v3_"):-len("_result.json")]] = {row["id"]: row["result"] for row in rows}
verdicts = score(made)
children = resource.getrusage(resource.RUSAGE_CHILDREN)
seconds = time.process_time() - started + children.ru_utime + children.ru_stime
valid = sum(verdict.valid for found in verdicts.values() for verdict in found.values())
Path(sys.argv[2]).write_text(json.dumps({"processor_seconds": seconds, "valid": valid}))
"""


def measure(command: list[str], numbers: Path) -> tuple[float, dict[str, float]]:
    """Processor seconds of a command and its children, and what it wrote."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=numbers.parent)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{command[1]} ended with status {status}")
    return usage.ru_utime + usage.ru_stime, json.loads(numbers.read_text("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    found: dict[str, list[tuple[float, float]]] = {"here": [], "official": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bfcl_outputs.write_results(folder / "results", MODEL, bfcl_outputs.outputs(seed=0))
        commands = {
            "here": [sys.executable, "-c", OURS, str(folder / "results"), str(folder / "here.json"), *sys.path[:2]],
            "official": [
                *(sys.executable, str(PEER / "official_bfcl.py"), str(folder / "results"), str(folder / "scores")),
                *(str(folder / "official.json"), "--stand-ins"),
            ],
        }
        for _ in range(rounds):
            for who, command in commands.items():
                whole, numbers = measure(command, folder / f"{who}.json")
                valid = numbers.get("valid") or sum(row["correct_count"] for row in numbers["categories"].values())  # type: ignore[attr-defined]
                found[who].append((whole, numbers["processor_seconds"]))
                print(f"{who:9} {whole:6.2f} s in all, {numbers['processor_seconds']:6.2f} s of scoring, {valid} valid")
    for who, times in found.items():
        whole, scoring = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{who:9} median {whole:6.2f} s in all, {scoring:6.2f} s of scoring")


if __name__ == "__main__":
    main()
