"""`podium check RECIPE`: what is wrong with a run before weights are loaded; with `--rollouts`, what the model does."""

from __future__ import annotations

import dataclasses
import gc
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podium.console.next_command import print_next
from podium.console.terminal import (
    as_dicts,
    console,
    counted,
    fail_on_errors,
    plain_text,
    print_findings,
    print_json,
    print_wrapped,
    quiet,
)
from podium.errors import ConfigError, Finding, gravest_first

if TYPE_CHECKING:
    from rich.console import Console

    from podium.checks.verdict import Diagnosis
    from podium.recipe import Recipe
    from podium.rewards.tester.truth import TruthTable


def check(
    context: typer.Context,
    rollouts: Annotated[
        int, typer.Option("--rollouts", min=0, help="Load the model and sample from this many prompts as well.")
    ] = 0,
    save: Annotated[
        str, typer.Option("--save", help="Write the pass rate of every sampled prompt into this file.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    processes: Annotated[
        int | None,
        typer.Option("--processes", metavar="N", help="Check the run of N processes; none is started."),
    ] = None,
    accelerate: Annotated[
        str | None,
        typer.Option("--accelerate", metavar="CONFIG", help="How they would share work: as of `podium train`."),
    ] = None,
) -> None:
    """Report everything that is wrong with a run before it starts.

    RECIPE and flags are those of `podium train`. Without --rollouts no weight is loaded, and no process is started.
    Python files that the recipe names (rewards, datasets) are run, as training would: read those of others first. Exit
    code 1: an error was found; `podium explain CODE` says more about each.
    """
    gc.disable()  # a seventh of the time went into collections while modules load
    from podium.checks import examine
    from podium.cli.words import recipe_and_flags

    path, overrides = recipe_and_flags(context.args, "check")
    _check_save(save, rollouts)
    quiet()
    launch = None
    if processes is not None or accelerate is not None:
        from podium.cli.launch import as_launch

        launch = as_launch(processes, accelerate)
    checked = examine(path, overrides, keep_rows=bool(rollouts), launch=launch)
    found = _without_waiting(checked.findings)
    extra: dict[str, Any] = {"reward_tables": [dataclasses.asdict(table) for table in checked.tables]}
    if not as_json:
        print_findings(console, found, stops=True)
        print_truths(console, checked.tables)
    if rollouts and checked.recipe is not None:
        gc.enable()
        diagnosis, run = _sample(checked.recipe, rollouts, save, shown=not as_json)
        found = [*found, *diagnosis.findings]
        extra |= {"rollouts": {**diagnosis.as_dict(), "run": dict(run)}}
    if as_json:
        print_json({"findings": as_dicts(found), **extra})
    else:
        print_wrapped(console, plain_text(f"{path}: {counted(found) or checked.nothing}"))
        launched = [] if processes is None else ["--processes", str(processes)]
        launched += [] if accelerate is None else ["--accelerate", accelerate]
        _print_next(context.args, launched, found, rollouts=bool(rollouts))
    fail_on_errors(found)


def _sample(recipe: Recipe, rollouts: int, save: str, *, shown: bool) -> tuple[Diagnosis, list[tuple[str, str]]]:
    """Load the model and sample from so many prompts: what it does, and the lines about memory and time."""
    os.environ.update(recipe.env)
    from podium.cli.rollouts import sample_groups, tables

    diagnosis, run = sample_groups(recipe, rollouts, save)
    if shown:
        for table in tables(diagnosis, run):
            console.print(table)
        if save:
            console.print(f"Pass rates written to {save}; a recipe takes them as `pass_rates: {save}`.\n")
        print_findings(console, diagnosis.findings)
    return diagnosis, run


def _without_waiting(found: Sequence[Finding]) -> list[Finding]:
    """Training waits for a vLLM server, and ends where none comes or it does not fit: an error of a check."""
    return gravest_first(
        dataclasses.replace(finding, severity="error") if finding.code == "C034" else finding for finding in found
    )


def _print_next(words: Sequence[str], launched: Sequence[str], found: Sequence[Finding], *, rollouts: bool) -> None:
    """The worst finding's page where there is an error, else the next command on the same recipe."""
    worst = next((finding for finding in found if finding.severity != "note"), None)
    if len(words) == 1 and worst is not None and worst.severity == "error" and is_of_reward_test([worst]):
        print_next("check, rewards", recipe=shlex.join(words))
        return
    if len(words) == 1 and any(finding.changes for finding in found if finding.severity != "note"):
        print_next("check --rollouts, curable" if rollouts else "check, curable", recipe=shlex.join(words))
        return
    if worst is not None and worst.severity == "error":
        print_next("check, errors", code=worst.code)
        return
    if launched:
        print_next("check --rollouts", recipe=shlex.join([*words, *launched]))
        return
    sampled = "check --rollouts, not ready" if worst is not None else "check --rollouts"
    print_next(sampled if rollouts else "check", recipe=shlex.join(words))


def _check_save(save: str, rollouts: int) -> None:
    if save and not rollouts:
        raise ConfigError(
            f"--save {save}: nothing is measured without --rollouts.", fix=f"--rollouts 200 --save {save}", save=save
        )
    if save and not Path(save).absolute().parent.is_dir():
        raise ConfigError(
            f"--save {save}: there is no folder {Path(save).parent}.", save=save, folder=Path(save).parent
        )


def print_truths(to: Console, tables: Iterable[TruthTable]) -> None:
    """Scores of right and wrong answers, without a model."""
    for table in tables:
        for line in table.as_text():
            to.print(plain_text(line), soft_wrap=True)


def is_of_reward_test(found: Sequence[Finding]) -> bool:
    """Whether `podium rewards test` has more to show about one of the findings."""
    return any(finding.severity != "note" and finding.code.startswith("W") for finding in found)
