"""What the commands share: options, errors as one line, progress, a session with Prefect."""

from __future__ import annotations

import flows.environment as environment  # sets defaults before the libraries below read them

# isort: split
import errno
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from awpo.errors import UserError

_OF_PATHS = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ELOOP}
"""What a person mends by another path, or by rights."""


class Commands(TyperGroup):
    """Turns errors that are for people into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TyperException as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # a group alone: typer shows its help
                raise
            context = getattr(error, "ctx", None)
            asked = context.command_path if context else "awpo"
            typer.echo(f"error: {error.format_message().rstrip('.')}; see `{asked} --help`", err=True)
            raise typer.Exit(2) from None
        except UserError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        except OSError as error:  # Path.exists and the like raise it, too, for a name that is too long
            if error.errno not in _OF_PATHS or error.filename is None:
                raise
            typer.echo(
                f"error: {error.strerror}: {str(error.filename)[:100]!r}; give another path, or mend its rights",
                err=True,
            )
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("stopped; the same command goes on where it stood", err=True)
            raise typer.Exit(130) from None
        except RuntimeError as error:
            if type(error).__name__ not in ("WorkFailed", "StageFailed", "ServerFailed", "SmokeFailed", "Regression"):
                raise
            typer.echo(f"failed: {error}", err=True)
            raise typer.Exit(1) from None


Out = Annotated[Path, typer.Option(help="Folder of the results; what it holds already is not made again.")]
Format = Annotated[str, typer.Option(help="Format of the source; auto looks at its rows.")]
Model = Annotated[str | None, typer.Option(help="A preset of infra/presets/models, or a checkpoint's folder.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of model, SFT, policy training.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object, on the last line.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show Prefect's log, and tracebacks in it.")]


@contextmanager
def progress_shown() -> Iterator[None]:
    """Bars where standard error is a terminal, a line now and then elsewhere; standard output is for results."""
    from rich.console import Console

    from tasks.progress import BarReporter, PlainReporter, reporting

    if sys.stderr.isatty():
        with BarReporter(Console(stderr=True)) as reporter, reporting(reporter):
            yield
    else:
        with reporting(PlainReporter()):
            yield


@contextmanager
def flow_session(verbose: bool) -> Iterator[None]:
    """Prefect quiet unless asked, the running server joined where there is one, progress shown."""
    if not verbose:
        environment.quiet_prefect()
    from flows.prefect_server import join_running_server, temporary_server
    from flows.preflight import check_writable
    from tasks.layout import runs_root

    check_writable(runs_root(), "AWPO_RUNS")
    with ExitStack() as stack:
        if join_running_server() is None:
            typer.echo("starting Prefect ...", err=True)
            typer.echo(f"watch at {stack.enter_context(temporary_server()).removesuffix('/api')}", err=True)
        _make_limits()
        stack.enter_context(progress_shown())
        yield


def _make_limits() -> None:
    """Makes the limits of what runs at once; a server that forbids it works without them."""
    import httpx

    from flows.limits import ensure_limits

    try:
        ensure_limits()
    except httpx.HTTPStatusError as error:
        reason = str(error).splitlines()[0]
        typer.echo(f"no limits of what runs at once could be made ({reason}); see `awpo doctor`", err=True)


def changed(
    settings: Any, values: dict[str, Any], nested: dict[str, dict[str, Any]], *, settings_of_model: bool = False
) -> Any:
    """Settings with the options that were given; checked like the file they came from. Raises UserError.

    With `settings_of_model`, another model than the preset's brings the settings and the launch of its own preset.
    """
    from awpo.models import resolve_model
    from flows.parameters import check_policy_method

    for name in values.get("methods") or ():
        check_policy_method(name)
    raw = settings.model_dump()
    model = values.get("model")
    if settings_of_model and model and model != settings.model:
        choice = resolve_model(model)
        for section, own in (choice.settings or {}).items():
            raw[section] |= own
        raw["launch"] = choice.launch or raw["launch"]
    raw |= {key: value for key, value in values.items() if value is not None}
    for section, changes in nested.items():
        raw[section] |= {key: value for key, value in changes.items() if value is not None}
    return type(settings).read(raw, "the options")


def print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, default=str))
