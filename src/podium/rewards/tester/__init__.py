"""Tests of a reward before training: its scores for right answers, wrong ones, and texts that are no answer at all.

    findings = podium.rewards.audit(correct, dataset)
    report = podium.rewards.examine(correct, dataset)         # with the table of texts and scores

No model is needed. `cases` reads rows, `probes` is the table of texts, `callers` calls the function, `gather` makes the
calls in order, `rules` turns the results into findings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from podium.errors import ConfigError, Finding, RewardError, Severity
from podium.errors.texts import listed, nearest
from podium.rewards.resolve import ENVIRONMENTS, Reward, as_list, check_rewards, resolve_rewards, resolve_weights
from podium.rewards.tester.callers import LocalCaller, RewardCaller, Source, WorkerCaller
from podium.rewards.tester.cases import answer_candidates, asked_columns, columns_of, forms_for, make_cases
from podium.rewards.tester.evidence import Evidence
from podium.rewards.tester.gather import gather
from podium.rewards.tester.reach import WHOLE, Reach, unreachable
from podium.rewards.tester.report import RewardReport, check_sum, report_of, untested
from podium.rewards.tester.rules import evaluate_basic_rules, evaluate_rules
from podium.rewards.tester.session import NotPlayedError

__all__ = [
    "ExamineSettings",
    "RewardReport",
    "Source",
    "audit",
    "check_sum",
    "examine",
    "examine_resolved",
    "examine_source",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamineSettings:
    """Settings of a test."""

    answer_column: str | None = None
    """The column with the right answer, or a template of several, `{city}, {country}`; None: found by name."""
    num_rows: int = 8
    limit_seconds: float = 10.0
    """Limit of a call; the first may take 30 s."""
    budget_seconds: float = 120.0
    """Time of all calls together; a function that takes longer is not tested."""
    is_thorough: bool = True
    """False: right and wrong answers alone, as for rewards whose other scores are known."""
    forms: tuple[str, ...] = ()
    """More ways to write an answer, with `{}` in its place."""
    reach: Reach = WHOLE
    """What prompts and tokenizer of the run leave of a text."""
    environments: bool = False
    """Whether completions of the run have environments, which the texts of the test do not have."""


def audit(reward: Any, dataset: Any, *, weights: Sequence[float] | None = None, **settings: Any) -> list[Finding]:
    """Findings about a reward function, or about each of several, from scores of texts of our own.

    Args:
        reward: a function, or a list of them, as for `GRPOTrainer`.
        dataset: rows with `prompt` and the columns that the functions name; or the name of a dataset.
        weights: one for each function.
        settings: `answer_column`, `num_rows`, `limit_seconds`, `budget_seconds`, `forms`, as in `ExamineSettings`.

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
        examine(function, rows, weight=weight, settings=ExamineSettings(**settings))
        for function, weight in zip(functions, known_weights, strict=True)
    ]
    return [*chain.from_iterable(report.findings for report in reports), *check_sum(reports, known_weights)]


def examine(reward: Any, dataset: Any, *, weight: float = 1.0, settings: ExamineSettings | None = None) -> RewardReport:
    """As `audit` for one function of this process, with the whole table."""
    settings = settings or ExamineSettings()
    try:
        [resolved] = resolve_rewards([reward])
    except ConfigError as error:
        return _refused(str(reward), "W001", error)
    return examine_resolved(resolved, _rows(dataset), weight, settings)


def examine_resolved(
    reward: Reward, rows: Sequence[Mapping[str, Any]], weight: float, settings: ExamineSettings
) -> RewardReport:
    """As `examine`, for a reward function that is resolved already."""
    caller = LocalCaller(reward, settings.limit_seconds, environments=settings.environments)
    return _examine(caller, rows, weight, settings)


def examine_source(
    name: str, source: Source, dataset: Any, *, weight: float = 1.0, settings: ExamineSettings
) -> RewardReport:
    """As `examine`, in a process that loads the function and can be killed."""
    try:
        caller = WorkerCaller(source)
    except RewardError as error:
        return _refused(name, error.code if error.code == "W001" else "W013", error)
    return _examine(caller, _rows(dataset), weight, settings)


def _refused(name: str, code: str, error: ConfigError | RewardError) -> RewardReport:
    return RewardReport(name=name, findings=(Finding(code=code, severity="error", what=error.what, fix=error.fix),))


def _rows(dataset: Any) -> Any:
    if not isinstance(dataset, str):
        return dataset
    from podium.data.loading import DataSpec, load_data

    return load_data(DataSpec(dataset=dataset))[0]


def _examine(caller: RewardCaller, dataset: Any, weight: float, settings: ExamineSettings) -> RewardReport:
    info = caller.info
    first: Mapping[str, Any] = next(iter(dataset), {})
    columns = list(getattr(dataset, "column_names", None) or first)
    given = settings.answer_column
    try:
        if ENVIRONMENTS in info.needs:
            raise NotPlayedError
        for name in columns_of(given):
            if name not in columns:
                near = nearest(name, columns)
                raise ConfigError(
                    f"the dataset has no column `{name}`, but {listed(columns)}",
                    fix=f"Did you mean `{near}`?" if near else "--answer-column COLUMN",
                    settings=(name,),
                    name=name,
                    columns=columns,
                    near=near,
                )
        try:
            check_rewards([info], columns)  # type: ignore[list-item]
        except RewardError as error:
            return _refused(info.name, "W002", error)
        asked = asked_columns(info, columns)
        candidates = (given,) if given else answer_candidates(asked, first) or (None,)
        tries = {column: make_cases(dataset, column, settings.num_rows) for column in candidates}
        prompts = [case.prompt for case in tries[candidates[0]]]
        forms = forms_for(prompts, settings.forms, code=info.code_text, keys=asked if len(asked) == 1 else ())
        blank = [
            Evidence(info=info, cases=tries[each], column=each, forms=forms, asked=asked, given=given is not None)
            for each in candidates
        ]
        evidence = gather(caller, blank, settings.budget_seconds, is_thorough=settings.is_thorough)
        found = evaluate_rules(evidence) if settings.is_thorough else evaluate_basic_rules(evidence)
        report = report_of(evidence, [*_weight_findings(evidence, weight), *found])
        beyond = unreachable(caller, report, evidence.cases, settings.reach)
        return report if beyond is None else replace(report, findings=(*report.findings, beyond))
    except NotPlayedError:
        return untested(
            info,
            Finding(
                code="W122",
                severity="note",
                what=f"{info} was not tested on right and wrong answers: it looks into the environment of a "
                "completion, and the texts of the test are played in none.",
                fix="podium environments test plays the environments of a recipe, and shows their rewards",
                facts={"reward": info},
            ),
        )
    finally:
        caller.close()


def _weight_findings(evidence: Evidence, weight: float) -> list[Finding]:
    """W102: a reward that tells right from wrong, with a negative weight."""
    if weight >= 0 or evidence.form is None:
        return []
    severity: Severity = "error" if evidence.is_judge else "warning"
    return [
        Finding(
            code="W102",
            severity=severity,
            what=f"`{evidence.info.name}` scores right answers higher, but its weight is {weight:g}",
            why="wrong answers are what this trains",
            fix=f"write `weight: {-weight:g}`",
            facts={"name": evidence.info.name, "weight": weight, "wanted": -weight},
        )
    ]
