"""`podium init NAME`: a folder to begin with, from four questions."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from podium.errors import ConfigError


def init(
    name: Annotated[str, typer.Argument(help="The folder to make.")],
    data: Annotated[
        str | None, typer.Option("--data", help="Your rows: a CSV or JSONL file, or any dataset. Else an example.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="The column with the question, of --data. Else found by its name.")
    ] = None,
    answer: Annotated[str | None, typer.Option("--answer", help="The column with the right answer, of --data.")] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="What is rewarded: number, exact, json, code or format.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", help="Where it will be trained: cpu, small-gpu or large-gpu.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="builtin:..., a Hugging Face id or a folder. Else one that fits.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: what is not given is as usual.")] = False,
) -> None:
    """Write a folder with a recipe, data, a reward function, its test, and what to type. Never overwrites.

    What is not given as a flag is asked.
    """
    from podium.cli.start import check_free, files, write
    from podium.cli.start.choices import MACHINES, TASKS, Choices, known
    from podium.cli.start.own_data import look_at

    folder = Path(name).expanduser()
    check_free(folder)
    task, machine = known(task, TASKS, "--task"), known(machine, MACHINES, "--machine")
    if data is None:
        data = _ask("Your rows: a CSV or JSONL file, or nothing for an example", "", yes=yes)
    own = look_at(data, prompt, answer) if data else None
    task = task or _choose("What is rewarded?", TASKS, own.likely_task if own else "number", yes=yes)
    if own is not None:
        own.check(task)
    machine = machine or _choose("Where will it be trained?", MACHINES, "cpu", yes=yes)
    model = model or _ask("Which model: a Hugging Face id, a folder or", MACHINES[machine].model, yes=yes)
    texts = files(folder, Choices(task=task, machine=machine, model=model), own)
    write(folder, texts)
    commands = (f"cd {folder}", "python test_rewards.py", "podium check run.yaml", "podium train run.yaml")
    typer.echo("\n  ".join([f"{folder} has {', '.join(texts)}. Next:", *commands]))


def _ask(question: str, usual: str, *, yes: bool) -> str:
    """Read an answer; `usual` for an empty line, and with --yes. Raises `ConfigError` where the input has ended."""
    if yes:
        return usual
    try:
        return str(typer.prompt(question, default=usual, show_default=bool(usual))).strip()
    except typer.Abort:
        if sys.stdin.isatty():
            raise KeyboardInterrupt from None
        raise ConfigError(
            "not every question was answered.",
            fix="Give --data, --task, --machine and --model, or --yes for what is usual.",
        ) from None


def _choose(question: str, table: Mapping[str, Any], usual: str, *, yes: bool) -> str:
    if yes:
        return usual
    typer.echo("\n".join([question, *(f"  {word:<10} {each.about}" for word, each in table.items())]))
    while (word := _ask("Type one of them", usual, yes=yes)) not in table:
        typer.echo(f"`{word}` is none of {', '.join(table)}.")
    return word
