"""Runs the parts of infra/gpu_check.sh, which says what they are for; each is a process of its own and fails alone.

    python infra/gpu_check.py [--cpu] [--only PART] [--out gpu_check.json]

A part's process prints its state, and numbers or reason, as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

INFRA = Path(__file__).resolve().parent
sys.path[:0] = [str(INFRA.parent), str(INFRA)]  # where the project isn't installed

from gpu_check_parts import CPU, GPU, PARTS, Scale, Skipped  # noqa: E402

LIMIT_SECONDS = 900


def run_part(name: str, on_cpu: bool) -> dict[str, Any]:
    """A part in a process of its own: its state (ok, skipped or failed), seconds, numbers or reason."""
    start = time.monotonic()
    command = [sys.executable, __file__, "--part", name, *(["--cpu"] if on_cpu else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"state": "failed", "reason": f"no end after {LIMIT_SECONDS} s", "seconds": float(LIMIT_SECONDS)}
    seconds = round(time.monotonic() - start, 1)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"state"')]
    if lines:
        return {**json.loads(lines[-1]), "seconds": seconds}
    said = [line for line in done.stderr.splitlines() if line.strip()]
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return {"state": "failed", "reason": f"{ended}: {said[-1] if said else 'nothing was said'}", "seconds": seconds}


def part_main(name: str, scale: Scale) -> None:
    """One part in this process; whatever goes wrong becomes its reason."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found: dict[str, Any] = {"state": "ok", "numbers": PARTS[name](scale, Path(folder))}
        except Skipped as reason:
            found = {"state": "skipped", "reason": str(reason)}
        except Exception as error:  # noqa: BLE001 -- whatever it was is the part's reason
            found = {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
    print(json.dumps(found), flush=True)


def told(name: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    if found["state"] != "ok":
        return f"{name:10} {found['state']:8} {found['seconds']:7.1f} s  {found['reason']}"
    shown = []
    for key, value in found["numbers"].items():
        if isinstance(value, list) or value is None:
            continue
        if key.endswith("_bytes"):
            shown.append(f"{key.removesuffix('_bytes')} {value / 2**30:.2f} GiB")
        else:
            shown.append(f"{key} {value:.4g}" if isinstance(value, int | float) else f"{key} {value}")
    return f"{name:10} {'ok':8} {found['seconds']:7.1f} s  {'; '.join(shown)}"


def machine(on_cpu: bool) -> dict[str, Any]:
    import torch

    found = {"torch": torch.__version__, "python": platform.python_version(), "device": "a CPU, tiny shapes"}
    if not on_cpu:
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Tries training on one GPU, part by part.")
    parser.add_argument("--cpu", action="store_true", help="the same code on a CPU, with tiny shapes")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; give it again for more")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="file of the numbers")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        print("no GPU: PyTorch sees none here; --cpu tries the same code on a CPU with tiny shapes", file=sys.stderr)
        return 2
    if options.part:
        part_main(options.part, CPU if options.cpu else GPU)
        return 0
    about = machine(options.cpu)
    print(" · ".join(f"{name} {value}" for name, value in about.items()))
    parts = {}
    for name in options.only or PARTS:
        parts[name] = run_part(name, options.cpu)
        print(told(name, parts[name]), flush=True)
    options.out.write_text(json.dumps({"machine": about, "parts": parts}, indent=2) + "\n", "utf-8")
    return int(any(found["state"] == "failed" for found in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
