"""The test of a run's rewards before it is trained: without a model, and in a second for functions that are not slow.

    test = pretest(rewards, weights, rows)
    test.findings, test.table

Functions of the user get the whole test of `podium rewards test` on fewer seconds; rewards of the library are tried
with right and wrong answers alone. All are called in a forked process, so that functions with a memory are as before.
No result is kept: what a function's verdict depends on, modules and files that it reads among them, is not known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from podium.errors import Finding, PodiumError, RewardError, Severity, gravest_first
from podium.isolation.forked import Ended, Send, forked
from podium.isolation.functions import unwrapped
from podium.rewards.from_file import FileReward
from podium.rewards.model import RewardModel
from podium.rewards.resolve import ENVIRONMENTS, Reward
from podium.tester.calls import CallOutcome, LocalCaller, call, group_of
from podium.tester.cases import make_cases
from podium.tester.reach import WHOLE, Reach
from podium.tester.rewards import ExamineSettings, RewardReport, examine_resolved, untested
from podium.tester.truth import Subject, TruthTable, score_truths

NUM_ROWS = 8

SETTINGS = ExamineSettings(num_rows=NUM_ROWS, limit_seconds=10.0, budget_seconds=30.0)

SECONDS = 60.0
"""Wall-clock time for each reward, after which the process that calls them is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTest:
    """The result for all rewards of a run."""

    findings: tuple[Finding, ...] = ()
    """Errors first."""
    table: TruthTable | None = None
    """None: no right answers are known, or no reward was called."""
    seconds: tuple[float, ...] = ()
    """Time for one completion, by reward; 0: not called."""


def pretest(
    rewards: Sequence[Reward],
    weights: Sequence[float],
    rows: Sequence[Mapping[str, Any]],
    *,
    environments: bool = False,
    reach: Reach = WHOLE,
) -> RewardTest:
    """Test all rewards on rows with a `prompt`.

    `environments`: whether completions of the run have any; `reach`: what its prompts and tokenizer leave of a text.
    """
    settings = replace(SETTINGS, environments=environments, reach=reach)
    return _tested(rewards, weights, rows, settings) if rewards and rows else RewardTest()


SHAPES = frozenset({"W003", "W004", "W005", "W014"})
"""Codes of answers of functions that are no list of numbers, one for each completion."""


def refuse_shapes(rewards: Sequence[Reward], rows: Sequence[Mapping[str, Any]], *, environments: bool) -> None:
    """Raise `RewardError` for a function of the user's whose answer is no list of numbers, whatever it scores.

    Needs no model, so that it is said before weights are loaded; each function is called on two rows, in a fork.
    """
    called = [
        reward for reward in rewards if is_own(reward) and not reward.is_async and ENVIRONMENTS not in reward.needs
    ]
    if not called or not rows:
        return
    for results in _answers(called, rows, environments=environments):
        if all(outcome.code in SHAPES for outcome in results):
            raise RewardError(results[0].message, code=results[0].code, fix=results[0].fix)


def _answers(
    rewards: Sequence[Reward], rows: Sequence[Mapping[str, Any]], *, environments: bool
) -> list[list[CallOutcome]]:
    """Call each function on two rows. If one of them ends the process, the functions after it have no result."""
    groups = [group_of(case, [case.gold, case.wrong]) for case in make_cases(rows, None, 2)]
    answers: list[list[CallOutcome]] = []

    def work(send: Send) -> None:
        for reward in rewards:
            send([call(reward, [group], SETTINGS.limit_seconds, environments=environments) for group in groups])

    with contextlib.suppress(Ended):  # the test of all rewards says it
        answers.extend(forked(work, seconds=SECONDS))
    return answers


def is_own(reward: Reward) -> bool:
    """Whether the function, or one inside it, is neither the library's nor TRL's."""
    function = unwrapped(reward.function)
    if any(is_own(part) for part in getattr(function, "parts", ()) if isinstance(part, Reward)):
        return True
    module = str(getattr(function, "__module__", ""))
    return isinstance(function, FileReward) or not module.startswith(("podium.", "trl."))


