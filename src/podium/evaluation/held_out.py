"""Held-out completions in numbers, with 95 % intervals that know that samples of one prompt resemble each other.

Pure functions of scored groups. Shape letters: P prompts, G completions per prompt, K reward functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from podium.advantages import combine
from podium.records import ScoredGroup

Z = 1.959964
"""Two-sided 95 % of the normal distribution."""

RIGHT = 1.0
"""A reward that says right or wrong says right from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and the 95 % interval around it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One evaluation: P prompts, several completions each."""

    num_prompts: int
    num_completions: int
    """Over all prompts."""
    reward: Interval
    """Weighted sum of the reward functions."""
    means: Mapping[str, Interval]
    """By reward function."""
    accuracy: Interval | None
    """Share of completions that are right; None: no reward function says so."""
    mean_tokens: float
    truncated: float
    """Share of completions cut off at the limit."""
    groups: tuple[ScoredGroup, ...]


def numbers(looked: HeldOut) -> dict[str, Any]:
    """An evaluation without its completions, as JSON: `evaluation/before.json` and `after.json` of a run."""
    return {f.name: _plain(getattr(looked, f.name)) for f in fields(looked) if f.name != "groups"}


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return asdict(value)
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, Mapping) else value


def summarize(groups: Sequence[ScoredGroup], weights_K: np.ndarray, accuracy: str | None) -> HeldOut:
    """Numbers of an evaluation; `accuracy` is the name of the reward function that says right or wrong."""
    names = groups[0].names_K
    completions = [completion for scored in groups for completion in scored.group.completions]
    by_reward = {name: [scored.rewards_GK[:, k] for scored in groups] for k, name in enumerate(names)}
    return HeldOut(
        num_prompts=len(groups),
        num_completions=len(completions),
        reward=mean_interval([combine(scored.rewards_GK, weights_K) for scored in groups]),
        means={name: mean_interval(values) for name, values in by_reward.items()},
        accuracy=None if accuracy is None else share_interval([_right(x_G) for x_G in by_reward[accuracy]]),
        mean_tokens=float(np.mean([len(completion.token_ids) for completion in completions])),
        truncated=float(np.mean([completion.finish == "length" for completion in completions])),
        groups=tuple(groups),
    )


def accuracy_name(names: Sequence[str]) -> str | None:
    """The reward function that sounds like right or wrong.

    >>> accuracy_name(["answer_format", "answer_correct"]), accuracy_name(["brevity"])
    ('answer_correct', None)
    """
    for word in ("accuracy", "correct", "match", "answer"):
        for name in names:
            if word in name and "format" not in name:
                return name
    return None


def _right(rewards_G: np.ndarray) -> np.ndarray:
    """1 or 0; NaN where the function had no opinion."""
    return np.where(np.isnan(rewards_G), np.nan, (rewards_G >= RIGHT).astype(float))


def mean_interval(values_PG: Sequence[np.ndarray]) -> Interval:
    """Mean over completions; its standard error is that of the prompts' means (Miller 2024, arXiv:2411.00640, eq. 4).

    >>> print(mean_interval([np.array([1.0, 1.0]), np.array([0.0, 0.0]), np.array([1.0, 0.0])]))
    0.500 [-0.066, 1.066]
    """
    mean, error, _ = _clustered(values_PG)
    return Interval(value=mean, low=mean - Z * error, high=mean + Z * error)


def share_interval(values_PG: Sequence[np.ndarray]) -> Interval:
    """Share of ones: Wilson's interval for as many independent samples as these are worth.

    Samples of one prompt resemble each other, so G P of them are worth between P and G P: the number whose binomial
    error equals the clustered one. With nothing but zeros or ones that number is not known, and P is taken.

    >>> print(share_interval([np.zeros(4)] * 80))
    0.000 [0.000, 0.046]
    """
    share, error, (prompts, samples) = _clustered(values_PG)
    worth = share * (1 - share) / error**2 if error > 0 else prompts
    return wilson(share, min(max(worth, prompts), samples))


def wilson(share: float, count: float) -> Interval:
    """E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).

    >>> print(wilson(0.5, 100))
    0.500 [0.404, 0.596]
    """
    if count == 0:
        return Interval(value=math.nan, low=0.0, high=1.0)
    centre = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return Interval(value=share, low=max(0.0, centre - half), high=min(1.0, centre + half))


def _clustered(values_PG: Sequence[np.ndarray]) -> tuple[float, float, tuple[int, int]]:
    """Mean of all values, its standard error with prompts as clusters, and (prompts, values) that count."""
    known = [x_G[~np.isnan(x_G)] for x_G in values_PG]
    known = [x_G for x_G in known if x_G.size]
    count = sum(x_G.size for x_G in known)
    if count == 0:
        return math.nan, math.nan, (0, 0)
    mean = float(sum(x_G.sum() for x_G in known) / count)
    prompts = len(known)
    residuals_P = np.array([(x_G - mean).sum() for x_G in known])
    spread = float((residuals_P**2).sum()) * (prompts / (prompts - 1) if prompts > 1 else 1.0)
    return mean, math.sqrt(spread) / count, (prompts, count)
