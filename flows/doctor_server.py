"""What `awpo doctor` looks at on a running Prefect server: its version, pool, workers, deployments, automations, limits."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from typing import Any

import httpx
import prefect
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.automations import FAILURES, LOST, ZOMBIES
from flows.checks import Check
from flows.prefect_server import ROOT
from flows.registration import NOTIFY, POOL
from tasks.slots import GPU, JUDGE_API

SET_UP = "awpo setup"


def examine_server(url: str) -> list[Check]:
    """The checks on the server whose API is at `url`, in the order a person would mend them."""
    try:
        with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
            return [
                check_version(client.api_version()),
                *check_pool(client),
                check_deployments(client),
                *check_automations(client),
                check_limits(client),
            ]
    except (httpx.HTTPError, ValueError) as error:  # not there, refuses, or is something else
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return [Check("Prefect server", "mend", f"{url}: {reason}", "see its log; is it a Prefect 3 server?")]


def check_version(server: str) -> Check:
    """A server of another minor version may lack what this client asks of it."""
    same = server.split(".")[:2] == prefect.__version__.split(".")[:2]
    if same:
        return Check("Prefect's version", "ok", server)
    found = f"{server} on the server, {prefect.__version__} here"
    return Check("Prefect's version", "mend", found, f"install prefect=={prefect.__version__} on the server")


def check_pool(client: Any) -> list[Check]:
    """The work pool, and whether a worker of it is alive."""
    try:
        pool = client.read_work_pool(POOL)
    except ObjectNotFound:
        return [Check("work pool", "mend", f"no {POOL}", SET_UP)]
    if pool.is_paused:
        return [Check("work pool", "mend", f"{POOL} is paused", f"prefect work-pool resume {POOL}")]
    alive = [worker.name for worker in client.read_workers_for_work_pool(POOL) if worker.status == WorkerStatus.ONLINE]
    start = f"prefect worker start --pool {POOL}, in the project's folder"
    return [
        Check("work pool", "ok", f"{POOL} ({pool.type})"),
        Check("worker", "ok", ", ".join(alive)) if alive else Check("worker", "mend", "none is alive", start),
    ]


def check_deployments(client: Any) -> Check:
    """Those of prefect.yaml, all registered, and from this folder."""
    wanted = {one["name"] for one in yaml.safe_load((ROOT / "prefect.yaml").read_text("utf-8"))["deployments"]}
    known = {one.name: one for one in client.read_deployments(limit=200) if one.name in wanted}
    if missing := wanted - known.keys():
        return Check("deployments", "mend", f"{', '.join(sorted(missing))} not registered", SET_UP)
    others = {folder for one in known.values() for folder in _folders(one.pull_steps or [])} - {str(ROOT)}
    if others:
        how = f"{SET_UP}, where the runs should use this folder's code"
        return Check("deployments", "note", f"they run the code in {', '.join(sorted(others))}", how)
    return Check("deployments", "ok", f"all {len(wanted)} of prefect.yaml")


def _folders(pull_steps: list[dict[str, Any]]) -> set[str]:
    return {str(given["directory"]) for step in pull_steps for given in step.values() if "directory" in given}


def check_limits(client: Any) -> Check:
    """What keeps runs from computing all at once: a limit for GPUs and one for judge endpoints."""
    known = {limit.name: limit for limit in client.read_global_concurrency_limits(limit=200)}
    found = [f"{name}: {known[name].limit} slots" for name in (GPU, JUDGE_API) if name in known and known[name].active]
    if len(found) == 2:
        return Check("limits", "ok", ", ".join(found))
    missing = [name for name in (GPU, JUDGE_API) if name not in known]
    how = SET_UP if missing else "Concurrency in Prefect's UI"
    return Check("limits", "mend", f"{', '.join(missing) or 'one is off'}: any number of runs compute at once", how)


def check_automations(client: Any) -> list[Check]:
    """Those against runs that nobody works on any more, and the one that tells of failures."""
    known = {automation.name: automation for automation in client.read_automations()}
    failures = known.get(FAILURES)
    off = [name for name in (ZOMBIES, LOST) if not (name in known and known[name].enabled)]
    return [
        Check("zombie runs", "ok", "become Crashed")
        if not off
        else Check(
            "zombie runs",
            "mend",
            "would say Running or Pending for ever",
            f"{SET_UP}, and enable {' and '.join(map(repr, off))}",
        ),
        Check("failure notification", "ok", "on")
        if failures and failures.enabled
        else Check("failure notification", "note", "nobody is told", f"{SET_UP} with {NOTIFY} set to a webhook's URL"),
    ]
