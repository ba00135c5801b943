"""`awpo migrate`: moves the MLflow store to another database, with its artifacts."""

from __future__ import annotations

from typing import Annotated

import typer

from awpo.errors import UserError


def migrate(
    to: Annotated[
        str,
        typer.Option(
            envvar="AWPO_MIGRATE_TO",
            help="Address of an empty database, postgresql://USER:PASSWORD@HOST/NAME; with a password, rather give it in "
            "the environment, as arguments are seen by all.",
        ),
    ],
    artifacts: Annotated[
        str | None,
        typer.Option(help="Where artifacts go, s3://BUCKET/FOLDER or file:///FOLDER; none: they stay where they are."),
    ] = None,
) -> None:
    """Copies the MLflow store (MLFLOW_TRACKING_URI, or SQLite under the runs folder) into another database.

    All or nothing; the present store is only read and stays. Prefect's server needs no move: give it the new database and
    run `awpo setup` (docs/deployment.md).
    """
    from flows.prefect_server import running_servers
    from tasks.layout import artifact_root, runs_root, tracking_uri, without_password
    from tasks.migration import migrate as move

    if told := running_servers():
        raise UserError(
            f"awpo serve works on {runs_root()}, at {told['prefect_api_url']}; end it first, so that nothing is written "
            "to the store meanwhile"
        )
    moved = move(
        tracking_uri(), to, artifact_root() if artifacts else None, artifacts, lambda text: typer.echo(text, err=True)
    )
    runs = moved.rows.get("runs", 0)
    typer.echo(
        f"Moved     {sum(moved.rows.values())} rows of {len(moved.rows)} tables, {runs} runs; {moved.files} files"
    )
    typer.echo(f"From now  export MLFLOW_TRACKING_URI={without_password(to)}   (with its password)")
    if artifacts:
        typer.echo(f"          export MLFLOW_DEFAULT_ARTIFACT_ROOT={artifacts}")
