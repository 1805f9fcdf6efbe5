"""Recorded results of one reward function, and the arithmetic of its scores: `gather` writes them, rules read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from podium.data.columns import GOLD
from podium.errors import Finding, Severity
from podium.rewards.tester.callers import RewardInfo
from podium.rewards.tester.cases import ProbeCase, ReturnFormat, columns_of

Scores = Mapping[str, np.ndarray]
"""By name of a probe or form: one value a row, NaN where there is none."""

Texts = Mapping[str, Sequence[str | None]]
"""By name: one completion a row, None where there is none."""

MOST = 0.5
"""Share of the rows from which on a finding is no accident."""

NEARLY_ALL = 0.75
"""The same for what is concluded without a right answer that scores."""

LEAST_ROWS = 4
"""Rows below which no function is called wrong, but by an error that it raised."""

AS_IT_IS = "the column as it is"
"""Name of the right answers that are the answer column's own texts."""

ENDLESS = frozenset({"W002", "W003", "W004", "W005", "W016", "W012", "W014"})
"""Findings that hold of every call, so that nothing more can be learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCall:
    """A call that gave no values; `message` is what was raised, with the user's frames."""

    probe: str
    row: int
    text: str
    code: str
    message: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The same completions scored in different ways; None where that was not done."""

    base: Sequence[float] = ()
    again: Sequence[float] | None = None
    """The same call once more, with the same seed."""
    reseeded: Sequence[float] | None = None
    remembers: bool | None = None
    """Whether new processes differ in the same way each time; None where calls agree or there can be no process."""
    shuffled: Sequence[float] | None = None
    """Groups, and completions within a group, in another order."""
    alone: Sequence[float] | None = None
    """Each group in a call of its own."""
    single: Sequence[float] | None = None
    """The completions of the first group, each in a call of its own."""

    @property
    def is_relative(self) -> bool:
        """Whether a text is scored by comparison with the others of its prompt, and by nothing else."""
        if self.single is None or self.alone is None:
            return False
        return alike(self.base, self.alone) and not alike(self.base[: len(self.single)], self.single)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Reasons why right answers do not score; made only where they do not."""

    matrix: Mapping[str, np.ndarray]
    """By form, [row, j]: the right answer of row j, as the completion of the row."""
    prompt_numbers: Mapping[str, tuple[Scores, Scores]]
    """`first` and `last` number of the question, by form, NaN where it is the right answer; and the same texts as
    completions of another row."""
    variants: Mapping[str, Scores]
    """Right answers by form, where the answer column is as in `VARIANTS`."""
    other_kind: tuple[Scores, Scores]
    """Right and wrong answers by form, chat prompts made plain and plain ones chats."""
    usual: Scores
    """Right answers by form."""
    swapped: Sequence[Scores]
    """The same texts where rows are given each other's answers, each time of other rows."""
    looks: bool
    """Whether a function that takes everything misses the column when it is not there."""

    @property
    def depends(self) -> bool:
        """Whether any score changes when rows are given each other's answers."""
        return any(differ(each, self.usual) for each in self.swapped)

    def changes(self, name: str) -> np.ndarray:
        """By how much a right answer scores more than where its row has another's answer: [swap, row] of a form."""
        return np.nan_to_num(np.array([self.usual[name] - each[name] for each in self.swapped]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All results of one reward function."""

    info: RewardInfo
    cases: tuple[ProbeCase, ...]
    column: str | None
    """Place of the right answers: a column, or a template of several."""
    forms: tuple[ReturnFormat, ...]
    asked: tuple[str, ...] = ()
    """Columns of the data that the function reads, as far as its code shows."""
    given: bool = False
    """Whether the user named that place."""
    gold: Scores = field(default_factory=dict)
    wrong: Scores = field(default_factory=dict)
    elsewhere: Scores = field(default_factory=dict)
    """Right answers by form, as completions of another row."""
    foreign: np.ndarray = field(default_factory=lambda: np.array([]))
    """Right answers in the form that scores best, where the row has another one's answer and is as it was otherwise."""
    form: ReturnFormat | None = None
    """The one in which right answers score best above wrong ones; None: none."""
    probes: Scores = field(default_factory=dict)
    numbers: Scores = field(default_factory=dict)
    failures: tuple[FailedCall, ...] = ()
    mutated: Sequence[str] = ()
    seconds_per_completion: float = 0.0
    is_cut: bool = False
    """Whether there was no time for all."""
    num_planned: int = 0
    """Completions of a whole test, at most."""
    repeats: Repeats = field(default_factory=Repeats)
    diagnosis: Diagnosis | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that right answers are made of."""
        return columns_of(self.column)

    @property
    def names_answer(self) -> bool:
        """Whether the function reads the columns of the answer, as far as its code shows."""
        return bool(self.columns) and set(self.columns) <= set(self.asked)

    @property
    def knows_answer(self) -> bool:
        """Whether the place holds right answers: by its usual name, or since the user named it.

        Any other column that a function reads may be a setting of the task: a number of words, a letter.
        """
        return bool(self.columns) and (self.given or any(name in GOLD for name in self.columns))

    @property
    def is_judge(self) -> bool:
        """Whether the function is shown to tell right from wrong answers and to look at nothing else.

        Only then a score is called wrong. A list of texts may be one of which all are wanted.
        """
        values = [case.columns.get(name) for case in self.cases for name in self.columns]
        return self.knows_answer and self.is_binary and not any(isinstance(each, (list, tuple)) for each in values)

    @property
    def is_binary(self) -> bool:
        """Whether every right answer gets one score and every wrong one, in every form, another.

        And the same text gets less where the answer of its row is another's.
        """
        if self.form is None or len(self.cases) < LEAST_ROWS or not self.has_gold:
            return False
        right = self.gold[self.form.name]
        wrong = np.array([*self.wrong.values()])
        better = right > self.wrong[self.form.name]
        if better.sum() < LEAST_ROWS or not (self.foreign < right)[better].all():
            return False
        wrong = wrong[~np.isnan(wrong)]
        right = right[better]
        return bool(np.ptp(wrong) <= 1e-6 * np.ptp([*wrong, *right]) >= np.ptp(right))

    @property
    def has_gold(self) -> bool:
        return any(case.has_gold for case in self.cases)

    @property
    def named(self) -> str:
        """The columns of the answer, or else all that the function reads, for messages."""
        read = [column for column in self.columns if not self.asked or column in self.asked] or self.asked
        return " and ".join(f"`{column}`" for column in read)

    @property
    def depends(self) -> bool:
        return self.diagnosis is not None and self.diagnosis.depends

    @property
    def is_correctness(self) -> bool:
        """Whether the reward is about the right answer: by its scores, its signature, or a column that it misses."""
        looks = self.diagnosis is not None and self.diagnosis.looks
        return self.form is not None or (self.knows_answer and (self.names_answer or self.depends or looks))

    @property
    def show_form(self) -> str:
        """How to show what a right answer looks like: on the command line, and in Python."""
        if len(self.asked) < 2:
            flag = "--form 'Result => {}'"
            argument = "forms=['Result => {}']"
            how = "if answers are written in a form of your own, show it"
            return f"{how}: podium rewards test {flag}, or podium.rewards.audit(..., {argument})"
        columns = ", ".join(f"{{{column}}}" for column in self.asked)
        how = "show how a right answer is written, and in which form"
        flags = f"--answer-column '{columns}' --form 'Result => {{}}'"
        arguments = f"answer_column='{columns}', forms=['Result => {{}}']"
        return f"{how}: podium rewards test {flags}, or podium.rewards.audit(..., {arguments})"

    def finding(self, code: str, severity: Severity, what: str, why: str = "", fix: str = "", **facts: Any) -> Finding:
        """A finding that begins with the function and where it is."""
        where = f" ({self.info.where})" if self.info.where else ""
        what = f"`{self.info.name}`{where}: {what}"
        return Finding(code=code, severity=severity, what=what, why=why, fix=fix, facts=facts)

    @property
    def write(self) -> Callable[[str], str]:
        """The way answers are written in probes."""
        return (self.form or self.forms[1]).write


def gains_of(gold: Scores, wrong: Scores, name: str) -> np.ndarray:
    """By how much the right answer beats the wrong one, in the rows where both have a value."""
    gains = np.subtract(gold.get(name, ()), wrong.get(name, ()))
    return gains[~np.isnan(gains)]


def differ(one: Scores, other: Scores) -> bool:
    """Whether any two values are different, or only one of them is there."""
    return any(not alike(one[name], other[name]) for name in one)


def alike(one: ArrayLike, other: ArrayLike) -> bool:
    """Whether the same texts got the same scores."""
    return np.shape(one) == np.shape(other) and bool(np.all(close(one, other)))


def close(one: ArrayLike, other: ArrayLike) -> np.ndarray:
    """A mask of scores that are equal up to rounding in batches; NaN only to NaN."""
    return np.isclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def mean(values: ArrayLike) -> float:
    """Mean of the values that are numbers; NaN if there is none.

    >>> mean([1.0, math.nan, 0.0])
    0.5
    """
    known = np.asarray(values, float)
    known = known[~np.isnan(known)]
    return float(known.mean()) if known.size else math.nan


def significant(value: float) -> float:
    """A score to six significant digits, so that rounding in batches makes no difference.

    >>> significant(1.00000004e-9)
    1e-09
    """
    return float(f"{value:.6g}")


def shown(value: float) -> str:
    """A score in a message; NaN is what None became."""
    return "None" if math.isnan(value) else f"{value:.3g}"
