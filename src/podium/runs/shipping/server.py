"""Servers of a model with OpenAI's interface: `transformers serve` or `vllm serve`, a command each.

transformers' server by itself takes fields that it does not support and ignores them. So it is started from here:

    python -m podium.runs.shipping.server serve MODEL --host 127.0.0.1 --port 8000

A request with such a field is refused as by OpenAI, with status 400; `/v1/models` names the model.
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
from typing import Any

from podium.errors import ConfigError
from podium.errors.texts import listed

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
    return (sys.executable, "-m", __name__, "serve")


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


# ---- in front of `transformers serve` ----

NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0, 0.0),
    "max_completion_tokens": (),
    "tool_choice": ("auto",),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "prediction": (),
    "audio": (),
    "web_search_options": (),
}
"""Fields that change an answer and that the server ignores, with the values (besides null) that ask for nothing."""


def refusal(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """OpenAI's error for the first field that would be ignored; None: there is none.

    >>> refusal({"messages": [], "n": 1, "response_format": {"type": "text"}, "logprobs": None})
    >>> refusal({"n": 2})["error"]["message"]
    '`n` is not supported by `transformers serve`, which would ignore it: take it out, or serve with --engine vllm.'
    """
    for name, neutral in NO_EFFECT.items():
        if body.get(name) is None or any(type(body[name]) is type(x) and body[name] == x for x in neutral):
            continue
        way = "write `max_tokens`" if name == "max_completion_tokens" else "take it out"
        what = f"`{name}` is not supported by `transformers serve`, which would ignore it: {way}, or serve with"
        about = {"type": "invalid_request_error", "param": name, "code": "unsupported_parameter"}
        return {"error": {"message": f"{what} --engine vllm.", **about}}
    return None


def main() -> None:
    """Run the server with these checks in front of it."""
    from fastapi import Request  # type: ignore[import-not-found,unused-ignore]
    from fastapi.responses import JSONResponse  # type: ignore[import-not-found,unused-ignore]
    from transformers.cli.serving import server as serving
    from transformers.cli.transformers import main as transformers

    model = sys.argv[2]
    build = serving.build_server

    def build_server(*args: Any, **kwargs: Any) -> Any:
        app = build(*args, **kwargs)

        @app.middleware("http")
        async def check(request: Request, call_next: Any) -> Any:
            if request.url.path == "/v1/models":
                known = {"id": model, "object": "model", "created": 0, "owned_by": "podium"}
                return JSONResponse({"object": "list", "data": [known]})
            if request.url.path in ("/v1/chat/completions", "/v1/completions"):
                try:
                    body = await request.json()
                except ValueError:  # the server says so
                    body = None
                if isinstance(body, dict) and (error := refusal(body)):
                    return JSONResponse(error, status_code=400)
            return await call_next(request)

        return app

    serving.build_server = build_server
    transformers()


if __name__ == "__main__":
    main()
