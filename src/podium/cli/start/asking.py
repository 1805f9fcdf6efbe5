"""The questions of `podium init`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from podium.errors import ConfigError


def at_terminal(*, yes: bool) -> bool:
    """Whether questions can be asked."""
    return not yes and sys.stdin.isatty()


def ask(question: str, usual: str, *, yes: bool) -> str:
    """Read an answer; `usual` for an empty line, and with --yes. Raises `ConfigError` where the input has ended."""
    if yes:
        return usual
    try:
        return str(typer.prompt(question, default=usual, show_default=bool(usual))).strip()
    except typer.Abort:
        if sys.stdin.isatty():
            raise KeyboardInterrupt from None
        typer.echo()  # behind the question
        raise ConfigError("cli.not_every_question") from None


def choose(question: str, table: Mapping[str, Any], usual: str, *, yes: bool) -> str:
    """Read a word of a table; each entry has a text `about` itself."""
    if yes:
        return usual
    typer.echo("\n".join([question, *(f"  {word:<10} {each.about}" for word, each in table.items())]))
    return one_of("Type one of them", list(table), usual)


def one_of(question: str, words: Sequence[str], usual: str = "") -> str:
    """Read one of some words."""
    while (word := ask(question, usual, yes=False)) not in words:
        typer.echo(f"`{word}` is none of {', '.join(words)}.")
    return word
