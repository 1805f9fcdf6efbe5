"""`podium push RUN`: a run's model on the Hugging Face hub."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from podium.console.next_command import print_next
from podium.console.terminal import prepare_output
from podium.errors.texts import clean


def push(
    run: Annotated[str, typer.Argument(help="A run's folder, a checkpoint, or a model's folder.")],
    repo: Annotated[str | None, typer.Option(help="OWNER/NAME on the hub. Default: the run's name, yours.")] = None,
    merged: Annotated[bool, typer.Option("--merged", help="Send the whole model instead of its adapter.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Everybody may see it. Default: private.")] = False,
    include: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Also files of the run's folder, such as `rollouts/*`.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="The base on the hub, for an adapter of a local one.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Send it though it seems to hold a token; or a code: M034.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent; no network.")] = False,
) -> None:
    """Send a model and its card to the hub, after showing which files, how large, where, and who will see them."""
    from podium.runs.find_model import find_model
    from podium.runs.shipping import hub
    from podium.runs.shipping.card import title_of
    from podium.runs.shipping.merge import is_merged, merged_folder

    source = find_model(run, ignore=ignore)
    title = title_of(source)
    prepare_output()
    if merged and source.adapter is not None:
        if dry_run and not is_merged(source):
            weights = sum(path.stat().st_size for path in Path(source.base).glob("*.safetensors"))
            size = f", about {decimal(weights)} of weights" if weights else ""
            typer.echo(
                f"{clean(str(source.adapter))} is not merged yet, and a dry run writes nothing. Sent would be the "
                f"merged model{size}; `podium merge {clean(run)} --out DIR` makes and proves one."
            )
            return
        source = find_model(str(merged_folder(source)))
    name = repo or title.replace(", ", "-").replace(" ", "-")
    repository = None if dry_run else hub.find_repository(name, public=public)
    address = repository.name if repository else name
    files = hub.files_to_send(source, address=address, base=base, include=include or (), ignore=ignore or ())

    where = name if "/" in name else f"YOU/{name}"
    seen = "public" if public else "private"
    typer.echo(f"To {repository or f'{where} on the Hugging Face hub (not looked up, {seen})'}:")
    for file in files:
        typer.echo(f"  {clean(file.name):40} {decimal(file.size):>10}")
    typer.echo(f"  {'in all':40} {decimal(sum(file.size for file in files)):>10}")
    if others := hub.left_out(source, files):
        typer.echo(f"Not sent: {clean(', '.join(others))}")
    if repository is None:
        words = [run]
        flags = {"--repo": [repo], "--base": [base], "--include": include, "--ignore": ignore}
        for flag, values in flags.items():
            for value in values or ():
                words += [] if value is None else [flag, value]
        words += ["--merged"] if merged else []
        words += ["--public"] if public else []
        print_next("push", recipe=shlex.join(words))
        return
    if not yes and not typer.confirm("Send these?"):
        typer.echo("Nothing was sent.")
        return
    typer.echo(hub.send(files, repository, title=title))
