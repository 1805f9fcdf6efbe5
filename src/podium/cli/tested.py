"""Tests of rewards, environments and programs by name, on real rows, and what is printed of them."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich import box
from rich.table import Table

from podium.cli.flags import EnvironmentFlags, ProgramFlags, RewardFlags
from podium.cli.rows import row_of, rows_of
from podium.cli.subjects import COMMAND, Target
from podium.console.terminal import as_dicts, console, counted, plain_text, table
from podium.data.columns import Columns
from podium.data.rows import DataSpec, load_data
from podium.errors import ConfigError, Finding
from podium.errors.texts import listed as in_a_list
from podium.errors.texts import quoted
from podium.recipe.assume import assume
from podium.recipe.rewards import LOADER
from podium.tester.calls import Source
from podium.tester.rewards import ExamineSettings, RewardReport, check_sum, examine_source

if TYPE_CHECKING:
    from podium.tester.episodes import ProgramPlay
    from podium.tester.report import EnvironmentReport, ProgramReport


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedRewards:
    """The result of a test of one reward, or of those of a recipe."""

    reports: tuple[RewardReport, ...]
    together: tuple[Finding, ...] = ()
    """Findings about their sum."""
    subject: str = "reward"

    @property
    def findings(self) -> list[Finding]:
        """Those of each, then those of the sum."""
        return [*(finding for report in self.reports for finding in report.findings), *self.together]


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedEnvironments:
    """The result of a test of tools and environments."""

    reports: tuple[EnvironmentReport, ...]
    subject: str = "environment"

    @property
    def findings(self) -> list[Finding]:
        """Those of each."""
        return [finding for report in self.reports for finding in report.findings]


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedProgram:
    """The result of a test of a program."""

    report: ProgramReport
    row: int
    subject: str = "program"

    @property
    def findings(self) -> list[Finding]:
        """All of them."""
        return list(self.report.findings)


Tested = TestedRewards | TestedEnvironments | TestedProgram


def in_words(target: Target, subjects: Sequence[str]) -> str:
    """What a name is taken for, in words."""
    words = {"reward": "a reward", "environment": "a tool or an environment", "program": "a program"}
    if target.recipe is None:
        return words[subjects[0]]
    parts = {"reward": "its rewards", "environment": "its tools and environments", "program": "its agent"}
    return f"a recipe, of which are tested: {in_a_list([parts[subject] for subject in subjects])}"


# ---- rewards ----


def rewards(target: Target, flags: RewardFlags) -> TestedRewards:
    """Test a recipe's rewards, or one."""
    settings = ExamineSettings(
        answer_column=flags.answer_column or None,
        num_rows=flags.rows,
        limit_seconds=flags.limit,
        budget_seconds=flags.budget,
        forms=tuple(flags.form or ()),
    )
    with _sparing_torch():
        if target.recipe is None:
            return TestedRewards(reports=(_one_reward(target.name, flags, settings),))
        return _rewards_of(target, flags.data, settings)


@contextlib.contextmanager
def _sparing_torch() -> Iterator[None]:
    """Rows without progress bars, and without torch, which `datasets` imports to read a file and nothing here needs."""
    import datasets

    datasets.disable_progress_bars()
    before = datasets.config.TORCH_AVAILABLE
    datasets.config.TORCH_AVAILABLE = before and "torch" in sys.modules
    try:
        yield
    finally:
        datasets.config.TORCH_AVAILABLE = before


def _parsed(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"--args {word}: expected key=value", fix="--args tolerance=0.01", word=word)
        try:
            yield key, yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"--args {word}: the value is not YAML ({quoted(error)})", word=word, error=error
            ) from error


def _one_reward(name: str, flags: RewardFlags, settings: ExamineSettings) -> RewardReport:
    args = dict(_parsed(flags.args or []))
    if not flags.data:
        raise ConfigError("which rows?", fix=f"podium test {name} --data train.jsonl", name=name)
    usual = assume({"dataset": flags.data}, alone=True)  # columns by their names, as of `podium train --dataset`
    columns = Columns(prompt=usual.get("prompt"), answer=usual.get("answer"), answer_from=usual.get("answer_from"))
    dataset = load_data(DataSpec(dataset=flags.data, columns=columns))[0]
    source = Source(loader=LOADER, arguments=(name, args, Path()), limit_seconds=settings.limit_seconds)
    return examine_source(name, source, dataset, settings=settings)


