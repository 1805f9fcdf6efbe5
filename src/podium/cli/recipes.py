"""`podium recipes`: the recipes that come with Podium."""

from __future__ import annotations

from pathlib import Path

import typer


def recipes() -> None:
    """List the recipes that come with Podium; `podium train NAME` runs one."""
    from podium.recipe import shipped_recipes

    for name, file in shipped_recipes().items():
        typer.echo(f"{name:<14} {_first_comment(file)}")
        typer.echo(f"{'':<14} {file}")


def _first_comment(file: Path) -> str:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()
