"""How many rows repeat one another, in constant memory and one pass.

Distinct sampling (P. B. Gibbons, "Distinct Sampling for Highly-Accurate Answers to Distinct Values Queries", VLDB
2001): values are kept by their hash alone, and where there are too many, only those whose hash ends in enough zero
bits. Every kept value is counted over the whole stream, so shares of the sample are shares of all values. Up to
`CAPACITY` different values nothing is left out and the numbers are exact.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

CAPACITY = 100_000
"""Most values kept: about 20 MB."""


@dataclass(slots=True)
class DistinctSample:
    """Values seen, by hash.

    >>> sample = DistinctSample()
    >>> for number, text in enumerate(["a", "b", "a", "a"]):
    ...     sample.add(text, number)
    >>> sample.num_repeats, sample.num_repeated, sample.first_repeat, sample.exact
    (2, 1, (2, 0), True)
    """

    capacity: int = CAPACITY
    level: int = 0
    """Zero bits that a hash must end in."""
    counts: dict[int, int] = field(default_factory=dict)
    first_rows: dict[int, int] = field(default_factory=dict)
    first_repeat: tuple[int, int] | None = None
    """The first row that repeats another that was kept, and that other."""
    answers: dict[int, str] = field(default_factory=dict)
    """Value of the first row -> what stands beside it, by hash."""
    num_contradicting: int = 0
    """Rows that say otherwise."""
    first_contradiction: tuple[int, str, int, str] | None = None
    """Row and what it says, of the first such row and of the one before it."""

    def add(self, value: Hashable, row: int, answer: str | None = None) -> None:
        """One row's value, and what goes with it; None: not known."""
        key = hash(value)
        if key & ((1 << self.level) - 1):
            return
        if key in self.counts:
            self.counts[key] += 1
            self.first_repeat = self.first_repeat or (row, self.first_rows[key])
            said = self.answers.get(key)
            if answer is not None and said is not None and not _agree(answer, said):
                self.num_contradicting += 1
                self.first_contradiction = self.first_contradiction or (row, answer, self.first_rows[key], said)
            return
        self.counts[key] = 1
        self.first_rows[key] = row
        if answer is not None:
            self.answers[key] = answer
        while len(self.counts) > self.capacity:
            self._thin_out()

    def __contains__(self, value: Hashable) -> bool:
        return hash(value) in self.counts

    def _thin_out(self) -> None:
        self.level += 1
        mask = (1 << self.level) - 1
        self.counts = {key: count for key, count in self.counts.items() if not key & mask}
        self.first_rows = {key: self.first_rows[key] for key in self.counts}
        self.answers = {key: self.answers[key] for key in self.counts if key in self.answers}

    @property
    def exact(self) -> bool:
        """Whether every value was kept."""
        return self.level == 0

    @property
    def num_repeats(self) -> int:
        """Rows that could go without losing a value; an estimate unless `exact`."""
        return sum(count - 1 for count in self.counts.values()) << self.level

    @property
    def num_repeated(self) -> int:
        """Values that occur more than once; an estimate unless `exact`."""
        return sum(count > 1 for count in self.counts.values()) << self.level


def _agree(one: str, other: str) -> bool:
    """Whether two answers are the same text, or the same number."""
    try:
        return one == other or float(one.replace(",", "")) == float(other.replace(",", ""))
    except ValueError:
        return False
