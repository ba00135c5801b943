"""`awpo setup` and `awpo doctor`: what a server has to know of this project, and whether everything is there."""

from __future__ import annotations

import typer

from awpo.errors import UserError


def setup() -> None:
    """Registers work pool, deployments and automations with a Prefect server. `awpo serve` does it by itself.

    The server is that of PREFECT_API_URL, or of a running `awpo serve`. With AWPO_NOTIFY_URL set to a webhook's address
    (Slack's, Mattermost's, your own), failed runs are told there. May be called again, after an upgrade for one.
    """
    from flows.prefect_server import client_environment, join_running_server
    from flows.registration import NOTIFY, POOL, notify_url, register

    url = join_running_server()
    if url is None:
        raise UserError("no Prefect server runs here; start `awpo serve`, or set PREFECT_API_URL to your team's server")
    typer.echo(f"registering with {url} ...", err=True)
    register(client_environment(url))
    typer.echo(f"Work pool     {POOL}; a worker: prefect worker start --pool {POOL}, in the project's folder")
    typer.echo("Deployments   those of prefect.yaml")
    told = (
        "failed runs are told to the address given" if notify_url() else f"set {NOTIFY} to tell somebody of failed runs"
    )
    typer.echo(f"Automations   silent runs become Crashed; {told}")


def doctor() -> None:
    """Looks whether this machine and installation can do the work; exit code 1 where something needs mending."""
    from rich.console import Console

    from flows.doctor import checks_table, examine

    checks = examine()
    Console().print(checks_table(checks))
    if any(check.state == "mend" for check in checks):
        raise typer.Exit(1)
