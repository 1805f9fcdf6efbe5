"""Tests of a reward before training: what it says of right answers, wrong ones, and texts that are no answer at all.

    findings = podium.rewards.tester(correct, dataset)
    report = podium.rewards.examine(correct, dataset)         # with the table of what scored what

No model is needed. `cases` reads rows, `probes` is the table of texts, `asking` calls the function, `gather` asks in
order, `rules` judges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from podium.errors import ConfigError, PodiumError, RewardError, did_you_mean
from podium.records import Finding
from podium.rewards.resolve import Reward, as_list, check_rewards, resolve_rewards, resolve_weights
from podium.rewards.tester.asking import LocalAsker, RewardCaller
from podium.rewards.tester.cases import answer_candidates, asked_columns, columns_of, forms_for, make_cases
from podium.rewards.tester.evidence import Evidence
from podium.rewards.tester.gather import gather, scores_in_a_form
from podium.rewards.tester.process import RemoteAsker, Source
from podium.rewards.tester.report import Line, Report, report_of
from podium.rewards.tester.rules import judge
from podium.rewards.tester.weighted import judge_sum

__all__ = ["Line", "Report", "Settings", "Source", "audit", "examine", "examine_source", "judge_sum", "quick_test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to test."""

    answer_column: str | None = None
    """The column with the right answer, or a template of several, `{city}, {country}`; None: found by name."""
    num_rows: int = 8
    limit_seconds: float = 10.0
    """Of a call; the first may take 30 s."""
    budget_seconds: float = 60.0
    """Slow functions are asked fewer rows and numbers, so that they take about as long."""
    forms: tuple[str, ...] = ()
    """More ways to write an answer, with `{}` in its place."""


def audit(reward: Any, dataset: Any, *, weights: Sequence[float] | None = None, **settings: Any) -> list[Finding]:
    """What is wrong with a reward function, or with each of several, as far as texts of our own can tell.

    Args:
        reward: a function, or a list of them, as for `GRPOTrainer`.
        dataset: rows with `prompt` and the columns that the functions name; or the name of a dataset.
        weights: one for each function.
        settings: fields of `Settings`: `answer_column`, `num_rows`, `limit_seconds`, `budget_seconds`, `forms`.

    Raises:
        DataError: no rows, or rows without a prompt.

    >>> def lenient(completions, answer):
    ...     return [float(gold in text) for text, gold in zip(completions, answer)]
    >>> rows = [{"prompt": f"What is {n} + 9?", "answer": str(n + 9)} for n in range(10, 90, 9)]
    >>> sorted({finding.code for finding in audit(lenient, rows) if finding.severity == "error"})
    ['W106', 'W107']
    """
    functions = as_list(reward)
    rows = _rows(dataset)
    try:
        known_weights = resolve_weights(weights, functions)
    except ConfigError as error:
        return [Finding(code="W015", severity="error", what=error.what, fix=error.fix)]
    reports = [
        examine(function, rows, weight=weight, settings=Settings(**settings))
        for function, weight in zip(functions, known_weights, strict=True)
    ]
    return [*chain.from_iterable(report.findings for report in reports), *judge_sum(reports, known_weights)]


def examine(reward: Any, dataset: Any, *, weight: float = 1.0, settings: Settings | None = None) -> Report:
    """As `audit` for one function of this process, with all that was seen."""
    settings = settings or Settings()
    try:
        [resolved] = resolve_rewards([reward])
    except ConfigError as error:
        return _refused(str(reward), Finding(code="W001", severity="error", what=error.what, fix=error.fix))
    return _examine(LocalAsker(resolved, settings.limit_seconds), _rows(dataset), weight, settings)


def quick_test(reward: Reward, rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What a test by a few rows finds in some seconds, the worst first; nothing where rows are too few."""
    settings = Settings(num_rows=len(rows), limit_seconds=5.0, budget_seconds=3.0)
    return list(_examine(LocalAsker(reward, settings.limit_seconds), rows, 1.0, settings).findings) if rows else []


def examine_source(name: str, source: Source, dataset: Any, *, weight: float = 1.0, settings: Settings) -> Report:
    """As `examine`, in a process that loads the function and can be killed."""
    try:
        asker = RemoteAsker(source)
    except PodiumError as error:
        code = error.code if error.code == "W001" else "W013"
        return _refused(name, Finding(code=code, severity="error", what=error.what, fix=error.fix))
    return _examine(asker, _rows(dataset), weight, settings)


def _refused(name: str, finding: Finding) -> Report:
    return Report(name=name, findings=(finding,))


def _rows(dataset: Any) -> Any:
    if not isinstance(dataset, str):
        return dataset
    from podium.data.loading import DataSpec, load_data

    return load_data(DataSpec(dataset=dataset))[0]


def _examine(asker: RewardCaller, dataset: Any, weight: float, settings: Settings) -> Report:
    try:
        columns, described = _columns(dataset), asker.described
        asked = asked_columns(described, columns)
        given = settings.answer_column
        candidates = (given,) if given else answer_candidates(asked, _first(dataset)) or (None,)
        for name in columns_of(given):
            if name not in columns:
                what = f"the dataset has no column `{name}`, but {', '.join(columns)}"
                raise ConfigError(what, fix=did_you_mean(name, columns) or "--answer-column COLUMN")
        missing = _missing_columns(asker, columns)
        if missing is not None:
            return _refused(described.name, missing)
        tries = {column: make_cases(dataset, column, settings.num_rows) for column in candidates}
        texts = [described.code_text, *(case.prompt_text for case in next(iter(tries.values())))]
        forms = forms_for(texts, settings.forms)
        several = tries if len(tries) > 1 else {}
        scoring = (each for each, rows in several.items() if scores_in_a_form(asker, rows, each, forms))
        column = next(scoring, next(iter(tries)))
        evidence = gather(
            asker, tries[column], column=column, forms=forms, asked=asked, budget_seconds=settings.budget_seconds
        )
    finally:
        asker.close()
    return report_of(evidence, [*_weight_findings(evidence, weight), *judge(evidence)])


def _columns(dataset: Any) -> list[str]:
    return list(getattr(dataset, "column_names", None) or _first(dataset))


def _first(dataset: Any) -> Mapping[str, Any]:
    return next(iter(dataset), {})


def _missing_columns(asker: RewardCaller, columns: Iterable[str]) -> Finding | None:
    try:
        check_rewards([asker.described], columns)  # type: ignore[list-item]
    except RewardError as error:
        return Finding(code="W002", severity="error", what=error.what, fix=error.fix)
    return None


def _weight_findings(evidence: Evidence, weight: float) -> list[Finding]:
    """W102: a reward that knows right from wrong, turned round by its weight."""
    if weight >= 0 or evidence.form is None:
        return []
    what = f"`{evidence.described.name}` scores right answers higher, but its weight is {weight:g}"
    fix = f"write `weight: {-weight:g}`"
    return [Finding(code="W102", severity="error", what=what, why="wrong answers are what this trains", fix=fix)]
