"""Ways to join the values of several rewards: functions [K, R] -> [R].

Each takes the values, the arguments of the call, a function that logs a metric of the combination, and its settings.
Functions and not closures, so that they can be sent to other processes with their settings filled in.

Shape letters: R completions of the round, K parts. NaN is "no opinion".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from podium.algorithm.advantages import combine
from podium.errors import ConfigError
from podium.rewards.text import group_of_each

Log = Callable[[str, float], None]
Join = Callable[[np.ndarray, Mapping[str, Any], Log], np.ndarray]


def weighted_sum(values_KR: np.ndarray, _: Mapping[str, Any], __: Log, *, weights_K: tuple[float, ...]) -> np.ndarray:
    """The weighted sum of what has an opinion."""
    return combine(values_KR.T, np.array(weights_K))


def gate(values_KR: np.ndarray, _: Mapping[str, Any], __: Log, *, above: float, otherwise: float) -> np.ndarray:
    """The first part where the second is above a threshold."""
    reward_R, gate_R = values_KR
    unknown_R = np.isnan(values_KR).any(axis=0)
    return np.where(unknown_R, np.nan, np.where(gate_R > above, reward_R, otherwise))


def clip(values_KR: np.ndarray, _: Mapping[str, Any], __: Log, *, low: float | None, high: float | None) -> np.ndarray:
    """Held between two bounds."""
    return np.asarray(np.clip(values_KR[0], low, high))


SCALES: Mapping[str, Callable[[np.ndarray], float]] = {
    "std": lambda known: float(known.std()),
    "range": lambda known: float(np.ptp(known)),
    "none": lambda known: 1.0,
}
_FLAT = 1e-12
"""Deviation, relative to the largest value, under which values count as equal: that of rounding."""


def normalise(values_KR: np.ndarray, arguments: Mapping[str, Any], _: Log, *, within: str, scale: str) -> np.ndarray:
    """Less the mean, over the scale, of the group or of the round."""
    (values_R,) = values_KR
    group_R = np.zeros(len(values_R), dtype=np.int64)
    if within == "group":
        prompts = arguments.get("prompts")
        if prompts is None:
            raise ConfigError("`normalised` within the group must be called with `prompts`.")
        group_R = np.array(group_of_each(prompts))
    result_R = np.full(len(values_R), np.nan)
    for group in np.unique(group_R):
        member_R = (group_R == group) & ~np.isnan(values_R)
        known = values_R[member_R]
        if known.size:
            centred = known - known.mean()
            is_flat = np.abs(centred).max() <= _FLAT * np.abs(known).max()
            result_R[member_R] = 0.0 if is_flat else centred / SCALES[scale](known)
    return result_R


def times_weight(values_KR: np.ndarray, arguments: Mapping[str, Any], log: Log, **schedule: Any) -> np.ndarray:
    """Times a weight that depends on the training step; it is logged."""
    weight = weight_at(arguments.get("trainer_state"), **schedule)
    log("weight", weight)
    return np.asarray(values_KR[0] * weight)


def weight_at(
    state: Any,
    *,
    schedule: str,
    start: float,
    end: float,
    begin: int,
    steps: int | None,
    at: tuple[tuple[int, float], ...],
) -> float:
    """At the step of `state`, transformers' `TrainerState`; at the first step where there is none."""
    step = 0 if state is None else int(state.global_step)
    if schedule == "steps":
        return next((weight for first, weight in reversed(at) if step >= first), start)
    if steps is None:
        steps = max(1, (0 if state is None else int(state.max_steps)) - begin)
    progress = min(1.0, max(0.0, (step - begin) / steps))
    if schedule == "cosine":
        progress = 0.5 * (1.0 - math.cos(math.pi * progress))
    return start + (end - start) * progress