def _tested(
    rewards: Sequence[Reward], weights: Sequence[float], rows: Sequence[Mapping[str, Any]], settings: ExamineSettings
) -> RewardTest:
    reports: list[RewardReport] = []
    table: TruthTable | None = None
    of_sum: Sequence[Finding] = ()
    work = functools.partial(_work, rewards, weights, rows, settings)
    try:
        for message in forked(work, seconds=SECONDS * len(rewards)):
            if isinstance(message, RewardReport):
                reports.append(message)
            else:
                table, of_sum = message
    except Ended as error:  # the table alone counts as the last reward's
        reports += [
            _untested(reward, "warning", str(error)) for reward in rewards[min(len(reports), len(rewards) - 1) :]
        ]
    found = [
        _unasked(finding, own=is_own(reward), kind=report.kind)
        for reward, report in zip(rewards, reports, strict=False)
        for finding in report.findings
    ]
    if not any(finding.severity != "note" and finding.code != "W122" for finding in found):  # those explain a sum
        found += of_sum
    seconds = tuple(report.seconds_per_completion for report in reports[: len(rewards)])
    return RewardTest(findings=tuple(gravest_first(found)), table=table, seconds=seconds)


def _work(
    rewards: Sequence[Reward],
    weights: Sequence[float],
    rows: Sequence[Mapping[str, Any]],
    settings: ExamineSettings,
    send: Send,
) -> None:
    """In the forked process: a report on each reward, then the table with the findings about the sum."""
    subjects = []
    for reward, weight in zip(rewards, weights, strict=True):
        report = _report(reward, weight, rows, settings)
        send(report)
        caller = LocalCaller(reward, settings.limit_seconds, environments=settings.environments)
        called = caller if report.kind else None
        subjects.append(Subject(caller=called, name=reward.name, weight=weight, report=report))
    send(score_truths(subjects, rows, NUM_ROWS, settings.budget_seconds))


def _report(
    reward: Reward, weight: float, rows: Sequence[Mapping[str, Any]], settings: ExamineSettings
) -> RewardReport:
    if isinstance(reward.function, RewardModel):
        return _untested(reward, "note", "a reward model's scores are a matter of degree")
    if ENVIRONMENTS in reward.needs and not is_own(reward):  # of the environment itself
        return RewardReport(name=reward.name, where=reward.where)
    if reward.is_async:
        return _untested(reward, "warning", "it is `async`, and may call a service")
    try:
        report = examine_resolved(reward, rows, weight, replace(settings, is_thorough=is_own(reward)))
    except PodiumError as error:
        return _untested(reward, "warning", error.what)
    hangs = next((finding for finding in report.findings if finding.code == "W016"), None)
    return (
        report if hangs is None else _untested(reward, "warning", hangs.what.splitlines()[0])
    )  # or the machine is slow


def _untested(reward: Reward, severity: Severity, why: str) -> RewardReport:
    return untested(
        reward,
        Finding(
            code="W122",
            severity=severity,
            what=f"{reward} was not tested on right and wrong answers here: {why}",
            fix="podium rewards test, which takes more time, for this reward",
            facts={"reward": reward, "why": why},
        ),
    )


def _unasked(finding: Finding, *, own: bool, kind: str) -> Finding:
    """The finding with the severity that it has in a test that was not asked for.

    The library's rewards have tests, and a form that no text of the test has may be the model's to find.
    """
    if (finding.code == "W122" and not own) or (
        kind != "correctness" and finding.code == "W008" and finding.severity == "warning"
    ):
        return replace(finding, severity="note")
    return finding


def as_plain(test: RewardTest) -> dict[str, Any]:
    """For JSON: `findings`, `table` and `seconds`; NaN is null."""
    plain = dataclasses.asdict(test)
    for line in (plain["table"] or {"lines": ()})["lines"]:
        line["means"] = [None if math.isnan(value) else value for value in line["means"]]
    return plain
