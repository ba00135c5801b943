"""A model served on this machine: `python -m awpo.serving.server LOCATION`, in the foreground until it is stopped."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from awpo.errors import UserError
from awpo.files import write_atomically
from awpo.models import ModelChoice, resolve_model

ENGINES = {"transformers": "awpo.serving.server", "vllm": "awpo.serving.vllm"}
"""What can compute a model, and the module that serves it."""
BACKLOG = 1024


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is a free one. Raises UserError where the port is taken."""
    try:
        listening = socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for a free one"
        ) from None
    # What is accepted inherits it. asyncio sets it on sockets that it makes itself; without it each answer waits 40 ms
    # for the client's kernel.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def shown_address(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def servable(location: str) -> ModelChoice:
    """The model of a checkpoint's folder, or of a preset of one on the hub. Raises UserError for others."""
    choice = resolve_model(location)
    if choice.kind not in ("folder", "hub"):
        raise UserError(f"{location!r} is made by a pipeline; give the folder of the checkpoint that it made")
    return choice


def serve_model(
    location: str,
    *,
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[str, str], None] = lambda url, name: None,
) -> None:
    """Serves a model until SIGTERM or SIGINT; calls `ready(url, name)` once it answers, url ending in /v1.

    `name` is that of the folder, or the location, where none is given. Raises UserError where the model cannot be
    loaded or the port is taken.
    """
    choice = servable(location)
    name = name or (Path(location).resolve().name if Path(location).is_dir() else location)
    listening = listening_socket(host, port)
    import uvicorn

    from awpo.serving.application import make_application
    from awpo.serving.engine import load_engine

    engine = load_engine(choice)
    config = uvicorn.Config(
        make_application(engine, name), log_level="warning", access_log=False, lifespan="off", backlog=BACKLOG
    )
    config.timeout_graceful_shutdown = 5
    ready(f"http://{shown_address(host)}:{listening.getsockname()[1]}/v1", name)
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        engine.close()


def serve_from_arguments(serve: Callable[..., None], description: str | None, *, further: bool = False) -> None:
    """The main function of a module that serves: exit code 0 after a stop, 2 where the person can mend what is wrong.

    `further` says that `serve` takes arguments of what it starts, which stand behind a `--`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("location", help="a checkpoint's folder, or a preset of a model on the hub")
    parser.add_argument("--name", help="name that the model is asked for by")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--address-file", type=Path, help="is written once the server answers: JSON with url and name")
    parser.add_argument("--with-parent", action="store_true", help="end, with the process group, when the parent does")
    given = sys.argv[1:]
    end = given.index("--") if further and "--" in given else len(given)
    arguments = parser.parse_args(given[:end])
    if arguments.with_parent:
        from awpo.processes import end_with_parent

        end_with_parent()

    def ready(url: str, name: str) -> None:
        if arguments.address_file:
            write_atomically(arguments.address_file, json.dumps({"url": url, "name": name}))
        print(f"{name} at {url}", flush=True)

    more = {"further": given[end + 1 :]} if further else {}
    try:
        serve(arguments.location, name=arguments.name, port=arguments.port, ready=ready, **more)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    serve_from_arguments(serve_model, __doc__)
