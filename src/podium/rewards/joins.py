"""How the values of several rewards become one. Records and not closures, so that they can be sent to other processes.

Shape letters: R completions of the round, K parts. NaN is "no opinion".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from podium.algorithm.advantages import combine
from podium.errors import ConfigError
from podium.rewards.text import group_of_each

Log = Callable[[str, float], None]
"""Takes the name of a metric of the combination, and its value."""


class Join(Protocol):
    """How the values of the parts become one."""

    def __call__(self, values_KR: np.ndarray, arguments: Mapping[str, Any], log: Log) -> np.ndarray:
        """[K, R] -> [R]; `arguments` are those of the call."""


@dataclass(frozen=True, slots=True)
class Sum:
    """The weighted sum of what has an opinion."""

    weights_K: tuple[float, ...]

    def __call__(self, values_KR: np.ndarray, arguments: Mapping[str, Any], log: Log) -> np.ndarray:
        return combine(values_KR.T, np.array(self.weights_K))


@dataclass(frozen=True, slots=True)
class Gate:
    """The first part where the second is above a threshold."""

    above: float
    otherwise: float

    def __call__(self, values_KR: np.ndarray, arguments: Mapping[str, Any], log: Log) -> np.ndarray:
        reward_R, gate_R = values_KR
        unknown_R = np.isnan(values_KR).any(axis=0)
        return np.where(unknown_R, np.nan, np.where(gate_R > self.above, reward_R, self.otherwise))


@dataclass(frozen=True, slots=True)
class Clip:
    """Held between two bounds."""

    low: float | None
    high: float | None

    def __call__(self, values_KR: np.ndarray, arguments: Mapping[str, Any], log: Log) -> np.ndarray:
        return np.asarray(np.clip(values_KR[0], self.low, self.high))


SCALES: Mapping[str, Callable[[np.ndarray], float]] = {
    "std": lambda known: float(known.std()),
    "range": lambda known: float(np.ptp(known)),
    "none": lambda known: 1.0,
}
_FLAT = 1e-12
"""Deviation, relative to the largest value, under which values count as equal: that of rounding."""


@dataclass(frozen=True, slots=True)
class Normalise:
    """Less the mean, over the scale, of the group or of the round."""

    within: str
    scale: str

    def __call__(self, values_KR: np.ndarray, arguments: Mapping[str, Any], log: Log) -> np.ndarray:
        (values_R,) = values_KR
        group_R = np.zeros(len(values_R), dtype=np.int64)
        if self.within == "group":
            prompts = arguments.get("prompts")
            if prompts is None:
                raise ConfigError("`normalised` within the group must be called with `prompts`.")
            group_R = np.array(group_of_each(prompts))
        result_R = np.full(len(values_R), np.nan)
        for group in np.unique(group_R):
            member_R = (group_R == group) & ~np.isnan(values_R)
            if member_R.any():
                result_R[member_R] = self._of_one(values_R[member_R])
        return result_R

    def _of_one(self, known: np.ndarray) -> np.ndarray:
        centred = known - known.mean()
        if np.abs(centred).max() <= _FLAT * np.abs(known).max():
            return np.zeros_like(known)
        return np.asarray(centred / SCALES[self.scale](known))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Times a weight that depends on the training step; it is logged."""

    schedule: str
    start: float
    end: float
    begin: int
    steps: int | None
    at: tuple[tuple[int, float], ...]

    def __call__(self, values_KR: np.ndarray, arguments: Mapping[str, Any], log: Log) -> np.ndarray:
        weight = self.weight(arguments.get("trainer_state"))
        log("weight", weight)
        return np.asarray(values_KR[0] * weight)

    def weight(self, state: Any) -> float:
        """At the step of `state`, transformers' `TrainerState`; at the first step where there is none."""
        step = 0 if state is None else int(state.global_step)
        if self.schedule == "steps":
            return next((weight for first, weight in reversed(self.at) if step >= first), self.start)
        steps = self.steps
        if steps is None:
            steps = max(1, (0 if state is None else int(state.max_steps)) - self.begin)
        progress = min(1.0, max(0.0, (step - self.begin) / steps))
        if self.schedule == "cosine":
            progress = 0.5 * (1.0 - math.cos(math.pi * progress))
        return self.start + (self.end - self.start) * progress
