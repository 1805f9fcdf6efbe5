"""`podium pilot RECIPE`: a few minutes over a small grid of settings; writes a recipe with the best of them."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podium.console.next_command import print_next
from podium.console.terminal import (
    console,
    errors,
    is_main,
    print_findings,
    print_json,
    print_wrapped,
    quiet,
    show_notes,
)
from podium.console.terminal import table as text_table
from podium.errors import ConfigError
from podium.errors.texts import clean

if TYPE_CHECKING:
    from rich.table import Table

    from podium.pilot import PilotResult, PilotSettings
    from podium.pilot.records import Entry
    from podium.recipe.document import Document

NOTHING_LEARNS = 1
"""Exit code of a pilot in which no candidate learns."""


def pilot(
    context: typer.Context,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=A,B", help="Values of one setting; again for more, which are combined."),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=8, help="Most training rows to use.")] = 512,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each candidate that is trained.")] = 1,
    budget: Annotated[float, typer.Option("--budget", min=1, help="Seconds; near its end fewer steps.")] = 300,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder of pilot.json and pilot.html; beside the run's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Try a small grid of settings for a few minutes, and write a recipe with the best of them.

    RECIPE and flags are those of `podium train`. --grid varies examples (with, without), temperature, learning_rate,
    max_completion_length and num_generations. Held-out rows are not looked at. Exit code 1: no candidate learns.
    """
    from podium.cli.words import recipe_and_flags
    from podium.pilot import PilotSettings
    from podium.pilot.grid import read_grid

    path, overrides = recipe_and_flags(context.args, "pilot")
    axes = read_grid(grid) if grid else None
    settings = PilotSettings(grid=axes, rows=rows, seeds=seeds, budget=budget)
    result, written = run(path, overrides, settings, output=output, as_json=as_json)
    if as_json:
        print_json({**result.as_dict(), "written": None if written is None else str(written)})
    if written is None:
        raise typer.Exit(NOTHING_LEARNS)


def run(
    path: str | Document,
    overrides: dict[str, Any],
    settings: PilotSettings,
    *,
    output: Path | None = None,
    as_json: bool = False,
) -> tuple[PilotResult, Path | None]:
    """Check, try the candidates, print and write. The recipe's path is None where no candidate learns."""
    from podium.checks import as_error, examine
    from podium.checks.table import NOT_HERE
    from podium.pilot import pilot as tried
    from podium.pilot.files import HTML, write, write_recipe

    _refuse_several()
    quiet()
    checked = examine(path, overrides)
    wrong = [each for each in checked.findings if each.severity == "error" or each.code in NOT_HERE]
    if checked.recipe is None or wrong:
        raise as_error(str(path), wrong)
    recipe = checked.recipe
    os.environ.update(recipe.env)
    show_notes()
    logging.getLogger("podium").setLevel(logging.WARNING)  # notes of a trainer would come once for each
    folder = output or recipe.folder.with_name(f"{recipe.folder.name}-pilot")
    to = errors if as_json else console

    def report(text: str) -> None:
        print_wrapped(to, _text(text))

    try:
        result = tried(
            path, overrides, settings, folder=folder, report=report, keep=lambda so_far: write(so_far, folder)
        )
    except KeyboardInterrupt:
        sys.stderr.write(f"\nThe rungs that ended are in {folder}.\n" if (folder / HTML).is_file() else "\n")
        raise
    write(result, folder)
    written = None if result.outcome == "nothing" else write_recipe(result, path, overrides, recipe.given)
    if not as_json:
        _print(result, folder / HTML, written)
    return result, written


def _print(result: PilotResult, page: Path, written: Path | None) -> None:
    console.print(table(result))
    for sentence in result.sentences():
        print_wrapped(console, _text(sentence))
    if written is None:
        print_findings(console, [each for each in result.findings if each.severity != "note"])
        print_wrapped(console, _text(f"Picture: {page}"))
        print_next("pilot, nothing learns", recipe=shlex.quote(result.name))
    else:
        print_wrapped(console, _text(f"Picture: {page}. Recipe: {written}"))
        print_next("pilot", recipe=shlex.quote(str(written)))


def table(result: PilotResult) -> Table:
    """A row for each candidate, the best first; settings that all share are left out."""
    from podium.pilot.files import in_order

    axes = list(dict.fromkeys(axis for each in result.entries for axis in each.candidate.values))
    varied = [axis for axis in axes if len({str(each.candidate.values.get(axis)) for each in result.entries}) > 1]
    columns = {_SHORT.get(axis, axis): "left whole" for axis in varied}
    numbers = dict.fromkeys(("rung", "steps", "spread", "before", "after", "score"), "right whole")
    return text_table(
        {**columns, **numbers, "": "left"},
        [
            (*(str(each.candidate.values.get(axis, "")) for axis in varied), *_numbers(each), _remark(result, each))
            for each in in_order(result)
        ],
        title=f"Candidates by {result.noun} on {result.num_rows[1]} training rows that are not trained on",
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


_SHORT = {"max_completion_length": "limit", "num_generations": "group", "learning_rate": "rate"}


def _numbers(entry: Entry) -> tuple[str, ...]:
    signal, seen = entry.signal, entry.diagnosis
    spread = None if seen is None else seen.spread_share
    values = (spread, signal and signal.before, signal and signal.after, entry.score if entry.rung else None)
    return (
        str(entry.rung),
        str(signal.steps if signal else 0),
        f"{spread:.0%}" if spread is not None else "-",
        *("-" if value is None else f"{value:.2f}" for value in values[1:]),
    )


def _remark(result: PilotResult, entry: Entry) -> str:
    return "chosen" if entry is result.winner and result.outcome != "nothing" else entry.dropped


def _text(text: str) -> Any:
    from rich.text import Text

    return Text(clean(text))


def _refuse_several() -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 or not is_main():
        raise ConfigError(
            "A pilot is one process, and this is one of several.",
            fix="podium pilot without a launcher; then train the recipe that it writes with it",
        )
