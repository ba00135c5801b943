"""Preparing a million dialogues on this machine: does memory stay the same, and is a killed run the same in the end?

`make soak-data` writes seeded variations of the embedded corpus, 20,000 and 1,000,000 of them, one after another and
never all in memory. Both are decomposed, and their near-duplicates taken out, each in a process of its own whose peak
memory is read when it ends, and that of its largest worker with it. Then the decomposition of the large one is killed
after a part drawn at random, and run again. Ends with status 1 where a peak grows by more than a fifth, or where the
second run's bytes are others than those of the run that nobody killed.

A million take about 12 GB of disk, and on two quiet cores about half an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from awpo.artifacts import read_manifest
from awpo.config import CorpusConfig
from awpo.embedded.corpus import dialogues

GROWTH = 1.2
BYTES_PER_DIALOGUE = 12_000  # of disk, at the most that is there at a time

STAGE = """
import json, resource, sys, time
from pathlib import Path
from awpo.data.decompose import decompose_source
from awpo.data.selection import select_instances
from awpo.data.settings import NearDuplicatesConfig, SelectConfig
stage, given, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
start = time.monotonic()
if stage == "decompose":
    manifest = decompose_source(given, out)
else:
    manifest = select_instances([given], out, SelectConfig(near_duplicates=NearDuplicatesConfig()))
peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps({"seconds": time.monotonic() - start, "peaks": peaks, "counts": manifest.counts}))
"""


def variations(number: int, seed: int) -> Iterator[str]:
    """Lines of so many dialogues: those of the embedded corpus, each time with other words added to what users say."""
    base = [dialogue.to_json() for dialogue in dialogues(CorpusConfig(seed=seed))]
    said = [message["content"] for line in base for message in line["messages"] if message["role"] == "user"]
    words, draw = sorted({word for text in said for word in text.split()}), random.Random(seed)
    for index in range(number):
        line = dict(base[index % len(base)])
        line["id"] = f"{line['id']}-{index // len(base)}"
        line["messages"] = [
            {**message, "content": f"{message['content']} {' '.join(draw.choices(words, k=12))}"}
            if message["role"] == "user"
            else message
            for message in line["messages"]
        ]
        yield json.dumps(line, ensure_ascii=False) + "\n"


def write(path: Path, number: int, seed: int) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(variations(number, seed))


def start_stage(stage: str, given: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STAGE, stage, str(given), str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def run_stage(stage: str, given: Path, out: Path) -> dict[str, Any]:
    """Runs a stage to its end; returns seconds, counts, and the peaks of the process and its largest worker in KiB."""
    process = start_stage(stage, given, out)
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{stage} of {given} failed with code {process.returncode}")
    return dict(json.loads(said))


def kill_after(source: Path, out: Path, parts: int) -> int:
    """Starts a decomposition and kills it, with its workers, when so many parts are settled; returns how many were."""
    process = start_stage("decompose", source, out)
    while len(list(out.glob(".parts/*.done"))) < parts:
        if process.poll() is not None:
            raise SystemExit("the decomposition ended before it could be killed")
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return len(list(out.glob(".parts/*.done")))


def main() -> int:
    """Runs everything and prints a table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=20_000, help="dialogues of the small source")
    parser.add_argument("--large", type=int, default=1_000_000, help="dialogues of the large one")
    parser.add_argument("--seed", type=int, default=0, help="of the corpus, and of the part after which is killed")
    parser.add_argument("--folder", type=Path, help="where to work; none: the system's folder for temporary files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-data-", dir=arguments.folder) as name:
        folder = Path(name)
        needed = arguments.large * BYTES_PER_DIALOGUE
        if (free := shutil.disk_usage(folder).free) < needed:
            raise SystemExit(f"{folder} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} are needed; give --folder")
        return soak(folder, arguments.small, arguments.large, arguments.seed)


def soak(folder: Path, small: int, large: int, seed: int) -> int:
    problems: list[str] = []
    peaks: dict[str, list[list[int]]] = {"decompose": [], "select": []}
    print(f"{'':24}{'dialogues':>11}{'seconds':>9}{'process, MiB':>14}{'worker, MiB':>13}")
    for number in (small, large):
        source, instances = folder / f"{number}.jsonl", folder / f"instances-of-{number}"
        write(source, number, seed)
        for stage, given, out in (
            ("decompose", source, instances),
            ("select", instances, folder / f"selected-of-{number}"),
        ):
            found = run_stage(stage, given, out)
            peaks[stage].append(found["peaks"])
            own, worker = (peak / 1024 for peak in found["peaks"])
            print(f"{stage:24}{number:11,}{found['seconds']:9.0f}{own:14.1f}{worker:13.1f}", flush=True)
            if stage == "decompose" and (read := found["counts"]["rows_read"]) != number:
                problems.append(f"{read} of {number} rows were read")
    for stage, (before, after) in peaks.items():
        for who, one, other in zip(("process", "worker"), before, after, strict=True):
            if other > GROWTH * one:
                problems.append(f"the {who} of {stage} took {other / one:.2f} times the memory")
    shutil.rmtree(folder / f"selected-of-{large}")
    clean = read_manifest(folder / f"instances-of-{large}")
    assert clean is not None
    parts = sum(name.endswith(".parquet") for name in clean.outputs)
    if parts > 2:
        killed = kill_after(folder / f"{large}.jsonl", folder / "killed", random.Random(seed).randrange(1, parts - 1))
        run_stage("decompose", folder / f"{large}.jsonl", folder / "killed")
        resumed = read_manifest(folder / "killed")
        same = resumed is not None and resumed.outputs == clean.outputs and resumed.counts == clean.counts
        print(f"killed after {killed} of {parts} parts and run again: {'the same bytes' if same else 'OTHER BYTES'}")
        if not same:
            problems.append("the run that was killed gave other bytes")
    else:
        problems.append("the large source is too small to be cut into parts; give more dialogues")
    for problem in problems:
        print(f"problem: {problem}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
