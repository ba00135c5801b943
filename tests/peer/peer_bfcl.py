"""Do we score BFCL v3 as its authors do? One set of outputs, scored by this project and by the official script.

    python tests/peer/peer_bfcl.py [--seed N] [--environment FOLDER] [--stand-ins]

Makes outputs for all 4,441 items from a seed, scores them here, and has the package's own evaluation score them in an
environment of its own (FOLDER, made on the first run: half a gigabyte, mostly vendors' clients). Compared are the verdict on
every item, the accuracy of every category and every average of the leaderboard, which must be equal to the last
digit. `--stand-ins` runs the official code of the package installed here instead, with stand-ins for the vendors'
clients. Ends with an error where anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

import bfcl_outputs  # noqa: E402
from official_bfcl import COLUMNS, MODEL  # noqa: E402

from evaluation.bfcl.averages import AVERAGES  # noqa: E402
from evaluation.bfcl.benchmark import verdicts  # noqa: E402
from evaluation.bfcl.data import CATEGORIES, VERSION, read_category  # noqa: E402
from evaluation.bfcl.process import CheckerProcess, Verdict  # noqa: E402


def score(made: dict[str, dict[str, bfcl_outputs.Output]]) -> dict[str, dict[str, Verdict]]:
    """Our verdicts, by category and item."""
    found: dict[str, dict[str, Verdict]] = {}
    with CheckerProcess() as checker:
        for category in CATEGORIES:
            items = read_category(category)
            scored = verdicts(checker, [(item, made[category][item.id]) for item in items])
            found[category] = {item.id: verdict for item, verdict in zip(items, scored, strict=True)}
    return found


def official(results: Path, folder: Path, python: str, options: list[str]) -> dict[str, Any]:
    """The official numbers on stored results; the process sees nothing of our environment but its path."""
    numbers = folder / "numbers.json"
    environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    environment |= {"HOME": str(folder), "BFCL_PROJECT_ROOT": str(folder), "LANG": "C.UTF-8", "TZ": "UTC"}
    command = [python, str(HERE / "official_bfcl.py"), str(results), str(folder / "scores"), str(numbers), *options]
    finished = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f"the official evaluation failed:\n{finished.stdout[-2000:]}\n{finished.stderr[-2000:]}")
    return dict(json.loads(numbers.read_text("utf-8")))


def differences(ours: dict[str, dict[str, Verdict]], theirs: dict[str, Any]) -> list[str]:
    """Every verdict, accuracy and average that is not the same."""
    found: list[str] = []
    accuracy: dict[str, float] = {}
    for category, scored in ours.items():
        wrong = {name for name, verdict in scored.items() if not verdict.valid}
        listed = theirs["categories"][category]
        accuracy[category] = sum(verdict.valid for verdict in scored.values()) / len(scored)
        found += [f"{name}: wrong here, right there" for name in sorted(wrong - set(listed["wrong"]))]
        found += [f"{name}: right here, wrong there" for name in sorted(set(listed["wrong"]) - wrong)]
        if (accuracy[category], len(scored)) != (listed["accuracy"], listed["total_count"]):
            found.append(f"{category}: {accuracy[category]!r} here, {listed['accuracy']!r} there")
    sizes = {category: len(scored) for category, scored in ours.items()}
    for average in AVERAGES:
        table, column = COLUMNS[average.name]
        value, there = average.value(accuracy, sizes), theirs["tables"][table][column]
        print(f"{average.name:24} {value!r:22} {there!r:22} {'equal' if value == there else 'DIFFERENT'}")
        if value != there:
            found.append(f"{average.name}: {value!r} here, {there!r} there")
    return found


def own_environment(folder: Path) -> str:
    """The interpreter of an environment with the whole package; made where it is not there yet."""
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        wanted = [f"bfcl-eval=={VERSION}", "soundfile"]  # qwen-agent imports soundfile without asking for it
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
        (folder / ".ready").touch()
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-bfcl")
    parser.add_argument("--stand-ins", action="store_true")
    arguments = parser.parse_args()
    python, options = sys.executable, ["--stand-ins"]
    if not arguments.stand_ins:
        python, options = own_environment(arguments.environment), []
    made = bfcl_outputs.outputs(arguments.seed)
    started = time.perf_counter()
    ours = score(made)
    print(f"{sum(map(len, ours.values()))} items scored here in {time.perf_counter() - started:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        bfcl_outputs.write_results(Path(folder, "results"), MODEL, made)
        theirs = official(Path(folder, "results"), Path(folder), python, options)
    found = differences(ours, theirs)
    if found:
        sys.exit("\n".join([f"{len(found)} differences:", *found[:50]]))
    print("every verdict, accuracy and average is the same")


if __name__ == "__main__":
    main()
