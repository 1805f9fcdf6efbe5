"""Successive halving: every rung trains the better half of the rung before for more steps.

Karnin, Koren and Somekh, "Almost optimal exploration in multi-armed bandits" (ICML 2013), algorithm 3; Jamieson and
Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization" (arXiv:1502.07943). Each rung starts
from the initial weights: a candidate's optimizer state is three times as large as the weights that it trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TIME_SHARE = 0.2
"""The most a pilot takes of the time in which the whole grid is trained."""
STEP_SHARE = 0.08
"""Optimizer steps of a pilot, as a share of those of the whole grid. First steps take about twice as long as
later ones, and sampling, evaluations and loading take the rest of `TIME_SHARE`."""
LAST = 3
"""Most candidates of the last rung; every rung starts from the initial weights, so one more would cost more than it
tells."""
FEWEST_STEPS = 3
"""Steps of a first rung below which one candidate cannot be told from another."""


@dataclass(frozen=True, slots=True)
class Rung:
    """Training of `candidates` for `steps` optimizer steps each."""

    candidates: int
    steps: int


def rungs(grid: int, alive: int, full_steps: int) -> tuple[Rung, ...]:
    """The rungs of a pilot: as many candidates as the steps allow, halved until at most `LAST` are left.

    Args:
        grid: number of candidates before any was dropped, whose full training is the measure of the steps.
        alive: candidates that may be trained.
        full_steps: optimizer steps of the recipe.

    >>> rungs(8, 6, 30), rungs(2, 2, 30)
    ((Rung(candidates=3, steps=6),), (Rung(candidates=2, steps=3),))
    >>> rungs(12, 12, 60)
    (Rung(candidates=6, steps=4), Rung(candidates=3, steps=9))
    """
    steps = STEP_SHARE * grid * full_steps
    for first in range(alive, 1, -1):
        made = _halved(first, steps, full_steps)
        if made[0].steps >= FEWEST_STEPS:
            return made
    return (Rung(min(alive, 2), min(FEWEST_STEPS, full_steps)),) if alive else ()


def _halved(first: int, steps: float, full_steps: int) -> tuple[Rung, ...]:
    """Rungs of equal cost, as in Karnin's algorithm."""
    sizes = [first]
    while sizes[-1] > LAST:
        sizes.append(math.ceil(sizes[-1] / 2))
    return tuple(Rung(size, min(int(steps / len(sizes) / size), full_steps)) for size in sizes)


def best(scores: Mapping[int, float], count: int) -> list[int]:
    """The `count` candidates with the highest scores, best first; of equal scores the smaller number. NaN is lowest.

    >>> best({1: 0.5, 2: 0.9, 3: 0.9, 4: float("nan")}, 3)
    [2, 3, 1]
    """
    order: Sequence[int] = sorted(scores, key=lambda n: (-scores[n] if scores[n] == scores[n] else math.inf, n))
    return list(order[:count])
