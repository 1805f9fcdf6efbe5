"""`podium doctor`: diagnose a run; its findings, most important first."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from podium.console.next_command import print_next
from podium.console.terminal import STYLES, as_dicts, console, plain_text, print_json
from podium.errors.texts import as_line
from podium.runs.checkpoint import going_on

if TYPE_CHECKING:
    from podium.runs.doctor import HealthReport
    from podium.runs.monitors import Issue


class Level(StrEnum):
    """From which severity on the exit code is 1."""

    error = "error"
    warning = "warning"
    never = "never"


def doctor(
    run: Annotated[str, typer.Argument(help="A run's folder, or TRL's trainer_state.json.")],
    as_json: Annotated[bool, typer.Option("--json", help="The diagnosis as JSON.")] = False,
    fail_on: Annotated[Level, typer.Option(help="From which severity on the exit code is 1.")] = Level.never,
) -> None:
    """Diagnose a run, most important first: evidence, likely cause, what to change.

    The run may be finished, or still going on.
    """
    from podium.runs.doctor import examine

    report = examine(run)
    found = [issue.finding for issue in report.issues]
    if as_json:
        about = {"source": report.source, "steps": len(report.history), "has_completions": report.has_completions}
        print_json({**about, "findings": as_dicts(found), "conditions": [asdict(issue) for issue in report.issues]})
    else:
        _print(report)
    failing = {Level.error: ["error"], Level.warning: ["error", "warning"], Level.never: []}[fail_on]
    if any(finding.severity in failing for finding in found):
        raise typer.Exit(1)


def _print(report: HealthReport) -> None:
    from podium.runs.occupied import died

    last = report.history[-1].step if report.history else 0
    lines = [plain_text(f"{report.source}: {report.head}")]
    if who := died(Path(report.source)):
        what = f"It ended without a word of its own: {who} was killed (where memory runs out, too), or left by an exit."
        lines.append(plain_text(f"{what} {going_on([Path(report.source)])}"))
    if not report.has_completions:
        lines.append(Text("Numbers only, no completions: what needs groups or texts could not be looked at."))
    if not report.issues:
        lines.append(Text(report.nothing))
    alone = [issue for issue in report.issues if not _decided_by(issue)]
    for number, issue in enumerate(alone, start=1):
        beside = [other for other in report.issues if _decided_by(other) == issue.finding.code]
        lines += _entry(number, issue, beside, last)
    state = "doctor" if report.issues else "doctor, nothing found"
    if report.outcome == "solved":
        state = "doctor, solved"
        lines.append(plain_text(f"\nThe run is done, and no setting needs to change: {report.verdict}"))
    elif report.verdict:
        lines.append(plain_text(f"\nHeld out: {report.verdict}"))
    if report.outcome != "solved" and _is_curable(report):
        state = "doctor, curable"
        lines.append(plain_text(f"\npatch: podium cure {shlex.quote(report.source)}"))
    for line in lines:
        console.print(line, soft_wrap=True)
    if Path(report.source).is_dir():
        code = report.issues[0].finding.code if report.issues else ""
        print_next(state, run=report.source, code=code)


def _entry(number: int, issue: Issue, beside: Sequence[Issue], last: int) -> list[Text]:
    """The lines of a finding, and of those beside it that ask for another value of its settings."""
    finding = issue.finding
    severity = (f"{finding.severity} {finding.code}", STYLES[finding.severity])
    lines = [Text.assemble(f"\n{number}. ", severity, f"  {_when(issue, last)}")]
    parts = (("", finding.what), ("why: ", finding.why), ("fix: ", finding.fix))
    lines += [plain_text(f"   {label}{text}") for label, text in parts if text]
    lines += [plain_text(f"      {as_line(key, value)}") for key, value in finding.changes.items()]
    for other in beside:
        head = f"{other.finding.code} ({other.finding.severity}, {_when(other, last)})"
        lines.append(plain_text(f"   with it {head}: {other.finding.what} {other.finding.fix}"))
    return lines


def _decided_by(issue: Issue) -> str:
    """The code of the finding that this one is shown with, as that decides all its settings; empty: it stands alone."""
    elsewhere = issue.finding.facts.get("elsewhere", {})
    return "" if issue.finding.changes else next(iter(elsewhere.values()), "")


def _is_curable(report: HealthReport) -> bool:
    """Whether `podium cure` would change a setting."""
    from podium.recipe.changes import differences
    from podium.recipe.cure import prescribe, recipe_of_run, wanted

    document = recipe_of_run(Path(report.source))
    changes = prescribe(wanted([issue.finding for issue in report.issues])).changes
    return document is not None and bool(differences(document.values, changes))


def _when(issue: Issue, last: int) -> str:
    if issue.first_step == issue.last_step:
        return f"in step {issue.first_step}" if issue.first_step else "before training"
    every_step = issue.num_looks > issue.last_step - issue.first_step
    looks = "them" if every_step else f"{issue.num_looks} that were looked at"
    since = "" if issue.last_step >= last - 1 else ", not since"
    return f"steps {issue.first_step} to {issue.last_step}, in {issue.num_steps} of {looks}{since}"
