"""`podium recipes`: the recipes that come with Podium."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from podium.console.terminal import print_json
from podium.errors import ConfigError
from podium.errors.texts import listed, nearest

CLOSING = """\
podium train NAME            runs one
podium recipes NAME          prints one, to begin your own with: podium recipes NAME > run.yaml
podium init my-run           writes a recipe, data and a reward to begin with, from four questions
"""


def recipes(
    name: Annotated[str | None, typer.Argument(help="The recipe to print; without: a list of them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The list as one JSON object.")] = False,
) -> None:
    """List the recipes that come with Podium; `podium train NAME` runs one."""
    from podium.recipe.document import shipped_recipes

    shipped = shipped_recipes()
    if name is not None and name not in shipped:
        near = nearest(name, shipped)
        raise ConfigError(
            f"There is no recipe {name}. There are {listed(shipped)}.",
            fix=f"Did you mean `{near}`?" if near else "",
            settings=(name,),
            name=name,
            shipped=shipped,
            near=near,
        )
    if name is not None:
        typer.echo(shipped[name].read_text(encoding="utf-8"), nl=False)
    elif as_json:
        rows = [{"name": known, **heading(file), "file": str(file)} for known, file in shipped.items()]
        print_json({"recipes": rows})
    else:
        width = max(map(len, shipped))
        for known, file in shipped.items():
            lines = heading(file)
            typer.echo(f"{known:<{width}} {lines['about']}\n{'':<{width}} Needs {lines['needs']}")
        typer.echo(f"\n{CLOSING}", nl=False)


def heading(file: Path) -> dict[str, str]:
    """The first two lines of a shipped recipe: what it is about, and `Needs: ...`."""
    about, needs = (line.removeprefix("# ") for line in file.read_text(encoding="utf-8").splitlines()[:2])
    return {"about": about, "needs": needs.removeprefix("Needs: ")}
