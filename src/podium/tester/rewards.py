"""Tests of a reward before training: its scores for right answers, wrong ones, and texts that are no answer at all.

    findings = podium.rewards.audit(correct, dataset)
    report = podium.rewards.examine(correct, dataset)         # with the table of texts and scores

No model is needed. `cases` reads rows, `probes` is the table of texts, `calls` calls the function, `scores` makes the
calls in order, `reward_rules` turns what they gave into findings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from podium.algorithm.advantages import combine
from podium.errors import ConfigError, Finding, RewardError
from podium.errors.texts import listed, nearest
from podium.rewards.resolve import ENVIRONMENTS, Reward, as_list, check_rewards, resolve_rewards, resolve_weights
from podium.tester.calls import LocalCaller, NotPlayedError, RewardCaller, RewardInfo, Source, WorkerCaller
from podium.tester.cases import answer_candidates, columns_of, forms_for, make_cases
from podium.tester.probes import PROBES
from podium.tester.reach import WHOLE, Reach, unreachable
from podium.tester.reward_rules import RULES
from podium.tester.rules import Report, evaluate
from podium.tester.scores import MOST, Evidence, gather, mean


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
    from podium.data.rows import DataSpec, load_data

    return load_data(DataSpec(dataset=dataset))[0]


def _examine(caller: RewardCaller, dataset: Any, weight: float, settings: ExamineSettings) -> RewardReport:
    info = caller.info
    try:
        if ENVIRONMENTS in info.needs:
            raise NotPlayedError
        first: Mapping[str, Any] = next(iter(dataset), {})
        columns = list(getattr(dataset, "column_names", None) or first)
        _refuse_other_columns(settings.answer_column, columns)
        try:
            check_rewards([info], columns)  # type: ignore[list-item]
        except RewardError as error:
            return _refused(info.name, "W002", error)
        evidence = gather(
            caller,
            _candidates(info, dataset, columns, weight, settings),
            settings.budget_seconds,
            is_thorough=settings.is_thorough,
        )
        report = report_of(evidence, evaluate(RULES, "reward" if settings.is_thorough else "library reward", evidence))
        beyond = unreachable(caller, evidence, settings.reach, is_style=report.kind == "style")
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


def _refuse_other_columns(answer: str | None, columns: Sequence[str]) -> None:
    """Raise `ConfigError` for a place of the answers that names a column which is not there."""
    for name in columns_of(answer):
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


def _candidates(
    info: RewardInfo, dataset: Any, columns: Sequence[str], weight: float, settings: ExamineSettings
) -> list[Evidence]:
    """Evidence without scores yet, one for each possible place of the answers."""
    asked = info.asked_columns(columns)
    if settings.answer_column:
        places: Sequence[str | None] = [settings.answer_column]
    else:
        places = answer_candidates(asked, next(iter(dataset), {})) or [None]
    cases = {place: make_cases(dataset, place, settings.num_rows) for place in places}
    prompts = [case.prompt for case in cases[places[0]]]
    forms = forms_for(prompts, settings.forms, code=info.code_text, keys=asked if len(asked) == 1 else ())
    return [
        Evidence(
            info=info,
            weight=weight,
            cases=cases[place],
            column=place,
            forms=forms,
            asked=asked,
            is_column_given=settings.answer_column is not None,
        )
        for place in places
    ]


# ---- reports ----


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreLine:
    """One line of the table: a kind of text with its score in each row."""

    group: str
    """`right answer`, `wrong answer` or `probe`."""
    text: str
    values: tuple[float, ...]
    """NaN for None, and where no call was made."""
    is_shared: bool = True
    """Whether the text does not depend on the form that the reward reads."""

    @property
    def spread(self) -> tuple[float, float, float] | None:
        """Least, mean and greatest; None where there is no value.

        >>> ScoreLine(group="probe", text="empty text", values=(0.0, 1.0, float("nan"))).spread
        (0.0, 0.5, 1.0)
        """
        known = [value for value in self.values if not math.isnan(value)]
        return (min(known), mean(known), max(known)) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReport(Report):
    """The result of the test of one reward function."""

    where: str = ""
    kind: str = ""
    """`correctness`, where the score is about the answer; `style`, where the function reads no column of the data;
    `unknown`, where it reads some; empty where it was not tested."""
    column: str | None = None
    """Place of the right answers."""
    asked: tuple[str, ...] = ()
    """Columns of the data that the function reads, as far as its code shows."""
    form: str = ""
    """Form of the answers in probes; empty where no form scores above a wrong answer."""
    rows: tuple[int, ...] = ()
    seconds_per_completion: float = 0.0
    lines: tuple[ScoreLine, ...] = ()


def report_of(evidence: Evidence, findings: Sequence[Finding]) -> RewardReport:
    """The record of one test."""
    return RewardReport(
        name=evidence.info.name,
        where=evidence.info.where,
        kind=_kind(evidence),
        column=evidence.column,
        asked=evidence.asked,
        form=evidence.form.name if evidence.form else "",
        rows=tuple(case.row for case in evidence.cases),
        seconds_per_completion=evidence.seconds_per_completion,
        lines=tuple(_lines(evidence)),
        findings=tuple(findings),
    )


def _kind(evidence: Evidence) -> str:
    if evidence.is_cut:
        return ""
    if evidence.is_correctness:
        return "correctness"
    return "unknown" if evidence.asked else "style"


def untested(reward: Reward | RewardInfo, finding: Finding) -> RewardReport:
    """The record of a reward that was not called, or not on all texts, with the finding that says why."""
    return RewardReport(name=reward.name, where=reward.where, findings=(finding,))


def _lines(evidence: Evidence) -> Iterator[ScoreLine]:
    """Right and wrong answers in every form, and probes."""
    in_form = {probe.name for probe in PROBES if probe.uses_form(evidence.cases)}
    tables = {"right answer": evidence.gold, "wrong answer": evidence.wrong, "probe": evidence.probes}
    for group, scores in tables.items():
        for name, values in scores.items():
            yield ScoreLine(group=group, text=name, values=tuple(values.tolist()), is_shared=name not in in_form)


NO_ANSWER = frozenset(probe.name for probe in PROBES if probe.code in {"W105", "W106", "W115", "W117"})


def check_sum(reports: Sequence[RewardReport], weights: Sequence[float]) -> list[Finding]:
    """W121, where a text that is no right answer gets as much as the right one in its best form.

    Compared are texts that were the same for all functions. One function alone, functions that were tested with
    different rows, and sums without a reward for the answer give no finding.
    """
    if len(reports) < 2 or len({report.rows for report in reports}) != 1 or not any(report.form for report in reports):
        return []
    tables = [{(line.group, line.text): line for line in report.lines if line.is_shared} for report in reports]
    shared = [key for key in tables[0] if all(key in table for table in tables)]
    values = {key: np.array([table[key].values for table in tables]).T for key in shared}
    sums = {key: combine(scores, np.asarray(weights, float)) for key, scores in values.items()}
    right = {text: values for (group, text), values in sums.items() if group == "right answer"}
    if not right:
        return []
    form = max(right, key=lambda text: -math.inf if math.isnan(mean(right[text])) else mean(right[text]))
    wrong = {text: values for (group, text), values in sums.items() if group == "wrong answer" or text in NO_ANSWER}
    found = sum_finding([report.name for report in reports], form, right[form], wrong)
    return [] if found is None else [found]


def sum_finding(names: Sequence[str], form: str, right: np.ndarray, wrong: Mapping[str, np.ndarray]) -> Finding | None:
    """W121, where a text without the right answer reaches the right one's weighted sum in half the rows; else None.

    A warning: a sum of rewards of style may be meant so.

    Args:
        names: of the rewards.
        form: name of the right answer's line.
        right: its sum in each row.
        wrong: the same of other texts, by name.
    """
    better = [(text, mean(values)) for text, values in wrong.items() if _reaches(values, right)]
    if not better:
        return None
    shown = ", ".join(f"{text} {value:.3g}" for text, value in sorted(better, key=lambda pair: -pair[1])[:5])
    return Finding(
        code="W121",
        severity="warning",
        what=f"the weighted sum of {listed(names)} gives texts without the right answer as much as the right "
        f"one ({form}: {mean(right):.3g}): {shown}",
        why="what the sum likes best is what training makes",
        fix="raise the weight of the reward for the answer, or let the others count only where it is right",
        facts={"names": names, "form": form, "mean": mean(right), "shown": shown},
    )


def _reaches(values: np.ndarray, right: np.ndarray) -> bool:
    """In half the rows or more."""
    known = ~np.isnan(values + right)
    return bool(known.any()) and (values[known] >= right[known] - 1e-9 * np.abs(right[known])).mean() >= MOST
