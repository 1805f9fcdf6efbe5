"""Tokens whose covariance of advantage and log-probability is high, which are what takes the entropy away.

    cov_t = (A_t - mean A) (log pi_t - mean log pi)

"The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv:2505.22617, section 4.2): a few
likely tokens with high advantages decide how fast entropy falls. Clip-Cov leaves some of them out of the gradient (eq.
12), KL-Cov holds those with the highest back by a KL penalty (eq. 14).

Pure functions of numpy arrays. N: drawn tokens of a generation round over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

BOUNDS = (1.0, 5.0)
"""Covariances among which Clip-Cov chooses; the authors'."""
KL_COEF = 1.0
"""Weight of |log(pi / pi_old)| on the tokens that KL-Cov chooses; the authors'."""


def covariances(advantages_N: np.ndarray, logps_N: np.ndarray) -> np.ndarray:
    """The contribution of each token to the covariance, float64 [N].

    >>> covariances(np.array([1.0, -1.0]), np.array([-0.5, -1.5])).tolist()
    [0.5, 0.5]
    """
    advantages_N = np.asarray(advantages_N, np.float64)
    logps_N = np.asarray(logps_N, np.float64)
    if not len(advantages_N):
        return advantages_N
    return (advantages_N - advantages_N.mean()) * (logps_N - logps_N.mean())


def clip_cov(cov_N: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Clip-Cov's tokens, bool [N]: that share of all, but one at least, drawn among those within `BOUNDS`."""
    within = np.flatnonzero((cov_N > BOUNDS[0]) & (cov_N < BOUNDS[1]))
    return _marked(rng.permutation(within)[: _count(share, cov_N)], cov_N)


def kl_cov(cov_N: np.ndarray, share: float, _rng: np.random.Generator | None = None) -> np.ndarray:
    """KL-Cov's tokens, bool [N]: that share of all, but one at least, whose covariance is highest."""
    return _marked(np.argsort(-cov_N, kind="stable")[: _count(share, cov_N)], cov_N)


CONTROLS: Mapping[str, Callable[[np.ndarray, float, np.random.Generator], np.ndarray]] = {
    "clip": clip_cov,
    "kl": kl_cov,
}
"""By the value of `covariance_control`."""


def _count(share: float, cov_N: np.ndarray) -> int:
    return max(int(share * len(cov_N)), 1)


def _marked(index: np.ndarray, cov_N: np.ndarray) -> np.ndarray:
    chosen_N = np.zeros(len(cov_N), bool)
    chosen_N[index] = True
    return chosen_N
