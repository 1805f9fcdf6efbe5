"""Counts of repeated values, in constant memory and one pass.

Distinct sampling (P. B. Gibbons, "Distinct Sampling for Highly-Accurate Answers to Distinct Values Queries", VLDB
2001): values are kept by their hash alone, and where there are too many, only those whose hash ends in enough zero
bits. Every kept value is counted over the whole stream, so shares of the sample are shares of all values. Up to
`CAPACITY` different values nothing is left out and the numbers are exact.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

CAPACITY = 100_000  # most values kept: about 20 MB


@dataclass(slots=True)
class _Seen:
    row: int
    answer: str | None
    count: int = 1


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
    level: int = 0  # zero bits that a hash must end in
    seen: dict[int, _Seen] = field(default_factory=dict)
    first_repeat: tuple[int, int] | None = None  # the first row that repeats another that was kept, and that other
    num_contradicting: int = 0  # rows with another answer than the first row of the same value
    first_contradiction: tuple[int, str, int, str] | None = None
    """Row and answer, of the first such row and of the one before it."""

    def add(self, value: Hashable, row: int, answer: str | None = None) -> None:
        """Count one row's value, and compare its answer; None: not known."""
        key = hash(value)
        if key & ((1 << self.level) - 1):
            return
        if (known := self.seen.get(key)) is not None:
            known.count += 1
            self.first_repeat = self.first_repeat or (row, known.row)
            if answer is not None and known.answer is not None and not _agree(answer, known.answer):
                self.num_contradicting += 1
                self.first_contradiction = self.first_contradiction or (row, answer, known.row, known.answer)
            return
        self.seen[key] = _Seen(row, answer)
        while len(self.seen) > self.capacity:
            self.level += 1
            self.seen = {key: each for key, each in self.seen.items() if not key & ((1 << self.level) - 1)}

    def __contains__(self, value: Hashable) -> bool:
        return hash(value) in self.seen

    @property
    def exact(self) -> bool:
        return self.level == 0

    @property
    def num_repeats(self) -> int:
        """Rows that could go without losing a value; an estimate unless `exact`."""
        return sum(each.count - 1 for each in self.seen.values()) << self.level

    @property
    def num_repeated(self) -> int:
        """Values that occur more than once; an estimate unless `exact`."""
        return sum(each.count > 1 for each in self.seen.values()) << self.level


def _agree(one: str, other: str) -> bool:
    try:
        return one == other or float(one.replace(",", "")) == float(other.replace(",", ""))
    except ValueError:
        return False
