"""Do we score BFCL as its authors do? One set of outputs, scored by this project and by the official script.

    python tests/peer/peer_bfcl.py [--version v3|v4] [--seed N] [--environment FOLDER] [--stand-ins]

Makes outputs for all items of a version from a seed, scores them here, and has the package's own evaluation score them.
For version 3 that is done in an environment of its own (FOLDER, made on the first run: half a gigabyte, mostly vendors'
clients); `--stand-ins` runs the official code of the package installed here instead, with stand-ins for these clients.
Version 4 is always run so, in the environment of `make install-bfcl-v4`. Compared are the verdict on every item, the
accuracy of every category and every average of the leaderboard, which must be equal to the last digit. Ends with an
error where anything differs.
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
from official_bfcl import COLUMNS_V3, COLUMNS_V4, MODEL  # noqa: E402

from evaluation.bfcl.benchmark import verdicts  # noqa: E402
from evaluation.bfcl.data import read_category  # noqa: E402
from evaluation.bfcl.package import find_package  # noqa: E402
from evaluation.bfcl.process import CheckerProcess, Verdict  # noqa: E402
from evaluation.bfcl.versions import V3, V4, Version  # noqa: E402

COLUMNS = {V3: COLUMNS_V3, V4: COLUMNS_V4}


def score(made: dict[str, dict[str, bfcl_outputs.Output]], version: Version = V3) -> dict[str, dict[str, Verdict]]:
    """Our verdicts, by category and item."""
    found: dict[str, dict[str, Verdict]] = {}
    with CheckerProcess(version=version) as checker:
        for category in version.categories:
            items = read_category(category, version)
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


def differences(ours: dict[str, dict[str, Verdict]], theirs: dict[str, Any], version: Version) -> list[str]:
    """Every verdict, accuracy and average that is not the same; prints all accuracies and averages of both."""
    found: list[str] = []
    accuracy: dict[str, float] = {}
    for category, scored in ours.items():
        wrong = {name for name, verdict in scored.items() if not verdict.valid}
        listed = theirs["categories"][category]
        accuracy[category] = sum(verdict.valid for verdict in scored.values()) / len(scored)
        found += [f"{name}: wrong here, right there" for name in sorted(wrong - set(listed["wrong"]))]
        found += [f"{name}: right here, wrong there" for name in sorted(set(listed["wrong"]) - wrong)]
        found += _compared(f"{category} ({len(scored)})", accuracy[category], listed["accuracy"])
        if len(scored) != listed["total_count"]:
            found.append(f"{category}: {len(scored)} items here, {listed['total_count']} there")
    sizes = {category: len(scored) for category, scored in ours.items()}
    for average in version.averages:
        table, column = COLUMNS[version][average.name]
        found += _compared(average.name, average.value(accuracy, sizes), theirs["tables"][table][column])
    return found


def _compared(name: str, here: float, there: float) -> list[str]:
    print(f"{name:36} {here!r:22} {there!r:22} {'equal' if here == there else 'DIFFERENT'}")
    return [] if here == there else [f"{name}: {here!r} here, {there!r} there"]


def own_environment(folder: Path) -> str:
    """The interpreter of an environment with the whole package; made where it is not there yet."""
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        wanted = [f"bfcl-eval=={V3.release}", "soundfile"]  # qwen-agent imports soundfile without asking for it
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
        (folder / ".ready").touch()
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", choices=("v3", "v4"), default="v3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-bfcl")
    parser.add_argument("--stand-ins", action="store_true")
    arguments = parser.parse_args()
    version = V3 if arguments.version == "v3" else V4
    python, options = find_package(version).python, ["--stand-ins"]
    if version is V3 and not arguments.stand_ins:
        python, options = own_environment(arguments.environment), []
    made = bfcl_outputs.outputs(arguments.seed, version)
    started = time.perf_counter()
    ours = score(made, version)
    print(f"{sum(map(len, ours.values()))} items scored here in {time.perf_counter() - started:.1f} s")
    print(f"{'':36} {'here':22} {'there':22}")
    with tempfile.TemporaryDirectory() as folder:
        bfcl_outputs.write_results(Path(folder, "results"), MODEL, made, version)
        theirs = official(Path(folder, "results"), Path(folder), python, options)
    found = differences(ours, theirs, version)
    if found:
        sys.exit("\n".join([f"{len(found)} differences:", *found[:50]]))
    print("every verdict, accuracy and average is the same")


if __name__ == "__main__":
    main()
