"""`podium explain`: the page of a finding."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from podium.console.terminal import print_json
from podium.runs import findings

SECTIONS = {"What it means": "means", "Usual causes": "causes", "What to do": "fix"}
"""Headings of a page, and their keys in JSON."""


def explain(
    code: Annotated[
        str, typer.Argument(help="A code such as D001, a setting or a metric; without one, all codes are listed.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Explain a finding (meaning, usual causes, what to do), a setting or a metric."""
    if code and code.strip().upper() not in findings.codes() and (words := _of_name(code.strip())):
        print_json({"name": code, "means": words}) if as_json else typer.echo(words)
    elif as_json:
        pages = map(findings.page, [code] if code else findings.codes())
        print_json({"pages": [_plain(page) for page in pages]})
    elif code:
        Console().print(Markdown(findings.page(code)))
    else:
        for known in findings.codes():
            typer.echo(f"{known}  {findings.title(known)}")


def _of_name(name: str) -> str:
    """Describe a metric, a setting, or on two lines what is both; empty for what is neither."""
    from podium.algorithm.metrics import describe
    from podium.recipe.schema import about

    lines = [about(name.lstrip("-").replace("-", "_"))]
    if metric := describe(name):
        lines.append(f"{name}, a metric ({metric.unit}): {metric.meaning}")
    return "\n".join(filter(None, lines))


def _plain(page: str) -> dict[str, str]:
    """`code`, `title` and the sections of a page."""
    head, *sections = page.split("\n## ")
    code, _, title = head.strip().removeprefix("# ").partition(": ")
    parted = [section.partition("\n") for section in sections]
    return {"code": code, "title": title} | {SECTIONS[name.strip()]: text.strip() for name, _, text in parted}
