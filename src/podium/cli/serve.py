"""`podium serve RUN`: a run's model behind OpenAI's interface."""

from __future__ import annotations

import json
import shlex
from typing import Annotated, Any

import typer

from podium.cli.chat import tools_of
from podium.cli.flags import IgnoreOption
from podium.console.terminal import errors, prepare_output

_VLLM_TOOLS = (
    " vLLM reads them with: podium serve RUN --engine vllm -- --enable-auto-tool-choice --tool-call-parser hermes"
)


def serve(
    run: Annotated[str, typer.Argument(help="A run's folder, a checkpoint, a model's folder or a hub id.")],
    extra: Annotated[
        list[str] | None, typer.Argument(metavar="[-- SERVER_OPTIONS]", help="Handed to the server as they are.")
    ] = None,
    engine: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
    host: Annotated[str, typer.Option(help="The address to listen on; 127.0.0.1 is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    tools: Annotated[bool, typer.Option("--tools/--no-tools", help="Show requests with the tools of the run.")] = True,
    ignore: IgnoreOption = None,
) -> None:
    """Serve a run's model with `transformers serve` or `vllm serve`. An adapter is merged into its folder first."""
    from podium.runs.find_model import MERGED, find_model
    from podium.runs.shipping.merge import merged_folder
    from podium.runs.shipping.origin import opening, template_kwargs
    from podium.runs.shipping.server import LOOPBACK, become, server

    source = find_model(run, ignore=ignore)
    model = source.base if source.adapter is None else str(source.adapter / MERGED)
    made = server(engine, model, host=host, port=port, extra=tuple(extra or ()))
    prepare_output()
    if source.adapter is not None:
        merged_folder(source)
    if host not in LOOPBACK:
        errors.print(f"warning: whoever reaches {host}:{port} can use the model.", markup=False, soft_wrap=True)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    typer.echo(f"Serving `{made.model}` with {engine} on {url}; Ctrl-C ends it. Once it has started:")
    begun = opening(source)
    message: dict[str, Any] = {"model": made.model, "messages": [*begun, {"role": "user", "content": "Hello"}]}
    own, _ = tools_of(source) if tools else ((), 0)
    kwargs = template_kwargs(source)
    kwargs = {name: value for name, value in kwargs.items() if name not in ("chat_template", "tool_example")}
    if kwargs:
        message["chat_template_kwargs"] = kwargs
    if own:
        message["tools"] = [tool.schema for tool in own]
    typer.echo(
        f"  curl {url}/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(message))}"
    )
    if begun:
        typer.echo(
            f"The server adds nothing to a conversation: send the first {len(begun)} of the messages above before "
            "every question, as the prompts of the training did."
        )
    if kwargs:
        typer.echo("Send `chat_template_kwargs` with every request: with it the prompts of the training were rendered.")
    if own:
        more = "" if "--enable-auto-tool-choice" in made.command or engine != "vllm" else _VLLM_TOOLS
        typer.echo(f"The server runs no tools: it returns the calls, and your program sends the results back.{more}")
    become(made)
