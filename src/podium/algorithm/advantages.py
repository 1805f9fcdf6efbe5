"""Rewards become advantages: how much better a completion did than the others of its group.

Pure functions of numpy float64 arrays. NaN is a reward that does not exist: a function that returned None.

Shape letters: P prompts, G completions per prompt, K reward functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from podium.errors import ConfigError

STD_EPSILON = 1e-4
"""Added to every standard deviation that something is divided by; TRL's constant."""

REL_EPS = 1e-12
"""Two rewards that differ by less than this share of their summands' size are equal: the difference is rounding."""

FLAT = 1e-9
"""Total rewards that differ by no more than this are equal: in sampling, checks and monitors alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """Settings of advantages, from the run's arguments (`trainer.settings`)."""

    weights_K: np.ndarray
    """float64, one per reward function."""
    estimator: str = "grpo"
    """A key of `ESTIMATORS`; only "grpo" looks at `scale_rewards` and `aggregation`."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divisor of the distance to the group's mean; "normalize_then_sum" does not look at it, as in TRL."""
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    turn_discount: float | None = None
    """Discount of step rewards, in `turn_advantages`; None: turns have the advantage of their completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """The advantages of a generation round, with what metrics say about them."""

    advantages_PG: np.ndarray
    """float64, never NaN: 0 where no reward function had anything to say."""
    reward_PG: np.ndarray
    """Weighted sum of the raw rewards; NaN where every function returned None."""
    std_PG: np.ndarray
    """The standard deviation that divides, or the group's where none does; NaN where fewer than two are scored."""

    @property
    def zero_std_PG(self) -> np.ndarray:
        """bool: completions in a group without an advantage, since rewards are equal or fewer than two are known; the
        metric `frac_reward_zero_std`."""
        return np.broadcast_to(~self.advantages_PG.any(axis=1, keepdims=True), self.advantages_PG.shape)


def advantages(
    rewards_PGK: np.ndarray, settings: AdvantageSettings, lengths_PG: np.ndarray | None = None
) -> Advantages:
    """Advantages of every completion of a generation round (all ranks together: some look at all of them).

    Groups whose scored completions all did the same get exactly 0, so that they can be left out of the update; but for
    the estimators that compare with the whole round.

    Args:
        rewards_PGK: rewards of each function, NaN for None.
        settings: of the run.
        lengths_PG: drawn tokens of each completion; needed by "opo".

    Raises:
        ConfigError: rewards that the estimator is not defined for.
    """
    rewards_PGK = np.asarray(rewards_PGK, dtype=np.float64)
    assert not np.isinf(rewards_PGK).any(), "rewards must be finite or NaN; rewards.score refuses infinities"
    reward_PG = combine(rewards_PGK, settings.weights_K)
    estimator = ESTIMATORS[settings.estimator]
    if estimator is None:
        raw_PG, std_PG = AGGREGATIONS[settings.aggregation](rewards_PGK, reward_PG, settings)
    else:
        centred_PG = _centred(reward_PG, _size(rewards_PGK * settings.weights_K))
        raw_PG = estimator(reward_PG, centred_PG, lengths_PG)
        std_PG = np.broadcast_to(_std(centred_PG), reward_PG.shape)
    return Advantages(advantages_PG=np.nan_to_num(raw_PG, nan=0.0), reward_PG=reward_PG, std_PG=std_PG)


def combine(rewards_K: np.ndarray, weights_K: np.ndarray) -> np.ndarray:
    """Weighted sum over the last axis, without what is NaN; NaN where all are. Leading axes are kept.

    >>> combine(np.array([[1.0, 2.0], [1.0, np.nan], [np.nan, np.nan]]), np.array([1.0, 10.0]))
    array([21.,  1., nan])
    """
    total = np.nansum(rewards_K * np.asarray(weights_K, dtype=np.float64), axis=-1)
    return np.where(np.isnan(rewards_K).all(axis=-1), np.nan, total)


def has_spread(reward_G: np.ndarray) -> bool:
    """Whether scored completions of a group differ in their total reward by more than rounding.

    >>> has_spread(np.array([1.0, np.nan, 0.5])), has_spread(np.array([1.0, np.nan])), has_spread(np.array([np.nan]))
    (True, False, False)
    """
    known = reward_G[~np.isnan(reward_G)]
    return bool(known.size) and float(np.ptp(known)) > FLAT


