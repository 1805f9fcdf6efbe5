"""Seconds of an optimizer step to expect, from those of the steps so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

WINDOW = 8
"""Generation rounds that an estimate is made of."""


def steps_per_round(settings: Mapping[str, Any]) -> int:
    """Optimizer steps that train on one generation round: only the first of them waits for its sampling.

    >>> steps_per_round({"steps_per_generation": 8, "num_iterations": 1, "gradient_accumulation_steps": 2})
    4
    """
    accumulation = int(settings.get("gradient_accumulation_steps") or 1)
    served = int(settings.get("steps_per_generation") or accumulation) * int(settings.get("num_iterations") or 1)
    return max(1, served // accumulation)


def typical_seconds(seconds: Sequence[float], per_round: int = 1) -> float | None:
    """Median seconds of a step over the latest rounds; None: no whole round is known yet.

    With several steps a round, the mean of the medians of its steps: one of them samples, the others do not.

    Args:
        seconds: of each step in order, but for the first of a run: it holds the proof, and completions that have not
            learnt to end.
        per_round: optimizer steps of a generation round.

    >>> typical_seconds([10.0, 11.0, 90.0]), typical_seconds([9.0, 1.0, 9.0, 1.0], 2), typical_seconds([])
    (11.0, 5.0, None)
    """
    if len(seconds) < per_round:
        return None
    latest = seconds[-WINDOW * per_round :]
    return fmean(median(latest[place::per_round]) for place in range(per_round))


def clock(seconds: float) -> str:
    """Minutes and seconds, hours where there are some.

    >>> clock(75), clock(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
