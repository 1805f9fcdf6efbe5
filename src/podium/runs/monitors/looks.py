"""The steps of a recorded run that detectors look at again: all of a short run, some of a long one.

A detector reads the numbers of all steps and the rounds of the last ones, so one look tells of many steps. What the
monitor reported during the run was found by a look at every step; the steps of its reports are looked at again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from podium.errors import Finding
from podium.records import StepMetrics

EVERY = 128
"""Steps up to which a detector looks at every one."""

SPREAD = 32
SPREAD_NUMBERS = 320
"""Looks at longer runs: with completions, whose rounds have to be read, and at numbers alone. Half of them are evenly
spread, half of them ever further apart, as most faults begin early."""

PEAKS = ("kl", "entropy", "grad_norm", "clip_ratio/region_mean", "completions/clipped_ratio", "health/update_ratio")
"""Metrics whose highest step is looked at, as a detector may have nothing to say of it later."""


def looks(
    history: Sequence[StepMetrics],
    with_rounds: Collection[int],
    recorded: Sequence[Finding],
    codes: Collection[str],
    *,
    tail: int,
) -> dict[int, Collection[str]]:
    """The detectors that look at a step, by its place in the history.

    Args:
        history: all steps.
        with_rounds: steps whose completions are recorded.
        recorded: findings that the monitor reported during the run.
        codes: of all detectors.
        tail: how many of the last steps are looked at, each.
    """
    count = len(history)
    if count <= EVERY:
        return dict.fromkeys(range(count), codes)
    drawn = [place for place, each in enumerate(history) if each.step in with_rounds]
    looked, last = (SPREAD, len(drawn) - 1) if drawn else (SPREAD_NUMBERS, count - 1)
    spread = {*np.linspace(0, last, looked // 2, dtype=int).tolist()}
    spread |= {*np.geomspace(1, last + 1, looked // 2, dtype=int).tolist()} - {last + 1}
    places = {drawn[i] for i in spread} if drawn else spread
    places |= {*range(count - tail, count), *_peaks(history)}
    found: dict[int, Collection[str]] = dict.fromkeys(places, codes)
    of_step = {each.step: place for place, each in enumerate(history)}
    for finding in _told(recorded):
        if finding.code in codes and finding.step in of_step:
            place = of_step[finding.step]
            found[place] = {*found.get(place, ()), finding.code}
    if "M131" in codes:  # reads one step
        for place, each in enumerate(history):
            if not all(map(np.isfinite, each.values.values())):
                found[place] = {*found.get(place, ()), "M131"}
    return found


def _peaks(history: Sequence[StepMetrics]) -> set[int]:
    """The places where one of `PEAKS` is highest."""
    found = set()
    for name in PEAKS:
        values = np.array([each.values.get(name, np.nan) for each in history])
        if np.isfinite(values).any():
            found.add(int(np.nanargmax(np.where(np.isfinite(values), values, np.nan))))
    return found


def _told(recorded: Sequence[Finding]) -> list[Finding]:
    """Of each code the first finding of each severity, and the last."""
    first: dict[tuple[str, str], Finding] = {}
    last: dict[str, Finding] = {}
    for finding in recorded:
        first.setdefault((finding.code, finding.severity), finding)
        last[finding.code] = finding
    return [*first.values(), *last.values()]
