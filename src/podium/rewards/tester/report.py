"""The result of a test as records, a table of texts with their scores and findings; and the sum of several tests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podium.algorithm.advantages import combine
from podium.errors import Finding
from podium.errors.texts import listed
from podium.rewards.resolve import Reward
from podium.rewards.tester.callers import RewardInfo
from podium.rewards.tester.evidence import MOST, Evidence, mean
from podium.rewards.tester.probes import PROBES


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
class RewardReport:
    """The result of the test of one reward function."""

    name: str
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
    findings: tuple[Finding, ...] = ()


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
    """Right and wrong answers in every form, probes, all numbers in one line."""
    in_form = {probe.name for probe in PROBES if probe.uses_form(evidence.cases)}
    tables = {"right answer": evidence.gold, "wrong answer": evidence.wrong, "probe": evidence.probes}
    for group, scores in tables.items():
        for name, values in scores.items():
            yield ScoreLine(group=group, text=name, values=tuple(values.tolist()), is_shared=name not in in_form)
    if evidence.numbers:
        values = np.concatenate(list(evidence.numbers.values()))
        text = "wrong numbers from 0 to 100"
        yield ScoreLine(group="probe", text=text, values=tuple(values.tolist()), is_shared=False)


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
    sums = {key: combine(each, np.asarray(weights, float)) for key, each in values.items()}
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
