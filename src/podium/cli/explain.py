"""`podium explain`: what a finding means."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markdown import Markdown

from podium import rules


def explain(
    code: str = typer.Argument("", help="A code such as D001 or M101; without one, all codes are listed."),
) -> None:
    """What a finding means, what usually causes it, and what to do."""
    if code:
        Console().print(Markdown(rules.page(code)))
        return
    for known in rules.codes():
        typer.echo(f"{known}  {rules.title(known)}")
