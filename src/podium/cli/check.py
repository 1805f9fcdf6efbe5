"""`podium check RECIPE`: what is wrong with a run before weights are loaded."""

from __future__ import annotations

import dataclasses
import gc
import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from podium.cli.plan import as_json as plan_as_json
from podium.cli.plan import command, layouts_of, print_plan
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

    from podium.tester.truth import TruthTable


def check(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    processes: Annotated[
        int | None,
        typer.Option("--processes", metavar="N", help="Check the run of N processes; none is started."),
    ] = None,
    accelerate: Annotated[
        str | None,
        typer.Option("--accelerate", metavar="CONFIG", help="How they would share work: as of `podium train`."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="Plan a run on GPUs that need not be here: h100, or a size, 80GB."),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", metavar="N", min=1, help="How many of them, on all machines together; 1."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", min=1, help="On how many machines; of up to 8 devices each.")
    ] = None,
) -> None:
    """Report everything that is wrong with a run before it starts.

    RECIPE and flags are those of `podium train`. No weight is loaded, and no process is started.
    Python files that the recipe names (rewards, datasets) are run, as training would: read those of others first. Exit
    code 1: an error was found; `podium explain CODE` says more about each.

    --devices 16 --gpu h100 adds a plan: memory of each device in every layout, and the line that starts the first
    that fits. It is calculated from the model's config.json.
    """
    gc.disable()  # a seventh of the time went into collections while modules load
    from podium.checks import examine
    from podium.cli.words import recipe_and_flags

    path, overrides = recipe_and_flags(context.args, "check")
    quiet()
    launch = None
    layouts = None
    if devices is not None or gpu is not None or nodes is not None:
        if processes is not None:
            raise ConfigError(
                "--processes checks a run on this machine, --devices plans one on others: leave one of them out."
            )
        layouts = layouts_of(devices or 1, gpu, nodes, accelerate)
    elif processes is not None or accelerate is not None:
        from podium.cli.launch import as_launch

        launch = as_launch(processes, accelerate)
    checked = examine(path, overrides, launch=launch, layouts=layouts)
    plan = checked.plan
    # Training waits for a vLLM server, and ends where none comes or it does not fit: an error of a check.
    found = gravest_first(
        dataclasses.replace(finding, severity="error") if finding.code == "C034" else finding
        for finding in checked.findings
    )
    if as_json:
        made = {"findings": as_dicts(found), "reward_tables": [dataclasses.asdict(table) for table in checked.tables]}
        print_json(made if plan is None else {**made, "plan": plan_as_json(plan, context.args)})
    else:
        print_findings(console, found, stops=True)
        print_truths(console, checked.tables)
        print_wrapped(console, plain_text(f"{path}: {counted(found) or checked.nothing}"))
        launched = [] if processes is None else ["--processes", str(processes)]
        launched += [] if accelerate is None or layouts is not None else ["--accelerate", accelerate]
        line = shlex.join([*context.args, *launched]) if launched else ""
        if plan is not None:
            print_plan(console, plan)
            line = command(context.args, plan.chosen) if plan.chosen is not None else ""
        _print_next(context.args, line, found)
    fail_on_errors(found)


def _print_next(words: Sequence[str], line: str, found: Sequence[Finding]) -> None:
    """The worst finding's page where there is an error, else the next command on the same recipe.

    `line`: the words of `podium train` for the processes that were checked, or planned; empty: neither.
    """
    worst = next((finding for finding in found if finding.severity != "note"), None)
    outcome = "check, processes" if line else "check"
    if len(words) == 1 and worst is not None and worst.severity == "error" and is_of_reward_test([worst]):
        outcome = "check, rewards"
    elif len(words) == 1 and any(finding.changes for finding in found if finding.severity != "note"):
        outcome = "check, curable"
    elif worst is not None and worst.severity == "error":
        outcome = "check, errors"
    if line and outcome != "check, processes":
        typer.echo(f"after that: podium train {line}")
    recipe = line if outcome == "check, processes" else shlex.join(words)
    print_next(outcome, recipe=recipe, code="" if worst is None else worst.code)


def print_truths(to: Console, tables: Iterable[TruthTable]) -> None:
    """Scores of right and wrong answers, without a model."""
    for table in tables:
        for line in table.as_text():
            to.print(plain_text(line), soft_wrap=True)


def is_of_reward_test(found: Sequence[Finding]) -> bool:
    """Whether `podium rewards test` has more to show about one of the findings."""
    return any(finding.severity != "note" and finding.code.startswith("W") for finding in found)
