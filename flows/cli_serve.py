"""`awpo serve --model`: one model on this machine, in the OpenAI chat format."""

from __future__ import annotations

import typer

from awpo.errors import UserError


def serve_one_model(model: str, engine: str, name: str | None, host: str, port: int) -> None:
    """Serves until Ctrl-C. Raises UserError for an engine, model or port that cannot be had."""
    from awpo.serving import server, vllm

    if engine == "auto":
        engine = vllm.engine_at_hand()
    if engine not in server.ENGINES:
        known = ", ".join(["auto", *server.ENGINES])
        raise UserError(f"engine {engine!r} is not one that is started from here; known: {known}")

    def ready(url: str, served: str) -> None:
        typer.echo(f"Model     {served}   (by {engine})")
        typer.echo(f"Endpoint  {url}   (base_url of a judge, of rationales, of any OpenAI client)")
        if engine == "vllm":
            typer.echo("Ctrl-C ends it.")
            return
        typer.echo("Done: temperature, max_tokens, stop, n, seed, tools in the prompt. Refused, with status 400:")
        typer.echo("stream, logprobs, response_format, top_p. Tool calls come back as text with their tags.")
        typer.echo("Ctrl-C ends it.")

    typer.echo("loading the model ...", err=True)
    serve = vllm.serve_model if engine == "vllm" else server.serve_model
    serve(model, name=name, host=host, port=port, ready=ready)
