"""`podium rewards`: the library, and a test of rewards that needs no model."""

from __future__ import annotations

import gc
import shlex
from typing import Annotated

import typer

from podium.cli.flags import DataOption, JsonOption
from podium.console.terminal import fail_on_errors, print_json, show_notes


def list_rewards(as_json: JsonOption = False) -> None:
    """List the rewards of the library, by family."""
    from podium.cli.rewards_pages import catalogue, entry
    from podium.rewards import LIBRARY

    if as_json:
        print_json({"rewards": [entry(name) for name in LIBRARY]})
    else:
        typer.echo(catalogue(), nl=False)


def show(
    name: Annotated[str, typer.Argument(help="A reward of the library; `podium rewards list` has them.")],
    as_json: JsonOption = False,
) -> None:
    """Describe a reward of the library: columns, settings, an example for a recipe and for Python."""
    from podium.cli.rewards_pages import entry, page

    text = page(name)
    if as_json:
        print_json({"rewards": [{**entry(name), "page": text}]})
    else:
        typer.echo(text, nl=False)


def try_out(
    target: Annotated[
        str, typer.Argument(help="file.py:function, package.module:function, a name of the library, or a recipe.")
    ],
    data: DataOption = "",
    answer_column: Annotated[
        str, typer.Option(help="The column with the right answer, or a template of several.")
    ] = "",
    rows: Annotated[int, typer.Option("--rows", min=2, max=64, help="Rows to test with.")] = 8,
    args: Annotated[
        list[str] | None, typer.Option("--args", help="A setting of the reward, key=value; repeatable.")
    ] = None,
    form: Annotated[
        list[str] | None, typer.Option("--form", help="One more way to write an answer, {} in its place; repeatable.")
    ] = None,
    limit: Annotated[float, typer.Option("--limit", min=0.1, help="Seconds that a call may take.")] = 10.0,
    budget: Annotated[float, typer.Option("--budget", min=1, help="Seconds that all calls of a reward take.")] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Call a reward on real rows with right answers, wrong ones and texts without one; report its mistakes.

    No model is needed. The exit code is 1 where an error was found, so that it can stand in CI.
    """
    gc.disable()  # a tenth of the time went into collections while modules load
    from podium.cli.rewards_report import examine_rewards, print_reports, reports_as_json
    from podium.cli.words import is_recipe
    from podium.console.next_command import print_next
    from podium.tester.rewards import ExamineSettings

    show_notes()
    settings = ExamineSettings(
        answer_column=answer_column or None,
        num_rows=rows,
        limit_seconds=limit,
        budget_seconds=budget,
        forms=tuple(form or ()),
    )
    reports, total = examine_rewards(target, data, args or [], settings)
    found = [*(finding for report in reports for finding in report.findings), *total]
    if as_json:
        print_json(reports_as_json(reports, total, found))
    else:
        print_reports(reports, found)
        if found:
            print_next("rewards test, findings", code=min(each.code for each in found))
        elif is_recipe(target):
            print_next("rewards test", recipe=shlex.quote(target))
        else:
            print_next("rewards test, a function", target=target, data=data)
    fail_on_errors(found)
