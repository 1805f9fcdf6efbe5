"""The result of a test as records: a table of texts with their scores, and findings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from podium.records import Finding
from podium.rewards.tester.evidence import Evidence
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
        return (min(known), sum(known) / len(known), max(known)) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReport:
    """The result of the test of one reward function."""

    name: str
    where: str = ""
    kind: str = ""
    """`correctness`, where the score is about the answer, or `style`; empty where it could not be called."""
    column: str | None = None
    """Place of the right answers."""
    form: str = ""
    """Of the answers in probes; empty where no form scores above a wrong answer."""
    rows: tuple[int, ...] = ()
    seconds_per_completion: float = 0.0
    lines: tuple[ScoreLine, ...] = ()
    findings: tuple[Finding, ...] = ()


def report_of(evidence: Evidence, findings: Sequence[Finding]) -> RewardReport:
    """The record of one test."""
    return RewardReport(
        name=evidence.info.name,
        where=evidence.info.where,
        kind="correctness" if evidence.is_correctness else "style",
        column=evidence.column,
        form=evidence.form.name if evidence.form else "",
        rows=tuple(case.row for case in evidence.cases),
        seconds_per_completion=evidence.seconds_per_completion,
        lines=tuple(_lines(evidence)),
        findings=tuple(findings),
    )


def _lines(evidence: Evidence) -> Iterable[ScoreLine]:
    """Right and wrong answers in every form, probes, all numbers in one line."""
    for group, scores in (("right answer", evidence.gold), ("wrong answer", evidence.wrong)):
        for name, values in scores.items():
            yield ScoreLine(group=group, text=name, values=values)
    in_form = {probe.name for probe in PROBES if probe.uses_form(evidence.cases)}
    for name, values in evidence.probes.items():
        yield ScoreLine(group="probe", text=name, values=values, is_shared=name not in in_form)
    if evidence.numbers:
        flat = tuple(chain.from_iterable(evidence.numbers.values()))
        yield ScoreLine(group="probe", text="wrong numbers from 0 to 100", values=flat, is_shared=False)