def _rewards_of(target: Target, data: str, settings: ExamineSettings) -> TestedRewards:
    recipe = target.recipe
    assert recipe is not None
    dataset = load_data(DataSpec(dataset=data, columns=recipe.data.columns) if data else recipe.data)[0]
    weights = recipe.config.get("reward_weights") or [1.0] * len(recipe.rewards)
    entries = recipe.given.get("rewards") or recipe.given.get("reward_funcs") or []
    entries = entries if isinstance(entries, list) else [entries]
    reports = []
    # A reward model under TRL's key has no entry, and no settings.
    for spec, entry, weight in itertools.zip_longest(recipe.rewards, entries[: len(recipe.rewards)], weights):
        args = entry.get("args") or {} if isinstance(entry, dict) else {}
        source = Source(
            loader=LOADER,
            arguments=(spec.name, args, target.folder),
            limit_seconds=settings.limit_seconds,
            environments=recipe.agents.environment is not None,
        )
        reports.append(examine_source(spec.name, source, dataset, weight=weight, settings=settings))
    return TestedRewards(reports=tuple(reports), together=tuple(check_sum(reports, weights)))


# ---- tools and environments ----


def environments(target: Target, flags: EnvironmentFlags) -> TestedEnvironments:
    """Test a tool, an environment, or those of a recipe."""
    from podium.data.selection import sampled_rows
    from podium.tester.environments import ExamineSettings, examine_source

    settings = ExamineSettings(num_rows=flags.rows, turns=flags.turns, limit=flags.limit)
    named = _environments_of(target)  # before rows are looked for
    rows = rows_of(flags.data, None if target.recipe is None else target.recipe.data)
    reports = []
    for key, name in named:
        sample = [dict(row) for _, row in sampled_rows(_chosen(rows, key), flags.rows)]
        reports.append(examine_source(name, sample, oracle=flags.oracle, folder=target.folder, settings=settings))
    return TestedEnvironments(reports=tuple(reports))


def _environments_of(target: Target) -> list[tuple[str, str]]:
    """The tools and environments of a recipe, or the one that is named. Raises `ConfigError` without any.

    Beside each stands by which value of the column `environment` its rows are chosen; empty: it may have all rows.
    Tools of MCP servers have no code here to be tested.
    """
    recipe = target.recipe
    if recipe is None:
        return [("", target.name)]
    environment = recipe.given.get("environment")
    tools = recipe.given.get("tools") or []
    by_key = {"": environment} if environment else {}
    if isinstance(environment, Mapping):
        by_key = dict(environment)
    found = [("", tool) for tool in ([tools] if isinstance(tools, str) else tools) if not isinstance(tool, Mapping)]
    named = [(key, str(name)) for key, name in (*found, *by_key.items())]
    if not named:
        what = f"{target.name} has neither tools nor an environment."
        raise ConfigError(what, fix="tools: [tools.py:multiply]", path=target.name)
    return named


def _chosen(rows: Iterable[Mapping[str, Any]], name: str) -> Iterable[Mapping[str, Any]]:
    """The rows whose column `environment` names one of several, which do not get that column; without a name, all."""
    if not name:
        return rows
    found = [{key: row[key] for key in row if key != "environment"} for row in rows if row.get("environment") == name]
    return found or [{}]


# ---- programs ----


def program(target: Target, flags: ProgramFlags) -> TestedProgram:
    """Play one row with a program, or with that of a recipe."""
    from podium.agents.chat import give_tool_template, tool_format
    from podium.agents.programs.program import CommandProgram, FileProgram, resolve_program
    from podium.agents.programs.server import Endpoint
    from podium.agents.table import from_file
    from podium.tester.programs import Stage, examine_program
    from podium.testing import tiny_tokenizer
    from podium.trainer.assembly import check_program

    spec, columns = _agent_of(target)
    if flags.data and target.recipe is None:
        columns = _usual(flags.data)
    row = row_of(flags.data, columns, flags.row)
    resolved = resolve_program(spec, target.folder)
    assert isinstance(resolved, FileProgram | CommandProgram)  # a name stands for no function in this process
    check_program(resolved, list(row))
    tokenizer = tiny_tokenizer()
    give_tool_template(tokenizer)
    chat = tool_format(tokenizer, {}, needs_tools=True)
    with Endpoint() as endpoint:
        stage = Stage(program=resolved, endpoint=endpoint, chat=chat, turns=flags.turns, limit=flags.limit)
        oracle = from_file(flags.oracle, target.folder) if flags.oracle else None
        return TestedProgram(report=examine_program(stage, row, oracle), row=flags.row)


