"""`podium test`, and its older names `rewards test`, `environments test` and `agents test`. None needs a model."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podium.cli.flags import (
    AllFlags,
    EnvironmentFlags,
    JsonOption,
    ProgramFlags,
    RewardFlags,
    UncountedOption,
    takes_records,
)
from podium.console.terminal import fail_on_errors, plain_text, print_json, show_notes
from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.cli import tested
    from podium.cli.subjects import Target
    from podium.errors import Finding


@takes_records
def try_out(
    what: Annotated[
        str,
        typer.Argument(
            help="A recipe; file.py:NAME of a reward, tool, environment or program; a name of the library, "
            "builtin:guess, gymnasium:FrozenLake-v1, 'command: python my_agent.py'.",
        ),
    ],
    flags: AllFlags,
    subject: Annotated[
        str, typer.Option("--as", help="reward, environment or program, where it cannot be seen which WHAT is.")
    ] = "",
    ignore: UncountedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Test a reward, a tool, an environment, a program, or all of a recipe, without a model; report its mistakes.

    Rewards are called with right answers, wrong ones and texts without one; the others are played by policies that
    know no task. The exit code is 1 where an error was found, so that it can stand in CI.
    """
    gc.disable()  # a tenth of the time went into collections while modules load
    from podium.cli import tested
    from podium.cli.subjects import SUBJECTS, subjects_of, target_of
    from podium.console.next_command import print_next
    from podium.console.terminal import console

    if subject and subject not in SUBJECTS:
        raise ConfigError(f"--as {subject}: there are {', '.join(SUBJECTS)}", fix="--as reward", subject=subject)
    show_notes()
    named = target_of(what)
    subjects = (subject,) if subject else subjects_of(named)
    if not as_json:
        console.print(plain_text(f"{what} is taken for {tested.in_words(named, subjects)}."), soft_wrap=True)
    found: list[Finding] = []
    results: list[Mapping[str, Any]] = []
    for kind in subjects:
        result = _tested_as(kind, named, flags)
        findings = without_ignored(result.findings, ignore)
        found += findings
        if as_json:
            results.append({"subject": kind, **tested.as_json(result, findings)})
        else:
            tested.show(result, findings)
    if as_json:
        print_json({**tested.listed(found), "target": what, "tests": results})
    elif found:
        print_next("test, findings", code=found[0].code)
    elif named.recipe is not None:
        print_next("rewards test", recipe=shlex.quote(what))
    fail_on_errors(found)


def _tested_as(subject: str, target: Target, flags: AllFlags) -> tested.Tested:
    from podium.cli import tested

    if subject == "reward":
        return tested.rewards(target, flags.of_reward)
    if subject == "environment":
        return tested.environments(target, flags.of_environment)
    return tested.program(target, flags.of_program)


@takes_records
def try_out_rewards(
    target: Annotated[
        str, typer.Argument(help="file.py:function, package.module:function, a name of the library, or a recipe.")
    ],
    flags: RewardFlags,
    as_json: JsonOption = False,
) -> None:
    """Call a reward on real rows with right answers, wrong ones and texts without one; report its mistakes.

    No model is needed. The exit code is 1 where an error was found, so that it can stand in CI.
    """
    gc.disable()  # as above
    from podium.cli import tested
    from podium.cli.subjects import target_of
    from podium.console.next_command import print_next

    show_notes()
    named = target_of(target)
    result = tested.rewards(named, flags)
    found = result.findings
    if as_json:
        print_json(tested.as_json(result, found))
    else:
        tested.show(result, found)
        if found:
            print_next("test, findings", code=min(finding.code for finding in found))
        elif named.recipe is not None:
            print_next("rewards test", recipe=shlex.quote(target))
        else:
            print_next("rewards test, a function", target=target, data=flags.data)
    fail_on_errors(found)


@takes_records
def try_out_environments(
    target: Annotated[
        str,
        typer.Argument(
            help="tools.py:function, builtin:calculator, game.py:Environment, gymnasium:FrozenLake-v1, or a recipe."
        ),
    ],
    flags: EnvironmentFlags,
    ignore: UncountedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Play a tool or an environment with silence, noise and repetition; report what it pays for and its mistakes.

    No model is needed. The exit code is 1 where an error was found, so that it can stand in CI.
    """
    from podium.cli import tested
    from podium.cli.subjects import target_of

    show_notes()
    _finish(tested.environments(target_of(target), flags), ignore, as_json=as_json)


@takes_records
def try_out_program(
    target: Annotated[str, typer.Argument(help="agent.py:run, 'command: python my_agent.py', or a recipe.")],
    flags: ProgramFlags,
    ignore: UncountedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run an agent program with scripted answers; report what they earn and its mistakes.

    No model is needed. The exit code is 1 where an error was found, so that it can stand in CI.
    """
    from podium.cli import tested
    from podium.cli.subjects import target_of

    show_notes()
    _finish(tested.program(target_of(target), flags), ignore, as_json=as_json)


def _finish(result: tested.Tested, ignore: Sequence[str] | None, *, as_json: bool) -> None:
    """Print the result of a test of episodes, and end with its exit code."""
    from podium.cli import tested
    from podium.console.next_command import print_next

    found = without_ignored(result.findings, ignore)
    if as_json:
        print_json(tested.as_json(result, found))
    else:
        tested.show(result, found)
        if found:
            print_next("test, findings", code=found[0].code)
    fail_on_errors(found)


def without_ignored(found: Sequence[Finding], ignore: Sequence[str] | None) -> list[Finding]:
    """The findings of a test; errors of the codes behind `--ignore` do not count as such."""
    return [
        finding.overruled() if finding.code in (ignore or ()) and finding.severity == "error" else finding
        for finding in found
    ]
