"""`awpo doctor`: what this machine and installation have, what is missing, and how to mend it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from rich.table import Table

from awpo.errors import UserError
from flows.checks import Check
from flows.prefect_server import ROOT, join_running_server, port_is_free
from flows.preflight import GIGABYTE, check_writable, nearest_existing
from tasks.layout import runs_root

NEEDED_PACKAGES = ("torch", "transformers", "trl", "prefect", "mlflow", "pydantic", "typer", "pyarrow", "datasets")
BFCL = "2025.8.6.2"
NEEDED_GIGABYTES = 2.0


def examine() -> list[Check]:
    """All checks, in the order a person would mend them."""
    return [
        check_python(),
        *check_packages(read_constraints(ROOT / "constraints.txt")),
        check_bfcl(),
        check_cores(),
        check_gpus(),
        check_disk_space(),
        check_store(),
        *check_promotions(),
        *check_server(),
        *(
            check_port(name, port, option)
            for name, port, option in (
                ("Prefect's port", 4200, "--prefect-port"),
                ("MLflow's port", 5000, "--mlflow-port"),
            )
        ),
    ]


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        return Check("Python", "ok", version)
    return Check("Python", "mend", version, "install Python 3.11, 3.12 or 3.13 and make the environment anew")


def read_constraints(path: Path) -> dict[str, str]:
    """Package name -> pinned version; empty where there is no such file (an installation from a wheel)."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError:
        return {}
    found = (re.match(r"([A-Za-z0-9._-]+)==([^\s;#]+)", line) for line in lines)
    return {normal(match[1]): match[2] for match in found if match}


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def check_packages(pins: dict[str, str]) -> list[Check]:
    """The packages the work needs, then all installed ones that differ from their pin as one line."""
    checks = []
    for name in NEEDED_PACKAGES:
        version = installed(name)
        if version is None:
            checks.append(Check(name, "mend", "not installed", "make install"))
        elif name in pins and version.partition("+")[0] != pins[name]:
            checks.append(Check(name, "mend", f"{version}, pinned {pins[name]}", "make install"))
        else:
            checks.append(Check(name, "ok", version))
    if not pins:
        return [*checks, Check("constraints.txt", "note", "not found", "versions were not compared")]
    others = {name: version for name in pins if name not in NEEDED_PACKAGES and (version := installed(name))}
    off = [
        f"{name} {version} (pinned {pins[name]})"
        for name, version in others.items()
        if version.partition("+")[0] != pins[name]
    ]
    if off:
        return [
            *checks,
            Check("other packages", "note", ", ".join(off[:6]) + (" ..." if len(off) > 6 else ""), "make install"),
        ]
    return [*checks, Check("other packages", "ok", f"{len(others)} as pinned")]


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_bfcl() -> Check:
    version = installed("bfcl-eval")
    if version == BFCL:
        return Check("bfcl-eval", "ok", version)
    return Check(
        "bfcl-eval",
        "note",
        version or "not installed",
        f"pip install --no-deps bfcl-eval=={BFCL}, for the benchmark bfcl_v3",
    )


def check_cores() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores >= 2:
        return Check("cores", "ok", str(cores))
    return Check("cores", "note", str(cores), "the demo takes about twice as long as on two")


def check_gpus() -> Check:
    """What torch sees, which is what training uses: a driver alone is not enough."""
    import torch

    if not torch.cuda.is_available():
        return Check("GPUs", "note", "none that torch can use", "the embedded models need none; larger ones do")
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return Check("GPUs", "ok", ", ".join(f"{card.name} ({card.total_memory / 2**30:.0f} GiB)" for card in cards))


def check_disk_space() -> Check:
    place = nearest_existing(runs_root())
    free = shutil.disk_usage(place).free / GIGABYTE
    if free >= NEEDED_GIGABYTES:
        return Check("disk", "ok", f"{free:.1f} GB free in {place}")
    return Check(
        "disk", "mend", f"{free:.1f} GB free in {place}", "free some, or set AWPO_RUNS to a folder on another disk"
    )


def check_store() -> Check:
    """Opens the MLflow store, which makes it where it is missing: the surest way to know that it can be written."""
    try:
        check_writable(runs_root())
        from tasks.tracking_store import connect

        return Check("MLflow store", "ok", connect().store)
    except UserError as error:
        return Check("MLflow store", "mend", str(error), "set AWPO_RUNS or MLFLOW_TRACKING_URI")


def check_promotions() -> list[Check]:
    """Promotions whose process was killed in between, so that an alias stands for what nobody accepted."""
    from tasks.promotion import unfinished_promotions
    from tasks.tracking_store import connect

    try:
        found = unfinished_promotions(connect())
    except UserError:
        return []  # the check of the store says why
    mend = "run the deployment promote again: it puts the alias back first"
    return [
        Check("promotion", "mend", f"{one}: its process is gone", mend)
        if one.abandoned
        else Check("promotion", "note", f"{one} is under way", "")
        for one in found
    ]


def check_server() -> list[Check]:
    """The server that commands would use, and what it has to know of this project."""
    try:
        url = join_running_server()
    except UserError as error:
        return [Check("Prefect server", "mend", str(error), "start it, or unset PREFECT_API_URL")]
    if url is None:
        return [Check("Prefect server", "ok", "none running; commands start a temporary one")]
    from flows.doctor_server import examine_server

    return [Check("Prefect server", "ok", url), *examine_server(url)]


def check_port(name: str, port: int, option: str) -> Check:
    if port_is_free(port):
        return Check(name, "ok", f"{port} is free")
    return Check(name, "note", f"{port} is in use", f"by `awpo serve`, or choose another with awpo serve {option}")


def checks_table(checks: list[Check]) -> Table:
    """The checks as a table."""
    table = Table(title="awpo doctor", title_justify="left")
    for column in ("", "what", "found", "how to mend"):
        table.add_column(column, overflow="fold")
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "mend": "[red]mend[/]"}
    for check in checks:
        table.add_row(marks[check.state], check.name, check.found, check.how)
    return table
