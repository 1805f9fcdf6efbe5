"""`podium tinker MODEL`: a local server for programs that train with Tinker's client."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podium.console.terminal import prepare_output
from podium.errors import ConfigError
from podium.errors.texts import quoted
from podium.lazy import imported

if TYPE_CHECKING:
    from podium import Loop


def tinker(
    model: Annotated[str, typer.Argument(help="A model's folder, a hub id or `builtin:...`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where weights are saved.")] = Path("runs/tinker"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8010,
) -> None:
    """Train a model of this machine with Tinker's client: a server on 127.0.0.1 of `podium.Loop`.

    The key is that of TINKER_API_KEY, or a new one.
    """
    try:
        from tinker.proto import tinker_public_pb2  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"`podium tinker` needs Tinker's client, whose messages it reads: {quoted(error)}",
            fix="pip install 'podium[tinker]'",
            error=error,
        ) from None
    from podium.models.builtin import resolve_model

    prepare_output()
    folder = resolve_model(model)
    key = os.environ.get("TINKER_API_KEY") or f"tml-{secrets.token_urlsafe(24)}"
    names = list(dict.fromkeys([model, folder]))
    policy = imported("podium.tinker.policy:TinkerPolicy")(names, output, lambda rank: adapted(folder, output, rank))
    try:
        server = imported("podium.tinker.server:TinkerServer")(policy, key, port)
    except OSError as error:
        raise ConfigError(
            f"The server cannot have port {port} of 127.0.0.1: {error.strerror}.",
            fix="--port 0 takes any that is free",
            port=port,
            error=error.strerror,
        ) from None
    typer.echo(f"Training {model} with Tinker's client on {server.url}; Ctrl-C ends it. For your program:")
    typer.echo(f"  export TINKER_BASE_URL={server.url} TINKER_API_KEY={key}")
    typer.echo(f"The name of the model is {folder}")
    server.run()


def adapted(model: str, output: Path, rank: int) -> Loop:
    """A loop with a new adapter on all linear layers but the head, as Tinker scales it."""
    from peft import LoraConfig

    from podium import GRPOConfig, Loop

    ignored = dict.fromkeys(("C021", "C024", "D045"), "ignore")  # on rates, batches and prompts, which are the client's
    args = GRPOConfig(str(output), report_to="none", max_completion_length=16, on_finding=ignored)
    return Loop(model, args, peft_config=LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear"))
