"""`podium doctor`: what is the matter with a run, most important first."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from podium.runs.doctor import HealthReport
    from podium.runs.monitors import Issue

FAILED = 1
COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


class Level(StrEnum):
    """From which severity on the exit code is 1."""

    error = "error"
    warning = "warning"
    never = "never"


def doctor(
    run: Annotated[str, typer.Argument(help="A run's folder, TRL's trainer_state.json, or a CSV or JSONL log.")],
    as_json: Annotated[bool, typer.Option("--json", help="The diagnosis as JSON.")] = False,
    fail_on: Annotated[Level, typer.Option(help="From which severity on the exit code is 1.")] = Level.never,
) -> None:
    """What is the matter with a run, most important first: evidence, likely cause, what to change.

    The run may be finished, or still going on; logs of TRL and verl are read, too.
    """
    from podium.cli.structured import print_json
    from podium.runs.doctor import examine

    report = examine(run)
    if as_json:
        print_json(_plain(report))
    else:
        _show(report)
    severities = {issue.finding.severity for issue in report.issues}
    failing = {Level.error: {"error"}, Level.warning: {"error", "warning"}, Level.never: set()}[fail_on]
    if severities & failing:
        raise typer.Exit(FAILED)


def _plain(report: HealthReport) -> dict[str, object]:
    from podium.cli.structured import findings

    return {
        "source": report.source,
        "steps": len(report.history),
        "has_completions": report.has_completions,
        "findings": findings(issue.finding for issue in report.issues),
        "conditions": [asdict(issue) for issue in report.issues],
    }


def _show(report: HealthReport) -> None:
    from podium.cli.terminal import clean, console

    last = report.history[-1].step if report.history else 0
    console.print(f"{clean(report.source)}: {report.head}", markup=False, soft_wrap=True)
    if not report.has_completions:
        console.print("Numbers only, no completions: what needs groups or texts could not be looked at.", markup=False)
    if not report.issues:
        console.print(report.nothing, markup=False, soft_wrap=True)
    for number, issue in enumerate(report.issues, start=1):
        _show_issue(number, issue, last)


def _show_issue(number: int, issue: Issue, last: int) -> None:
    from rich.text import Text

    from podium.cli.terminal import clean, console

    finding = issue.finding
    head = Text(f"\n{number}. ")
    head.append(f"{finding.severity} {finding.code}", style=COLOURS[finding.severity])
    head.append(f"  {_when(issue, last)}")
    console.print(head, soft_wrap=True)
    for label, text in (("", finding.what), ("why: ", finding.why), ("fix: ", finding.fix)):
        if text:
            console.print(Text(f"   {label}{clean(text)}"), soft_wrap=True)


def _when(issue: Issue, last: int) -> str:
    """Since when, how often, and whether it is over."""
    if issue.first_step == issue.last_step:
        return f"in step {issue.first_step}" if issue.first_step else "before training"
    over = "" if issue.last_step >= last - 1 else ", not since"
    return f"steps {issue.first_step} to {issue.last_step}, in {issue.num_steps} of them{over}"
