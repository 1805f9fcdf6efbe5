"""`podium recipes`: the recipes that come with Podium."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def recipes(as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False) -> None:
    """List the recipes that come with Podium; `podium train NAME` runs one."""
    from podium.recipe import shipped_recipes

    if as_json:
        from podium.cli.structured import print_json

        listed = [
            {"name": name, "about": _first_comment(file), "file": str(file)} for name, file in shipped_recipes().items()
        ]
        print_json({"recipes": listed})
        return
    for name, file in shipped_recipes().items():
        typer.echo(f"{name:<14} {_first_comment(file)}")
        typer.echo(f"{'':<14} {file}")


def _first_comment(file: Path) -> str:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()
