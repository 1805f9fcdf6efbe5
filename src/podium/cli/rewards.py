"""`podium rewards`: the library, and a test of rewards that needs no model."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from podium.records import Finding
    from podium.rewards.tester import RewardReport

FAILED = 1
"""Exit code where a test found an error."""

FIND = "podium.cli.rewards:reward_by_name"
"""Loader of a reward in the process that tests it."""

AsJson = Annotated[bool, typer.Option("--json", help="As one JSON object.")]


def list_rewards(as_json: AsJson = False) -> None:
    """List the rewards of the library, by family."""
    from podium.cli.rewards_pages import catalogue, entry
    from podium.cli.structured import print_json
    from podium.rewards import LIBRARY

    if as_json:
        print_json({"rewards": [entry(name) for name in LIBRARY]})
    else:
        typer.echo(catalogue(), nl=False)


def show(
    name: Annotated[str, typer.Argument(help="A reward of the library; `podium rewards list` has them.")],
    as_json: AsJson = False,
) -> None:
    """Describe a reward of the library: columns, settings, an example for a recipe and for Python."""
    from podium.cli.rewards_pages import entry, page
    from podium.cli.structured import print_json

    text = page(name)
    if as_json:
        print_json({"rewards": [{**entry(name), "page": text}]})
    else:
        typer.echo(text, nl=False)


def try_out(
    target: Annotated[
        str, typer.Argument(help="file.py:function, package.module:function, a name of the library, or a recipe.")
    ],
    data: Annotated[
        str, typer.Option("--data", help="A file, folder, hub id or builtin:task. Of a recipe: its own.")
    ] = "",
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
    as_json: Annotated[bool, typer.Option("--json", help="The report as one JSON object.")] = False,
) -> None:
    """Call a reward on real rows with right answers, wrong ones and texts without one; report its mistakes.

    No model is needed. The exit code is 1 where an error was found, so that it can stand in CI.
    """
    from podium.cli.findings import has_errors
    from podium.cli.structured import print_json
    from podium.cli.terminal import show_notes
    from podium.recipe import shipped_recipes
    from podium.rewards.tester import ExamineSettings

    show_notes()
    settings = ExamineSettings(
        answer_column=answer_column or None, num_rows=rows, limit_seconds=limit, forms=tuple(form or ())
    )
    with _sparing_torch():
        if target.endswith((".yaml", ".yml")) or target in shipped_recipes():
            reports, total = _test_recipe(target, data, settings)
        else:
            reports, total = _test_one(target, data, _parsed(args or []), settings)
    found = [finding for report in reports for finding in report.findings] + list(total)
    if as_json:
        print_json(_as_json(reports, total, found))
    else:
        _print(reports, found)
    if has_errors(found):
        raise typer.Exit(FAILED)


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


def _parsed(words: Sequence[str]) -> dict[str, Any]:
    """`key=value`, the value as in YAML."""
    import yaml

    from podium.errors import ConfigError

    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"--args {word}: expected key=value", fix="--args tolerance=0.01")
        try:
            settings[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--args {word}: the value is not YAML ({error})") from error
    return settings


def _test_one(name: str, data: str, args: Mapping[str, Any], settings: Any) -> tuple[list[RewardReport], list[Finding]]:
    from podium.data.columns import Columns
    from podium.data.loading import DataSpec, load_data
    from podium.errors import ConfigError
    from podium.recipe.assume import assume
    from podium.rewards.tester import Source, examine_source

    if not data:
        raise ConfigError("which rows?", fix=f"podium rewards test {name} --data train.jsonl")
    usual = assume({"dataset": data}, alone=True)  # columns by their names, as of `podium train --dataset`
    columns = Columns(prompt=usual.get("prompt"), answer=usual.get("answer"), answer_from=usual.get("answer_from"))
    dataset = load_data(DataSpec(dataset=data, columns=columns))[0]
    source = Source(loader=FIND, arguments=(name, dict(args), Path()), limit_seconds=settings.limit_seconds)
    return [examine_source(name, source, dataset, settings=settings)], []


def _test_recipe(path: str, data: str, settings: Any) -> tuple[list[RewardReport], list[Finding]]:
    from podium.data.loading import DataSpec, load_data
    from podium.recipe import load
    from podium.rewards.tester import Source, check_sum, examine_source

    recipe = load(path)
    dataset = load_data(DataSpec(dataset=data, columns=recipe.data.columns) if data else recipe.data)[0]
    given = recipe.config.get("reward_weights") or [1.0] * len(recipe.rewards)
    folder = Path(path).parent if Path(path).is_file() else Path()
    entries = recipe.given.get("rewards") or recipe.given.get("reward_funcs") or []
    entries = entries if isinstance(entries, list) else [entries]
    reports = []
    # A reward model under TRL's key has no entry, and no settings.
    for spec, entry, weight in itertools.zip_longest(recipe.rewards, entries[: len(recipe.rewards)], given):
        args = entry.get("args") or {} if isinstance(entry, dict) else {}
        source = Source(loader=FIND, arguments=(spec.name, args, folder), limit_seconds=settings.limit_seconds)
        reports.append(examine_source(spec.name, source, dataset, weight=weight, settings=settings))
    return reports, check_sum(reports, given)


def reward_by_name(name: str, args: Mapping[str, Any], folder: Path) -> Any:
    """The function of a recipe's entry, loaded into this process, which exists for it alone."""
    from podium.isolation.user_files import attribute, find_file, module_from_file
    from podium.isolation.workers.functions import apply_args
    from podium.recipe.rewards import find_reward

    sys.path[:0] = [str(folder.resolve()), str(Path.cwd())]
    if ".py:" not in name:
        return find_reward(name, args, folder)
    file, _, function = name.rpartition(":")
    return apply_args(attribute(module_from_file(find_file(file, folder), file), function, file), args, name)


