"""The test behind `podium rewards test`: rewards by name, on real rows, and their reports."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.table import Table

from podium.cli.words import is_recipe
from podium.console.terminal import as_dicts, console, counted, plain_text
from podium.data.columns import Columns
from podium.data.rows import DataSpec, load_data
from podium.errors import ConfigError, Finding
from podium.errors.texts import quoted
from podium.recipe import load
from podium.recipe.assume import assume
from podium.recipe.rewards import LOADER
from podium.tester.rewards import ExamineSettings, RewardReport, Source, check_sum, examine_source


def examine_rewards(
    target: str, data: str, args: Sequence[str], settings: ExamineSettings
) -> tuple[list[RewardReport], list[Finding]]:
    """Reports on a recipe's rewards, or on one; and findings about their sum."""
    with _sparing_torch():
        if is_recipe(target):
            return _test_recipe(target, data, settings)
        return _test_one(target, data, args, settings), []


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


def _test_one(name: str, data: str, words: Sequence[str], settings: ExamineSettings) -> list[RewardReport]:
    args = dict(_parsed(words))
    if not data:
        raise ConfigError("which rows?", fix=f"podium rewards test {name} --data train.jsonl", name=name)
    usual = assume({"dataset": data}, alone=True)  # columns by their names, as of `podium train --dataset`
    columns = Columns(prompt=usual.get("prompt"), answer=usual.get("answer"), answer_from=usual.get("answer_from"))
    dataset = load_data(DataSpec(dataset=data, columns=columns))[0]
    source = Source(loader=LOADER, arguments=(name, args, Path()), limit_seconds=settings.limit_seconds)
    return [examine_source(name, source, dataset, settings=settings)]


def _test_recipe(path: str, data: str, settings: ExamineSettings) -> tuple[list[RewardReport], list[Finding]]:
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
        source = Source(
            loader=LOADER,
            arguments=(spec.name, args, folder),
            limit_seconds=settings.limit_seconds,
            environments=recipe.agents.environment is not None,
        )
        reports.append(examine_source(spec.name, source, dataset, weight=weight, settings=settings))
    return reports, check_sum(reports, given)


# ---- printed ----


def print_reports(reports: Sequence[RewardReport], found: Sequence[Finding]) -> None:
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
        cells = [cell for each in found for cell in ([f"{x:.2f}" for x in each] if each else ["", "-", ""])]
        made.add_row(plain_text(text if group == "probe" else f"{group}: {text}"), *cells)
    return made


def _line_names(reports: Sequence[RewardReport]) -> list[tuple[str, str]]:
    """Lines in the order of the first reward; wrong answers only in a form in which right ones score."""
    forms = {report.form or "bare" for report in reports}
    names = [(line.group, line.text) for report in reports for line in report.lines if line.spread]
    return [name for name in dict.fromkeys(names) if name[0] != "wrong answer" or name[1] in forms]


def reports_as_json(
    reports: Sequence[RewardReport], total: Sequence[Finding], found: Sequence[Finding]
) -> dict[str, Any]:
    """Everything as plain values; `total` are the findings about the sum of the rewards."""
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
            "findings": as_dicts(report.findings),
        }
        for report in reports
    ]
    return {
        "findings": as_dicts(found),
        **{f"{kind}s": sum(finding.severity == kind for finding in found) for kind in ("error", "warning")},
        "rewards": rewards,
        "together": as_dicts(total),
    }