def _agent_of(target: Target) -> tuple[Any, Any]:
    """The `agent:` of a recipe and its dataset, or the one that is named. Raises `ConfigError` without an agent."""
    recipe = target.recipe
    if recipe is None:
        is_command = target.name.startswith(COMMAND)
        return {"command": target.name.removeprefix(COMMAND).strip()} if is_command else target.name, None
    if not recipe.given.get("agent"):
        raise ConfigError(
            f"{target.name} has no agent.",
            fix=f"agent: agent.py:run; tools and environments are tested by podium environments test {target.name}",
            path=target.name,
        )
    return recipe.given["agent"], recipe.data


def _usual(data: str) -> DataSpec:
    """A dataset with the prompts, answers and system message that are assumed where there is no recipe."""
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


# ---- printed ----


def show(tested: Tested, found: Sequence[Finding]) -> None:
    """Print tables and findings; `found` are the findings of the test, some of them overruled."""
    if isinstance(tested, TestedRewards):
        _show_rewards(tested.reports, found)
        return
    if isinstance(tested, TestedProgram):
        _show_program(tested.report, tested.row)
        closings = [tested.report.closing]
    else:
        for report in tested.reports:
            _show_environment(report)
        closings = [report.closing for report in tested.reports]
    wrong = [finding.code for finding in found if finding.severity == "error"]
    lines = [f"\n{finding}" for finding in found]
    lines.append(f"\n{counted(found)}." if found else "")
    if wrong:
        lines.append(f"If it is right as it is: --ignore {wrong[0]}")
    for line in (*lines, *closings):
        console.print(plain_text(line))


def _show_rewards(reports: Sequence[RewardReport], found: Sequence[Finding]) -> None:
    """The verdict, the table of scores, a line for each reward, the findings, and, below a long table, the verdict."""
    tested = [report for report in reports if report.lines]
    verdict = f"{counted(found) or nothing(reports)}."
    if tested:
        console.print(plain_text(verdict))
        console.print(score_table(tested))
    for text in (*map(_summary, tested), *(f"\n{finding}" for finding in found), f"\n{verdict}"):
        console.print(plain_text(text))


def nothing(reports: Sequence[RewardReport]) -> str:
    """The sentence for rewards without findings: how many scores were looked at, if any."""
    scores = sum(not math.isnan(value) for report in reports for line in report.lines for value in line.values)
    texts = len({(line.group, line.text) for report in reports for line in report.lines})
    rows = len({row for report in reports for row in report.rows})
    if not scores:
        return "No reward was tested, so nothing is known"
    number = "1 row" if rows == 1 else f"{rows} rows"
    return f"nothing found in {scores:,} scores of {texts} kinds of completions, for {number}"


def _summary(report: RewardReport) -> str:
    place = f" ({report.where})" if report.where else ""
    answer = report.column or ""
    source = f"the columns as in `{answer}`" if "{" in answer else f"the column `{answer}`"
    about = {
        "correctness": f"about the right answer, from {source}",
        "unknown": "it reads columns of the data, and it is not known which texts are right",
    }.get(report.kind, "of style alone")
    form = f"; answers in the form: {report.form}" if report.form else ""
    speed = f"{1000 * report.seconds_per_completion:.2g} ms a completion"
    return f"{report.name}{place}: {about}{form}; {len(report.rows)} rows, {speed}"


