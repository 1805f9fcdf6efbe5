"""What was seen of one reward function, and the arithmetic of its scores: what is asked for fills it, rules read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from podium.rewards.tester.asking import Described, Problem
from podium.rewards.tester.cases import Case, Form, columns_of

Scores = Mapping[str, tuple[float, ...]]
"""By name of a probe or form: one value a row, NaN where there is none."""

Texts = Mapping[str, Sequence[str | None]]
"""By name: one completion a row, None where there is none."""

ENDLESS = frozenset({"W002", "W003", "W004", "W005", "W016", "W012", "W014"})
"""What is wrong with every call; nothing more can be learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A call that gave no values."""

    probe: str
    row: int
    problem: Problem
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The same completions, asked for in different ways; None where that was not done."""

    base: tuple[float, ...] = ()
    again: tuple[float, ...] | None = None
    """The same call once more, with the same seed."""
    reseeded: tuple[float, ...] | None = None
    remembers: bool | None = None
    """Where calls differ: whether new processes differ in the same way each time; None where none can be had."""
    shuffled: tuple[float, ...] | None = None
    """Groups, and completions within a group, in another order."""
    alone: tuple[float, ...] | None = None
    """Each group in a call of its own."""
    single: tuple[float, ...] | None = None
    """The completions of the first group, each in a call of its own."""

    @property
    def is_relative(self) -> bool:
        """Whether a text is scored by comparison with the others of its prompt, and by nothing else."""
        if self.single is None or self.alone is None:
            return False
        first = self.base[: len(self.single)]
        return alike(self.base, self.alone) and not alike(first, self.single)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Asked for only where right answers do not score: what would make them."""

    matrix: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    """By form, [row][j]: the right answer of row j, as the completion of the row."""
    prompt_numbers: Mapping[str, Scores] = field(default_factory=dict)
    """`first` and `last` number of the question, by form; NaN where it is the right answer."""
    variants: Mapping[str, Scores] = field(default_factory=dict)
    """Right answers by form, where the answer column is as in `VARIANTS`."""
    other_kind: tuple[Scores, Scores] | None = None
    """Right and wrong answers by form, chat prompts made plain and plain ones chats."""
    depends: bool = False
    """Whether any score changes when rows are given each other's answers."""
    looks: bool = False
    """Whether a function that takes everything misses the column when it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that was seen of one reward function."""

    described: Described
    cases: tuple[Case, ...]
    column: str | None
    """Where right answers are from: a column, or a template of several."""
    forms: tuple[Form, ...]
    asked: tuple[str, ...] = ()
    """Columns of the data that the function reads, as far as its code says."""
    gold: Scores = field(default_factory=dict)
    wrong: Scores = field(default_factory=dict)
    form: Form | None = None
    """In which right answers score best above wrong ones; None: in none."""
    probes: Scores = field(default_factory=dict)
    numbers: Scores = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    mutated: tuple[str, ...] = ()
    seconds_per_completion: float = 0.0
    is_cut: bool = False
    """Whether there was no time for all."""
    repeats: Repeats = field(default_factory=Repeats)
    diagnosis: Diagnosis | None = None

    @property
    def names_answer(self) -> bool:
        """Whether the function reads the columns of the answer, as far as its code says."""
        return bool(self.columns) and set(self.columns) <= set(self.asked)

    @property
    def named(self) -> str:
        """The columns of the answer, or else all that the function reads, for messages."""
        return " and ".join(f"`{column}`" for column in self.columns if not self.asked or column in self.asked) or (
            " and ".join(f"`{column}`" for column in self.asked)
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that right answers are made of."""
        return columns_of(self.column)

    @property
    def is_correctness(self) -> bool:
        """Whether the reward is about the right answer: by what it scores, by its signature, or by what it misses."""
        seen = self.diagnosis is not None and (self.diagnosis.depends or self.diagnosis.looks)
        return self.form is not None or self.names_answer or seen

    def write(self) -> Callable[[str], str]:
        """How answers are written in probes."""
        return (self.form or self.forms[1]).write


# --- scores -----------------------------------------------------------------------------------------------------------


def gains_of(gold: Scores, wrong: Scores, name: str) -> list[float]:
    """By how much the right answer beats the wrong one, in the rows where both have a value."""
    pairs = zip(gold.get(name, ()), wrong.get(name, ()), strict=False)
    return [one - other for one, other in pairs if not math.isnan(one) and not math.isnan(other)]


def differ(one: Scores, other: Scores) -> bool:
    """Whether any two values are different, or only one of them is there."""
    return any(not close(a, b) for name in one for a, b in zip(one[name], other[name], strict=True))


def close(one: float, other: float) -> bool:
    """Equal up to rounding in batches; NaN only to NaN."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return abs(one - other) <= 1e-6 + 1e-4 * max(abs(one), abs(other))


def alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the same texts got the same scores."""
    return len(one) == len(other) and all(close(a, b) for a, b in zip(one, other, strict=True))


def mean(values: Iterable[float]) -> float:
    """Of what is a number; NaN of nothing.

    >>> mean([1.0, math.nan, 0.0])
    0.5
    """
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