def turn_advantages(
    steps_GT: np.ndarray, advantages_G: np.ndarray, std_G: np.ndarray, settings: AdvantageSettings
) -> np.ndarray:
    """Advantages [G, T] of the turns of a group: of each turn without the step rewards that came before it.

    With the return x_gt = sum_{k >= t} discount^(k - t) r_gk of turn t and X_g, the undiscounted sum of all steps:

        A_gt = A_g + ((x_gt - X_g) - mean_g'(x_g't - X_g')) / deviation

    The mean is over all completions of the group. One that has ended before t has the return 0, so the baseline does
    not depend on the turn at which the policy stops; a mean over those that reached t does, and pays for one turn more
    or less. Without step rewards, every turn has the advantage of its completion.

    Args:
        steps_GT: float64, weighted step rewards, 0 after the end of a completion; NaN in the row of one whose steps
            have no reward, which has its advantage in all turns and no part in the mean.
        advantages_G: of the completions.
        std_G: deviation of the total rewards, by which advantages were divided.
        settings: with a `turn_discount`.
    """
    assert settings.turn_discount is not None
    return_GT = np.zeros_like(steps_GT)
    ahead_G = np.zeros(len(steps_GT))
    for t in reversed(range(steps_GT.shape[1])):
        ahead_G = return_GT[:, t] = steps_GT[:, t] + settings.turn_discount * ahead_G
    past_GT = return_GT - steps_GT.sum(axis=1, keepdims=True)
    known_G = ~np.isnan(past_GT).any(axis=1)
    centred_GT = np.nan_to_num(past_GT - past_GT[known_G].mean(axis=0)) if known_G.any() else np.zeros_like(past_GT)
    if settings.scale_rewards != "none":  # where the deviation is 0 there is nothing to scale to
        centred_GT *= np.where(np.nan_to_num(std_G) > FLAT, 1 / (std_G + STD_EPSILON), 0.0)[:, None]
    return advantages_G[:, None] + centred_GT


# ---- aggregations: (rewards, their weighted sum, settings) -> (advantages, NaN where not scored; deviation) ----


def sum_then_normalize(
    rewards_PGK: np.ndarray, reward_PG: np.ndarray, settings: AdvantageSettings
) -> tuple[np.ndarray, np.ndarray]:
    """GRPO: one reward per completion, centred on its group (DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    Dividing by nothing is Dr. GRPO's (arXiv:2503.20783), by the deviation of the batch Lite PPO's (arXiv:2508.08221).
    """
    centred_PG = _centred(reward_PG, _size(rewards_PGK * settings.weights_K))
    group_std_PG = np.broadcast_to(_std(centred_PG), reward_PG.shape)
    if settings.scale_rewards == "none":
        return centred_PG, group_std_PG
    std_PG = group_std_PG if settings.scale_rewards == "group" else _std_of_all(reward_PG)
    return centred_PG / (std_PG + STD_EPSILON), std_PG


def normalize_then_sum(
    rewards_PGK: np.ndarray, reward_PG: np.ndarray, settings: AdvantageSettings
) -> tuple[np.ndarray, np.ndarray]:
    """GDPO: each function's rewards are normalised in their group, then summed and normalised over the batch, so that
    no function drowns another (arXiv:2601.05242).

    TRL also subtracts the mean of the batch. It is 0: in each group each function's normalised rewards sum to 0.
    """
    centred_PGK = _centred(rewards_PGK, np.nan_to_num(np.abs(rewards_PGK)).max(axis=1, keepdims=True))
    z_PGK = centred_PGK / (_std(centred_PGK) + STD_EPSILON) * settings.weights_K
    sum_PG = np.where(np.isnan(reward_PG), np.nan, np.nansum(z_PGK, axis=2))
    sum_PG = _centred(sum_PG, _size(z_PGK))
    std_PG = _std_of_all(sum_PG)
    return sum_PG / (std_PG + STD_EPSILON), std_PG


AGGREGATIONS = {"sum_then_normalize": sum_then_normalize, "normalize_then_sum": normalize_then_sum}


# ---- estimators: (weighted sums, the same less their group's mean, drawn tokens) -> advantages ----

Estimator = Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]


def leave_one_out(reward_PG: np.ndarray, centred_PG: np.ndarray, _lengths_PG: np.ndarray | None) -> np.ndarray:
    """RLOO: the reward less the mean of the others, G / (G - 1) (R_i - mean) (arXiv:2402.14740, section 3.3)."""
    count_P1 = (~np.isnan(reward_PG)).sum(axis=1, keepdims=True)
    return centred_PG * count_P1 / np.maximum(count_P1 - 1, 1)


def whitened(reward_PG: np.ndarray, _centred_PG: np.ndarray, _lengths_PG: np.ndarray | None) -> np.ndarray:
    """REINFORCE++: the reward, normalised over all completions of the round (arXiv:2501.03262, section 3.1)."""
    row = reward_PG.reshape(1, -1)
    centred = _centred(row, np.nan_to_num(np.abs(row)).max(axis=1, keepdims=True))
    return (centred / (_std(centred) + STD_EPSILON)).reshape(reward_PG.shape)


def whitened_baseline(_reward_PG: np.ndarray, centred_PG: np.ndarray, _lengths_PG: np.ndarray | None) -> np.ndarray:
    """REINFORCE++ with a baseline: the distance to the group's mean, normalised over the round (section 3.2)."""
    deviation = _std(centred_PG.reshape(1, -1))  # their mean is 0
    return centred_PG / (deviation + STD_EPSILON)


