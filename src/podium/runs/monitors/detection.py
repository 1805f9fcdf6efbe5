"""The type of detectors, and the statistics that they share. Pure functions of arrays."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from podium.errors import Finding
from podium.errors.texts import as_lines
from podium.runs.monitors.history import MetricHistory, RunSettings

Detector: TypeAlias = Callable[[MetricHistory], Finding | None]
"""A finding about the latest step, or None. A threshold or a trend gives a warning at most; an error is a fact: numbers
that are not finite (M131), weights that do not move under a gradient (M138)."""


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
