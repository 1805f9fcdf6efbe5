"""A run's result for use elsewhere: one plain model folder with its card, a server, the hub.

Other packages import from here alone; a module is loaded when a name of it is first used. Servers are a command each:
`transformers serve` or `vllm serve`, both with OpenAI's interface.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from podium.errors import ConfigError
from podium.errors.texts import listed
from podium.lazy import lazy_names

if TYPE_CHECKING:
    from podium.runs.shipping.card import CARD, model_card, title_of
    from podium.runs.shipping.export import LOCAL_KEYS, edited, export_model, is_merged, merged_folder
    from podium.runs.shipping.hub import files_to_send, find_repository, left_out, one_message, send
    from podium.runs.shipping.origin import base_named, opening, template_kwargs


# fmt: off
__all__ = [
    "CARD", "LOCAL_KEYS", "LOOPBACK", "base_named", "become", "edited", "export_model", "files_to_send",
    "find_repository", "is_merged", "left_out", "merged_folder", "model_card", "one_message",
    "opening", "send", "server", "template_kwargs", "title_of",
]
# fmt: on


__getattr__ = lazy_names(
    __name__,
    card="CARD model_card title_of",
    export="LOCAL_KEYS edited export_model is_merged merged_folder",
    hub="files_to_send find_repository left_out one_message send",
    origin="base_named opening template_kwargs",
)


LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that only this machine can reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """The command of a server."""

    command: tuple[str, ...]
    model: str
    """The name in requests: the last two parts of the folder's path, or a hub id."""
    folder: Path
    """The folder to run in, from which `model` is a path: servers publish the name that they were given."""


def server(engine: str, model: str, *, host: str, port: int, extra: tuple[str, ...] = ()) -> ServerCommand:
    """The command that serves a model; nothing is loaded, and a folder need not exist yet.

    Args:
        engine: one of `ENGINES`.
        model: a folder or a hub id.
        host: the address to listen on.
        port: the port to listen on.
        extra: arguments for the server itself.

    Raises:
        ConfigError: no such engine, it is not installed, or the port is taken.
    """
    if engine not in ENGINES:
        raise ConfigError(
            f"--engine is {engine!r}; it must be one of {listed(ENGINES)}.", engine=engine, engines=ENGINES
        )
    program = ENGINES[engine]()
    _check_free(host, port)
    folder = Path(model).resolve()
    here = folder.parent.is_dir()
    name = f"{folder.parent.name}/{folder.name}" if here else model
    command = (*program, name, "--host", host, "--port", str(port), *extra)
    return ServerCommand(command=command, model=name, folder=folder.parent.parent if here else Path.cwd())


def _transformers() -> tuple[str, ...]:
    missing = [name for name in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"`transformers serve` needs packages that are not installed: {listed(missing)}.",
            fix='Type: pip install "podium[serve]"; or take --engine vllm.',
            missing=missing,
        )
    return (sys.executable, "-m", "podium.runs.shipping.served", "serve")


def _vllm() -> tuple[str, ...]:
    beside = str(Path(sys.executable).parent)
    program = shutil.which("vllm", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if program is None:
        raise ConfigError(
            "There is no `vllm` beside this Python or on the PATH.",
            fix="Type: pip install vllm (an environment of its own will do); or take --engine transformers.",
        )
    return (program, "serve")


ENGINES: Mapping[str, Callable[[], tuple[str, ...]]] = {"transformers": _transformers, "vllm": _vllm}
"""The first words of each one's command, by engine."""


def _check_free(host: str, port: int) -> None:
    """Fail before a model is merged or loaded."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on {host}:{port} ({error.strerror}).",
                fix="Give another: --port 8001, or --host.",
                host=host,
                port=port,
                strerror=error.strerror,
            ) from error


def become(made: ServerCommand) -> None:
    """Replace this process by the server, which then gets its signals and gives its exit code. Does not return."""
    from huggingface_hub.constants import HF_HUB_CACHE

    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(made.folder)
    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # `transformers serve` lists it when asked for its models
    os.execve(made.command[0], made.command, {"HF_HUB_DISABLE_UPDATE_CHECK": "1", **os.environ})