def score_table(reports: Sequence[RewardReport]) -> Table:
    """Scores by kind of completion: least, mean and greatest over the rows, for each reward."""
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("completion", overflow="fold")
    for report in reports:
        above = (f"{report.name}\n", "\n", "\n") if len(reports) > 1 else ("", "", "")
        for name, word in zip(above, ("least", "mean", "most"), strict=True):
            made.add_column(f"{name}{word}", justify="right", no_wrap=True)
    spreads = [{(line.group, line.text): line.spread for line in reversed(report.lines)} for report in reports]
    before = ""
    for group, text in _line_names(reports):
        if group != before and before:
            made.add_section()
        before = group
        found = (spread.get((group, text)) for spread in spreads)
        cells = [cell for interval in found for cell in ([f"{x:.2f}" for x in interval] if interval else ["", "-", ""])]
        made.add_row(plain_text(text if group == "probe" else f"{group}: {text}"), *cells)
    return made


def _line_names(reports: Sequence[RewardReport]) -> list[tuple[str, str]]:
    """Lines in the order of the first reward; wrong answers only in a form in which right ones score."""
    forms = {report.form or "bare" for report in reports}
    names = [(line.group, line.text) for report in reports for line in report.lines if line.spread]
    return [name for name in dict.fromkeys(names) if name[0] != "wrong answer" or name[1] in forms]


def _show_environment(report: EnvironmentReport) -> None:
    """Tables of what policies earn and of calls."""
    earned = [earnings for earnings in report.earned if earnings.rewards]
    if earned:
        rows = []
        for earnings in earned:
            mean = sum(earnings.rewards) / len(earnings.rewards)
            cells = [f"{x:.2f}" for x in (min(earnings.rewards), mean, max(earnings.rewards))]
            rows.append((earnings.policy, *cells, f"{earnings.turns:.1f}"))
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


def _show_program(report: ProgramReport, row: int) -> None:
    """A table of what policies earn, and how their episodes ended."""
    columns = {"policy": "left", "reward": "right whole", "turns": "right", "seconds": "right", "ended": "left"}
    rows = []
    for episode in report.played:
        reward = "none" if episode.reward is None else f"{episode.reward:.2f}"
        rows.append((episode.policy, reward, str(len(episode.requests)), f"{episode.seconds:.2f}", episode.ended))
    console.print(table(columns, rows))
    console.print(plain_text(f"{report.name}: a program; row {row}"), soft_wrap=True)


# ---- as JSON ----


def listed(found: Sequence[Finding]) -> dict[str, Any]:
    """The findings of a test for `--json`, and how many are errors and warnings."""
    counts = {f"{kind}s": sum(finding.severity == kind for finding in found) for kind in ("error", "warning")}
    return {"findings": as_dicts(found), **counts}


def as_json(tested: Tested, found: Sequence[Finding]) -> dict[str, Any]:
    """Everything as plain values."""
    if isinstance(tested, TestedRewards):
        together = as_dicts(tested.together)
        return {**listed(found), "rewards": list(map(_plain_reward, tested.reports)), "together": together}
    if isinstance(tested, TestedEnvironments):
        return {**listed(found), "tested": list(map(_plain_environment, tested.reports))}
    report = tested.report
    played = list(map(_plain_play, report.played))
    return {**listed(found), "name": report.name, "played": played, "closing": report.closing}


def _plain_reward(report: RewardReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "where": report.where,
        "kind": report.kind,
        "answer_column": report.column,
        "form": report.form,
        "rows": list(report.rows),
        "seconds_per_completion": report.seconds_per_completion,
        "table": [{"group": line.group, "text": line.text, "values": list(line.values)} for line in report.lines],
        "findings": as_dicts(report.findings),
    }


def _plain_environment(report: EnvironmentReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "kind": report.kind,
        "num_rows": report.num_rows,
        "earned": [
            {"policy": earned.policy, "rewards": earned.rewards, "turns": earned.turns} for earned in report.earned
        ],
        "measured": [
            {
                "name": call.name,
                "calls": call.calls,
                "seconds": call.seconds,
                "slowest": call.slowest,
                "characters": call.characters,
                "failed": call.failed,
            }
            for call in report.measured
        ],
        "findings": as_dicts(report.findings),
        "has_reward": report.has_reward,
        "closing": report.closing,
    }


def _plain_play(play: ProgramPlay) -> dict[str, Any]:
    return {
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