# ---- printed ----


def _print(reports: Sequence[RewardReport], found: Sequence[Finding]) -> None:
    from podium.cli.findings import counted
    from podium.cli.terminal import console, plain_text

    tested = [report for report in reports if report.lines]
    if tested:
        console.print(score_table(tested))
    for text in (*map(_summary, tested), *(f"\n{finding}" for finding in found)):
        console.print(plain_text(text))
    more = f" `podium explain {min(finding.code for finding in found)}` says more." if found else ""
    console.print(plain_text(f"\n{counted(found)}.{more}"))


def _summary(report: RewardReport) -> str:
    place = f" ({report.where})" if report.where else ""
    answer = report.column or ""
    source = f"the columns as in `{answer}`" if "{" in answer else f"the column `{answer}`"
    about = f"about the right answer, from {source}" if report.kind == "correctness" else "of style alone"
    form = f"; answers in the form: {report.form}" if report.form else ""
    speed = f"{1000 * report.seconds_per_completion:.2g} ms a completion"
    return f"{report.name}{place}: {about}{form}; {len(report.rows)} rows, {speed}"


def score_table(reports: Sequence[RewardReport]) -> Table:
    """Scores by kind of completion: least, mean and greatest over the rows, for each reward."""
    from rich import box
    from rich.table import Table

    from podium.cli.terminal import plain_text

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
        cells = [cell for each in found for cell in ([f"{x:.2f}" for x in each] if each else ["", "-", ""])]
        made.add_row(plain_text(text if group == "probe" else f"{group}: {text}"), *cells)
    return made


def _line_names(reports: Sequence[RewardReport]) -> list[tuple[str, str]]:
    """Lines in the order of the first reward; wrong answers only in a form in which right ones score."""
    forms = {report.form or "bare" for report in reports}
    names = [(line.group, line.text) for report in reports for line in report.lines if line.spread]
    return [name for name in dict.fromkeys(names) if name[0] != "wrong answer" or name[1] in forms]


def _as_json(reports: Sequence[RewardReport], total: Sequence[Finding], found: Sequence[Finding]) -> dict[str, Any]:
    from podium.cli.structured import findings

    rewards = [
        {
            "name": report.name,
            "where": report.where,
            "kind": report.kind,
            "answer_column": report.column,
            "form": report.form,
            "rows": list(report.rows),
            "seconds_per_completion": report.seconds_per_completion,
            "table": [{"group": line.group, "text": line.text, "values": list(line.values)} for line in report.lines],
            "findings": findings(report.findings),
        }
        for report in reports
    ]
    return {
        "findings": findings(found),
        "errors": sum(finding.severity == "error" for finding in found),
        "warnings": sum(finding.severity == "warning" for finding in found),
        "rewards": rewards,
        "together": findings(total),
    }


def app(guarded: Callable[[Callable[..., None]], Callable[..., None]]) -> typer.Typer:
    """The verbs under `podium rewards`; `guarded` prints their mistakes as one message."""
    made = typer.Typer(help="The reward library, and a test of rewards that needs no model.", no_args_is_help=True)
    made.command("list")(guarded(list_rewards))
    made.command("show")(guarded(show))
    made.command("test")(guarded(try_out))
    return made
