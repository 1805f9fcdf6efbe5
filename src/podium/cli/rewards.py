"""`podium rewards list` and `show`: the library."""

from __future__ import annotations

from typing import Annotated

import typer

from podium.cli.flags import JsonOption
from podium.console.terminal import print_json


def list_rewards(as_json: JsonOption = False) -> None:
    """List the rewards of the library, by family."""
    from podium.cli.rewards_pages import catalogue, entry
    from podium.rewards import LIBRARY

    if as_json:
        print_json({"rewards": [entry(name) for name in LIBRARY]})
    else:
        typer.echo(catalogue(), nl=False)


def show(
    name: Annotated[str, typer.Argument(help="A reward of the library; `podium rewards list` has them.")],
    as_json: JsonOption = False,
) -> None:
    """Describe a reward of the library: columns, settings, an example for a recipe and for Python."""
    from podium.cli.rewards_pages import entry, page

    text = page(name)
    if as_json:
        print_json({"rewards": [{**entry(name), "page": text}]})
    else:
        typer.echo(text, nl=False)
