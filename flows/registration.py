"""What a Prefect server has to know of this project: `python -m flows.registration`, in the server's environment.

A work pool, the deployments of prefect.yaml, the limits of what runs at once, the automations. Everything may be done again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from urllib.parse import urlsplit

from awpo.errors import UserError
from flows.children import ServerFailed
from flows.prefect_server import ROOT, prefect_command

POOL = "awpo-local"
NOTIFY = "AWPO_NOTIFY_URL"
"""Environment variable with the address that failures are told to; not an argument, as arguments are seen by all."""


def notify_url() -> str | None:
    """The address that failures are told to, or None. Raises UserError where it is no http(s) address."""
    url = os.environ.get(NOTIFY, "").strip()
    if not url:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{NOTIFY} is no http(s) address; set it to a webhook's URL, or unset it")
    return url


def run_prefect(arguments: list[str], environment: dict[str, str]) -> None:
    """Runs one Prefect command to its end; raises ServerFailed with its output where it fails."""
    done = subprocess.run(
        prefect_command(*arguments), env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode != 0:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
        raise ServerFailed(f"prefect {' '.join(arguments)} failed:\n{last}")


def register(environment: dict[str, str]) -> None:
    """Registers all of it with the server of PREFECT_API_URL in `environment`.

    In processes of its own: Prefect reads its settings once, and this process may have read others. Raises
    ServerFailed where something is refused, UserError for an address that nobody can be told at.
    """
    notify_url()
    run_prefect(["work-pool", "create", POOL, "--type", "process", "--overwrite"], environment)
    run_prefect(["--no-prompt", "deploy", "--all"], environment)
    done = subprocess.run(
        [sys.executable, "-m", "flows.registration"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    if done.returncode != 0:
        last = "\n".join(done.stderr.splitlines()[-5:])
        raise ServerFailed(f"the limits or automations were refused:\n{last}")


def main() -> None:
    """Limits and automations; the pool and the deployments are Prefect's own commands."""
    from flows.automations import crash_lost_runs, crash_zombie_runs, tell_of_failures
    from flows.limits import ensure_limits

    ensure_limits()
    crash_zombie_runs()
    crash_lost_runs()
    if url := notify_url():
        tell_of_failures(url)


if __name__ == "__main__":
    main()
