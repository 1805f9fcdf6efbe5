"""The row of a detector in the table, and the statistics that detectors share. Pure functions of arrays."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from podium.errors import Finding, Severity
from podium.errors.texts import as_lines
from podium.runs.monitors.history import MetricHistory, RunSettings

ADDITIONS = "additions, seeds 1 to 8 (`benchmarks/health.py`)"
PLANTED = "planted data and rewards, first seed (`benchmarks/planted.py`)"
HACKED = "completions of hacked rewards (`tests/unit/test_hacks.py`)"
EPISODES = "scripted episodes (`tests/unit/test_agent_monitors.py`)"
"""The runs that thresholds were set on."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a detector has seen. Words that are empty are those of its row."""

    what: str
    """One sentence with the evidence in numbers."""
    why: str = ""
    fix: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    severity: Severity = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Detector:
    """A row of the table: what it reads, when it speaks, and its words.

    A threshold or a trend gives a warning at most; an error is a fact: numbers that are not finite (M131), weights that
    do not move under a gradient (M138).
    """

    code: str
    rank: int
    """Among findings of one severity the lowest comes first: causes before their consequences."""
    measured: str
    """The series that it reads, in words."""
    reported: str
    """Its thresholds, in words."""
    severity: str
    """That of its findings, or two joined by "or"."""
    set_on: str
    """The runs that the thresholds come from."""
    why: str
    fix: str
    find: Callable[[MetricHistory], Evidence | None]
    """The evidence after the latest step; None: there is none."""

    def __call__(self, history: MetricHistory) -> Finding | None:
        """The finding about the latest step, or None."""
        seen = self.find(history)
        if seen is None:
            return None
        return Finding(
            code=self.code,
            severity=seen.severity,
            what=seen.what,
            why=seen.why or self.why,
            fix=seen.fix or self.fix,
            changes=seen.changes,
        )


def detector(
    code: str,
    rank: int,
    measured: str,
    reported: str,
    *,
    severity: str = "warning",
    set_on: str = ADDITIONS,
    why: str = "",
    fix: str = "",
) -> Callable[[Callable[[MetricHistory], Evidence | None]], Detector]:
    """The row of the function below it; `why` and `fix` are left out where they depend on what is seen."""

    def row(find: Callable[[MetricHistory], Evidence | None]) -> Detector:
        return Detector(
            code=code,
            rank=rank,
            measured=measured,
            reported=reported,
            severity=severity,
            set_on=set_on,
            why=why,
            fix=fix,
            find=find,
        )

    return row


def slowed(changes: Mapping[str, Any], factor: int) -> str:
    """The advice to set `changes`, a learning rate divided by `factor` first, in words where the run's is unknown.

    >>> slowed({"learning_rate": 1e-06, "max_grad_norm": 0.2}, 10)
    'Set learning_rate: 1e-06; max_grad_norm: 0.2'
    >>> slowed({"max_grad_norm": 0.2}, 10), slowed({}, 3)
    ('Divide learning_rate by 10; set max_grad_norm: 0.2', 'Divide learning_rate by 3')
    """
    if "learning_rate" in changes:
        return f"Set {as_lines(changes)}"
    return f"Divide learning_rate by {factor}" + (f"; set {as_lines(changes)}" if changes else "")


def tried_by(settings: RunSettings, names: Container[str]) -> str:
    """The sentence on the test without a model that shows what these reward functions pay."""
    if settings.agent and "agent" in names:
        return "`podium agents test` plays the program with the right answer, and with others."
    return "`podium rewards test` tries right answers in several forms."


def trend(x: np.ndarray) -> float:
    """Mann-Kendall's z: over 2 a series rises, below -2 it falls, in between it may well do neither.

    It compares values by size only, so outliers and curvature do not mislead it (Kendall, "Rank Correlation Methods",
    4th edition 1975, section 4.9).

    >>> round(trend(np.arange(10.0)), 1), trend(np.ones(10))
    (3.9, 0.0)
    """
    x = x[np.isfinite(x)]
    n = len(x)
    if n < 4:
        return 0.0
    s = 0
    before: list[float] = []  # sorted
    for value in x.tolist():
        s += bisect_left(before, value) - len(before) + bisect_right(before, value)  # those below less those above
        insort(before, value)
    _, ties = np.unique(x, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    return (s - math.copysign(1, s)) / math.sqrt(variance) if s and variance > 0 else 0.0


def slope(x: np.ndarray) -> tuple[float, float]:
    """Rise per step of the least-squares line, and how many of its standard errors that is.

    >>> slope(np.array([0.0, 1.0, 2.0, 2.0]))[0]
    0.7
    """
    t = np.arange(len(x)) - (len(x) - 1) / 2
    rise = float((t * x).sum() / (t**2).sum())
    left = x - x.mean() - rise * t
    error = float(np.sqrt((left**2).sum() / max(len(x) - 2, 1) / (t**2).sum()))
    return rise, rise / error if error > 0 else float(np.sign(rise)) * np.inf


def mean(x: np.ndarray) -> float:
    """Mean of the finite values; NaN without any."""
    known = x[np.isfinite(x)]
    return float(known.mean()) if len(known) else math.nan


def ends(x: Sequence[float] | np.ndarray) -> tuple[float, float, int]:
    """Means of the first and of the last steps of a curve, and of how many: a tenth of it, at least 3, at most half.

    >>> ends([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]), ends([1.0])
    ((0.0, 1.0, 3), (1.0, 1.0, 1))
    """
    known = np.asarray(x, float)
    known = known[np.isfinite(known)]
    count = max(1, min(max(3, len(known) // 10), (len(known) + 1) // 2))
    return mean(known[:count]), mean(known[-count:]), count


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's, over pairs that are both finite; 0 where one of them is constant.

    >>> round(correlation(np.array([1.0, 2.0, np.nan]), np.array([2.0, 4.0, 0.0])), 3)
    1.0
    """
    known = np.isfinite(x) & np.isfinite(y)
    x = x[known]
    y = y[known]
    if len(x) < 2 or np.ptp(x) < 1e-12 or np.ptp(y) < 1e-12:
        return 0.0
    return float(np.clip(np.corrcoef(x, y)[0, 1], -1, 1))


def percent(share: float) -> str:
    """
    >>> percent(0.256)
    '26 %'
    """
    return f"{100 * share:.0f} %"


def some(items: Sequence[str], limit: int = 5) -> str:
    """The first few of a list, with the number of the others.

    >>> some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    rest = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {rest} more" if rest > 0 else "")
