"""`podium environments`: a test of tools and environments that needs no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podium.cli.flags import DataOption, JsonOption, OracleOption, UncountedOption
from podium.cli.rows import rows_of
from podium.console.terminal import (
    as_dicts,
    console,
    counted,
    fail_on_errors,
    plain_text,
    print_json,
    show_notes,
    table,
)
from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.errors import Finding
    from podium.tester.report import EnvironmentReport


def try_out(
    target: Annotated[
        str,
        typer.Argument(
            help="tools.py:function, builtin:calculator, game.py:Environment, gymnasium:FrozenLake-v1, or a recipe."
        ),
    ],
    data: DataOption = "",
    oracle: OracleOption = "",
    rows: Annotated[int, typer.Option("--rows", min=1, max=64, help="Rows to test with.")] = 6,
    turns: Annotated[int, typer.Option("--turns", min=1, max=100, help="Turns of an episode, at most.")] = 8,
    limit: Annotated[float, typer.Option("--limit", min=0.1, help="Seconds that a call may take.")] = 10.0,
    ignore: UncountedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Play a tool or an environment with silence, noise and repetition; report what it pays for and its mistakes.

    No model is needed. The exit code is 1 where an error was found, so that it can stand in CI.
    """
    from podium.cli.words import is_recipe
    from podium.console.next_command import print_next
    from podium.data.selection import sampled_rows
    from podium.tester.environments import ExamineSettings, examine_source

    show_notes()
    settings = ExamineSettings(num_rows=rows, turns=turns, limit=limit)
    named, folder, given = _of_recipe(target) if is_recipe(target) else ([("", target)], Path(), None)
    every = rows_of(data, given)
    reports = []
    for chosen, name in named:
        sample = [dict(row) for _, row in sampled_rows(_chosen(every, chosen), rows)]
        reports.append(examine_source(name, sample, oracle=oracle, folder=folder, settings=settings))
    found = without_ignored([each for report in reports for each in report.findings], ignore)
    if as_json:
        print_json(_as_json(reports, found))
    else:
        for report in reports:
            _print(report)
        print_findings(found, [report.closing for report in reports])
        if found:
            print_next("environments test, findings", code=found[0].code)
    fail_on_errors(found)


def _of_recipe(path: str) -> tuple[list[tuple[str, str]], Path, Any]:
    """A recipe's tools and environments, its folder, and its dataset. Raises `ConfigError` without any.

    Beside each stands by which value of the column `environment` its rows are chosen; empty: it may have all rows.
    Tools of MCP servers have no code here to be tested.
    """
    from podium.recipe import load

    recipe = load(path)
    environment = recipe.given.get("environment")
    tools = recipe.given.get("tools") or []
    environments = {"": environment} if environment else {}
    if isinstance(environment, Mapping):
        environments = dict(environment)
    every = [("", tool) for tool in ([tools] if isinstance(tools, str) else tools) if not isinstance(tool, Mapping)]
    named = [(key, str(name)) for key, name in (*every, *environments.items())]
    if not named:
        raise ConfigError(f"{path} has neither tools nor an environment.", fix="tools: [tools.py:multiply]", path=path)
    return named, Path(path).parent if Path(path).is_file() else Path(), recipe.data


def _chosen(rows: Iterable[Mapping[str, Any]], name: str) -> Iterable[Mapping[str, Any]]:
    """The rows whose column `environment` names one of several, which do not get that column; without a name, all."""
    if not name:
        return rows
    found = [{key: row[key] for key in row if key != "environment"} for row in rows if row.get("environment") == name]
    return found or [{}]


def _as_json(reports: Sequence[EnvironmentReport], found: Sequence[Finding]) -> dict[str, Any]:
    import dataclasses

    return {
        **listed(found),
        "tested": [
            {**dataclasses.asdict(report), "findings": as_dicts(report.findings), "closing": report.closing}
            for report in reports
        ],
    }


def _print(report: EnvironmentReport) -> None:
    """Tables of what policies earn and of calls."""
    earned = [each for each in report.earned if each.rewards]
    if earned:
        rows = []
        for each in earned:
            mean = sum(each.rewards) / len(each.rewards)
            cells = [f"{x:.2f}" for x in (min(each.rewards), mean, max(each.rewards))]
            rows.append((each.policy, *cells, f"{each.turns:.1f}"))
        console.print(table(_numbers("policy", "least", "mean", "most", "turns"), rows))
    if report.measured:
        rows = []
        for call in report.measured:
            milliseconds = [f"{1000 * x:.2g}" for x in (call.seconds, call.slowest)]
            rows.append((call.name, str(call.calls), *milliseconds, f"{call.characters:,}", str(call.failed)))
        console.print(table(_numbers("call", "number", "ms", "slowest", "characters", "failed"), rows))
    kinds = {"tool": "a tool", "environment": "its methods are tools", "text": "an environment in plain text"}
    if report.kind:
        number = "1 row" if report.num_rows == 1 else f"{report.num_rows} rows"
        console.print(plain_text(f"{report.name}: {kinds[report.kind]}; {number}"))


def _numbers(name: str, *columns: str) -> dict[str, str]:
    """Columns of a table: a name, and numbers."""
    return {name: "left", **dict.fromkeys(columns, "right whole")}


def without_ignored(found: Sequence[Finding], ignore: Sequence[str] | None) -> list[Finding]:
    """The findings of a test; errors of the codes behind `--ignore` do not count as such."""
    return [each.overruled() if each.code in (ignore or ()) and each.severity == "error" else each for each in found]


def listed(found: Sequence[Finding]) -> dict[str, Any]:
    """The findings of a test for `--json`, and how many are errors and warnings."""
    counts = {f"{kind}s": sum(each.severity == kind for each in found) for kind in ("error", "warning")}
    return {"findings": as_dicts(found), **counts}


def print_findings(found: Sequence[Finding], closings: Sequence[str]) -> None:
    """The findings, how many there are, how an error is overruled, and what was played."""
    wrong = [each.code for each in found if each.severity == "error"]
    ways = [f"If it is right as it is: --ignore {wrong[0]}"] if wrong else []
    for text in (*(f"\n{each}" for each in found), *([f"\n{counted(found)}."] if found else [""]), *ways, *closings):
        console.print(plain_text(text))
