"""`podium agents`: a test of an agent program that needs no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podium.cli.environments import listed, print_findings, without_ignored
from podium.cli.flags import DataOption, JsonOption, OracleOption, UncountedOption
from podium.cli.rows import row_of
from podium.console.terminal import console, fail_on_errors, plain_text, print_json, show_notes, table
from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.data.rows import DataSpec
    from podium.errors import Finding
    from podium.tester.report import ProgramReport

COMMAND = "command:"


def try_out(
    target: Annotated[str, typer.Argument(help="agent.py:run, 'command: python my_agent.py', or a recipe.")],
    data: DataOption = "",
    row: Annotated[int, typer.Option("--row", min=0, help="Which of them is played.")] = 0,
    oracle: OracleOption = "",
    turns: Annotated[int, typer.Option("--turns", min=1, max=100, help="Answers in an episode, at most.")] = 8,
    limit: Annotated[
        float, typer.Option("--limit", min=0.1, help="Seconds that an episode may take by itself.")
    ] = 10.0,
    ignore: UncountedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run an agent program with scripted answers; report what they earn and its mistakes.

    No model is needed. The exit code is 1 where an error was found, so that it can stand in CI.
    """
    from podium.console.next_command import print_next

    show_notes()
    spec, folder, given = _spec(target)
    if data and given is None:
        given = _usual(data)
    report = _report(spec, folder, row_of(data, given, row), (turns, limit, oracle))
    found = without_ignored(report.findings, ignore)
    if as_json:
        print_json(_as_json(report, found))
    else:
        _print(report, row)
        print_findings(found, [report.closing])
        if found:
            print_next("agents test, findings", code=found[0].code)
    fail_on_errors(found)


def _spec(target: str) -> tuple[Any, Path, Any]:
    """The `agent:` of a recipe, the folder of its files, and its dataset. Raises `ConfigError` without an agent."""
    from podium.cli.words import is_recipe
    from podium.recipe import load

    if not is_recipe(target):
        command = target.startswith(COMMAND)
        return {"command": target.removeprefix(COMMAND).strip()} if command else target, Path(), None
    recipe = load(target)
    if not recipe.given.get("agent"):
        raise ConfigError(
            f"{target} has no agent.",
            fix=f"agent: agent.py:run; tools and environments are tested by podium environments test {target}",
            path=target,
        )
    return recipe.given["agent"], Path(target).parent if Path(target).is_file() else Path(), recipe.data


def _usual(data: str) -> DataSpec:
    """A dataset with the prompts, answers and system message that are assumed where there is no recipe."""
    from podium.data.columns import Columns
    from podium.data.rows import DataSpec
    from podium.recipe.assume import assume

    usual = assume({"dataset": data}, alone=True)
    if "prompt" not in usual:
        return DataSpec(dataset=data)
    columns = Columns(
        prompt=usual["prompt"],
        answer=usual.get("answer"),
        answer_from=usual.get("answer_from"),
        system=usual.get("system"),
    )
    return DataSpec(dataset=data, columns=columns)


def _report(spec: Any, folder: Path, row: Mapping[str, Any], how: tuple[int, float, str]) -> ProgramReport:
    """Play everything; `how`: the limits, and the name of an oracle."""
    from podium.agents.chat import give_tool_template, tool_format
    from podium.agents.programs.program import CommandProgram, FileProgram, resolve_program
    from podium.agents.programs.server import Endpoint
    from podium.agents.table import from_file
    from podium.tester.programs import Stage, examine_program
    from podium.testing import tiny_tokenizer
    from podium.trainer.assembly import check_program

    turns, limit, oracle = how
    program = resolve_program(spec, folder)
    assert isinstance(program, FileProgram | CommandProgram)  # a name stands for no function in this process
    check_program(program, list(row))
    tokenizer = tiny_tokenizer()
    give_tool_template(tokenizer)
    chat = tool_format(tokenizer, {}, needs_tools=True)
    with Endpoint() as endpoint:
        stage = Stage(program=program, endpoint=endpoint, chat=chat, turns=turns, limit=limit)
        return examine_program(stage, row, from_file(oracle, folder) if oracle else None)


def _as_json(report: ProgramReport, found: Sequence[Finding]) -> dict[str, Any]:
    played = [
        {
            "policy": play.policy,
            "reward": play.reward,
            "rewards": play.rewards,
            "ended": play.ended,
            "problem": play.problem,
            "log": play.log,
            "seconds": play.seconds,
            "replies": play.replies,
            "rejected": play.rejected,
            "rejection": play.rejection,
            "left": play.left,
            "turns": len(play.requests),
        }
        for play in report.played
    ]
    return {**listed(found), "name": report.name, "played": played, "closing": report.closing}


def _print(report: ProgramReport, row: int) -> None:
    """A table of what policies earn, and how their episodes ended."""
    columns = {"policy": "left", "reward": "right whole", "turns": "right", "seconds": "right", "ended": "left"}
    rows = []
    for each in report.played:
        reward = "none" if each.reward is None else f"{each.reward:.2f}"
        rows.append((each.policy, reward, str(len(each.requests)), f"{each.seconds:.2f}", each.ended))
    console.print(table(columns, rows))
    console.print(plain_text(f"{report.name}: a program; row {row}"), soft_wrap=True)