def over_mean(reward_PG: np.ndarray, centred_PG: np.ndarray, _lengths_PG: np.ndarray | None) -> np.ndarray:
    """MaxRL: the distance to the group's mean over that mean, (R_i - mean) / mean (arXiv:2602.02710): the gradient of
    the expected log of the success rate, for rewards from 0 upwards.

    Raises:
        ConfigError: the rewards of a group differ and have a mean below 0, which would turn the gradient round.
    """
    count_P1 = np.maximum((~np.isnan(reward_PG)).sum(axis=1, keepdims=True), 1)
    mean_P1 = np.nansum(reward_PG, axis=1, keepdims=True) / count_P1
    differs_P1 = (np.nan_to_num(centred_PG) != 0).any(axis=1, keepdims=True)
    if (undefined_P1 := differs_P1 & (mean_P1 < -FLAT)).any():
        raise ConfigError(
            "advantage_estimator maxrl divides by the mean reward of a group, and one has "
            f"{float(mean_P1[undefined_P1].min()):.3g}: for rewards from 0 upwards.",
            fix="advantage_estimator: rloo, or rewards that are never negative",
            settings=("advantage_estimator",),
            mean=float(mean_P1[undefined_P1].min()),
        )
    return centred_PG / (np.maximum(mean_P1, 0.0) + MEAN_EPSILON)


def length_weighted(reward_PG: np.ndarray, centred_PG: np.ndarray, lengths_PG: np.ndarray | None) -> np.ndarray:
    """OPO: less the mean of the group weighted by lengths, the baseline of least variance where gradients of tokens
    are orthogonal (arXiv:2505.23585, eq. 9)."""
    assert lengths_PG is not None, "the baseline is weighted by lengths"
    weight_PG = np.where(np.isnan(reward_PG), 0.0, lengths_PG)
    total_P1 = weight_PG.sum(axis=1, keepdims=True)
    # Over distances to the mean, not rewards: the same, and exactly 0 where all rewards are equal.
    return centred_PG - np.nansum(weight_PG * centred_PG, axis=1, keepdims=True) / np.maximum(total_P1, 1.0)


def best_alone(_reward_PG: np.ndarray, centred_PG: np.ndarray, _lengths_PG: np.ndarray | None) -> np.ndarray:
    """RAFT: 1 for the best of a group, 0 for the others: imitation of what succeeded (arXiv:2304.06767, algorithm 1).

    A group in which all did the same has no best one, and gets 0.
    """
    best_P1 = np.where(np.isnan(centred_PG), -np.inf, centred_PG).max(axis=1, keepdims=True)
    return np.where(np.isnan(centred_PG), np.nan, (centred_PG == best_P1) & (best_P1 > 0))


MEAN_EPSILON = 1e-6
"""Added to the mean that MaxRL divides by."""

ESTIMATORS: Mapping[str, Estimator | None] = {
    "grpo": None,  # by `AGGREGATIONS`
    "rloo": leave_one_out,
    "reinforce_plus_plus": whitened,
    "reinforce_plus_plus_baseline": whitened_baseline,
    "maxrl": over_mean,
    "opo": length_weighted,
    "raft": best_alone,
}
"""By the names that verl has, where it has one."""


# ---- means and deviations over axis 1 that know of NaN ----


def _centred(x_PG: np.ndarray, size_P1: np.ndarray) -> np.ndarray:
    """Distance to the mean of the group; exactly 0 in a group whose values differ by no more than rounding."""
    scored = ~np.isnan(x_PG)
    mean = np.nansum(x_PG, axis=1, keepdims=True) / np.maximum(scored.sum(axis=1, keepdims=True), 1)
    top = np.where(scored, x_PG, -np.inf).max(axis=1, keepdims=True)
    bottom = np.where(scored, x_PG, np.inf).min(axis=1, keepdims=True)
    return np.where(scored & (top - bottom <= REL_EPS * size_P1), 0.0, x_PG - mean)


def _size(summands_PGK: np.ndarray) -> np.ndarray:
    """Largest summand of each group [P, 1]: what rounding errors are proportional to."""
    return np.nan_to_num(np.abs(summands_PGK)).max(axis=(1, 2), initial=0.0)[:, None]


def _std(centred_PG: np.ndarray) -> np.ndarray:
    """Standard deviation of a group around its mean, with n - 1: 0 for groups of one, NaN for one scored of several."""
    if centred_PG.shape[1] == 1:
        return np.zeros_like(centred_PG)
    count = (~np.isnan(centred_PG)).sum(axis=1, keepdims=True)
    variance = np.nansum(centred_PG**2, axis=1, keepdims=True) / np.maximum(count - 1, 1)
    return np.where(count > 1, np.sqrt(variance), np.nan)


def _std_of_all(x_PG: np.ndarray) -> np.ndarray:
    """The standard deviation over all groups, for each completion [P, G]."""
    row = x_PG.reshape(1, -1)
    return np.broadcast_to(_std(_centred(row, np.nan_to_num(np.abs(row)).max(axis=1, keepdims=True))), x_PG.shape)
