"""The early signal of a candidate as one number, and the value that a full run is expected to reach.

All are pure functions of measurements on rows of the training set that the pilot does not train on.

The error 1 - accuracy is taken to decay exponentially in the steps, at the rate seen so far (`reached`): a parametric
learning curve as in Domhan, Springenberg and Hutter (IJCAI 2015), with one parameter, as few points are there to fit.
The gain that it predicts is reduced by two measurements: groups of equal rewards have no gradient, and the part of a
gradient that two halves of a batch do not share is noise (McCandlish et al., arXiv:1812.06162).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from podium.evaluation.statistics import Interval, paired_difference, share_interval

SLOWER = 0.5
"""Rate of the steps to come, relative to the steps seen: a linear schedule halves the learning rate on average."""
REWARD_WEIGHT = 0.1
"""Weight of the mean reward beside accuracy: the form of an answer is often learnt before the answer."""
SOLVED = 0.95
SOME = 0.05
"""Gain from which on a candidate may learn, though few rows cannot tell it from chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Measurements of one candidate: at first only from samples, then from a rung."""

    before_P: np.ndarray
    """By prompt, the share of right answers before training; without an accuracy reward, of the highest reward."""
    after_P: np.ndarray
    """The same prompts after `steps`; equal to `before_P` at 0 steps."""
    samples: int
    """Completions of each prompt."""
    steps: int
    spread: float
    """Share of groups whose rewards differ, in the last half of the steps."""
    agreement: float = math.nan
    """Share of the squared gradient that is signal (`squared_norms`); NaN: not measured."""
    reward: float = 0.0
    """Mean reward after training, from 0 (the lowest seen in the pilot) to 1 (the highest)."""

    @property
    def before(self) -> float:
        return float(np.mean(self.before_P))

    @property
    def after(self) -> float:
        return float(np.mean(self.after_P))

    @property
    def learnt(self) -> bool:
        """Whether the gain on the same prompts is more than chance (sign-flip test, one in twenty)."""
        found = paired_difference(self.before_P, self.after_P)
        return bool(self.steps) and found.shown and found.change.value > 0


def promise(share_right: float, spread: float) -> float:
    """The score before training: the share of right answers, and the share of groups that have something to teach.

    >>> promise(0.0, 0.0), promise(0.3, 0.9) > promise(0.5, 0.5) > promise(0.0, 0.6)
    (0.0, True)
    """
    return share_right + spread


def score(signal: Signal, full_steps: int) -> float:
    """The accuracy now, and the gain that is expected of the remaining steps as far as there is signal for it.

    The expected gain is multiplied by the share of groups with spread, and by (1 + agreement) / 2: of two candidates
    that gained alike, the one whose gradients agree more will gain more often. `REWARD_WEIGHT` times the reward tells
    candidates apart that have no right answer yet.
    """
    expected = reached(_known(signal.before), _known(signal.after), signal.steps, full_steps)
    agreement = 0.0 if math.isnan(signal.agreement) else signal.agreement
    gain = max(expected - _known(signal.after), 0.0) * signal.spread * (1 + agreement) / 2
    return _known(signal.after) + gain + REWARD_WEIGHT * signal.reward


def reached(before: float, after: float, steps: int, full_steps: int) -> float:
    """Accuracy after `full_steps`, if the error goes on decaying at `SLOWER` times the rate of the first steps.

    >>> round(reached(0.2, 0.6, 10, 30), 3), reached(0.2, 0.1, 10, 30), reached(0.5, 0.5, 0, 30)
    (0.8, 0.1, 0.5)
    """
    if steps == 0 or after <= before or before >= 1:
        return after
    more = SLOWER * max(full_steps - steps, 0) / steps
    return 1 - (1 - after) * ((1 - after) / (1 - before)) ** more


def expected(signal: Signal, full_steps: int) -> Interval:
    """Accuracy after the full run, from the lower 95 % bound of the accuracy now to `reached` of the upper bound.

    Wide on purpose: it holds only if training goes on as it began.
    """
    now = share_interval(signal.after_P, signal.samples)
    high = reached(signal.before, max(now.high, signal.after), signal.steps, full_steps) if signal.learnt else now.high
    return Interval(value=(now.low + high) / 2, low=now.low, high=high)


def squared_norms(first_D: np.ndarray, second_D: np.ndarray) -> tuple[float, float]:
    """(|G|^2, |G_B|^2) of one batch: squared norms of the true gradient, without bias, and of the batch's.

    `first_D` and `second_D` are gradients of its halves, of the mean over each. McCandlish et al., appendix A.1, with
    B_small = B / 2: |G|^2 = (B |G_B|^2 - B/2 |G_small|^2) / (B/2) = first . second. The simple noise scale is
    B (|G_B|^2 / |G|^2 - 1). Sums over several batches before they are divided: the ratio of one batch has no mean.

    >>> squared_norms(np.array([1.0, 1.0]), np.array([1.0, -1.0]))
    (0.0, 1.0)
    """
    return float(first_D @ second_D), float(np.square((first_D + second_D) / 2).sum())


def _known(value: float) -> float:
    return 0.0 if math.isnan(value) else value
