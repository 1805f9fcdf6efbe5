"""Statistics of evaluations: pure functions of arrays with one value, or one row, for each prompt.

Prompts are what is drawn at random; completions of one prompt resemble each other. So everything is first averaged over
the completions of a prompt, and intervals and tests see prompts alone (Miller 2024, arXiv:2411.00640). NaN is a prompt
without a value. Intervals are of 95 % unless said otherwise; random numbers are the same on every call.

Shape letters: P prompts, G completions per prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
RESAMPLES = 9_999
"""Samples of a bootstrap, and sign patterns of a test that has more than that."""
FEWEST = 6
"""Prompts below which a bootstrap tells nothing, and no outcome has a chance below one in twenty (2 / 2^5)."""
_BATCH = 2**21
"""Numbers that a bootstrap holds at a time: 16 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and the interval around it; NaN ends: the error is not known."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        ends = "" if math.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.value:.3f}{ends}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """B less A on the same prompts."""

    a: float
    """Mean over the prompts for which both have a value."""
    b: float
    change: Interval
    p_value: float
    """By the sign-flip test."""
    num_prompts: int
    num_better: int
    """Prompts on which B is above A."""
    num_worse: int

    @property
    def shown(self) -> bool:
        """Whether chance alone would make a difference like this in less than one of twenty comparisons."""
        return self.p_value < 1 - LEVEL


def mean_of_prompt(values_PG: np.ndarray) -> np.ndarray:
    """[P, G] -> [P]: the mean of what is known of each prompt.

    >>> mean_of_prompt(np.array([[1.0, 0.0], [np.nan, 1.0], [np.nan, np.nan]]))
    array([0.5, 1. , nan])
    """
    known_PG = ~np.isnan(values_PG)
    count_P = known_PG.sum(axis=1)
    return np.where(count_P > 0, np.nansum(values_PG, axis=1) / np.maximum(count_P, 1), np.nan)


def mean_interval(values_P: np.ndarray, *, level: float = LEVEL, resamples: int = RESAMPLES) -> Interval:
    """Mean over prompts with the expanded percentile interval of the bootstrap over prompts.

    Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 13. Of n prompts the percentile interval
    alone is too short by sqrt((n-1)/n) and by normal in place of t; Hesterberg, "What teachers should know about the
    bootstrap", The American Statistician 69 (2015), section 5.3, moves its level by as much.

    >>> print(mean_interval(np.array([1.0, 0.0, 0.5, 0.5, 1.0, 0.0, 1.0, 0.0])))
    0.500 [0.125, 0.875]
    >>> print(mean_interval(np.ones(8)))  # all the same: a bootstrap has nothing to draw from
    1.000
    """
    from scipy.stats import bootstrap, norm, t

    known = values_P[~np.isnan(values_P)]
    value = float(known.mean()) if known.size else math.nan
    if known.size < FEWEST or np.ptp(known) == 0:
        return Interval(value=value, low=math.nan, high=math.nan)
    quantile = math.sqrt(known.size / (known.size - 1)) * t.ppf((1 + level) / 2, known.size - 1)
    result = bootstrap(
        (known,),
        np.mean,
        vectorized=True,
        method="percentile",
        confidence_level=min(float(2 * norm.cdf(quantile) - 1), 1 - 1e-9),
        n_resamples=resamples,
        batch=max(1, _BATCH // known.size),
        random_state=np.random.default_rng(0),
    )
    low, high = result.confidence_interval
    return Interval(value=value, low=float(low), high=float(high))


def share_interval(shares_P: np.ndarray, num_samples: int) -> Interval:
    """Mean of shares, one a prompt, with Wilson's interval for as many independent samples as these are worth.

    Near 0 and 1, where few prompts differ from the rest, a bootstrap is far too sure of itself; Wilson's interval is
    not. G samples a prompt are worth between P and G P independent ones: the number whose binomial error equals that of
    the mean over prompts. With nothing but zeros or ones that number is not known, and P is taken.

    Args:
        shares_P: of each prompt, between 0 and 1.
        num_samples: G, completions that each share is of.

    >>> print(share_interval(np.zeros(80), 4))
    0.000 [0.000, 0.046]
    """
    known = shares_P[~np.isnan(shares_P)]
    if known.size == 0:
        return Interval(value=math.nan, low=math.nan, high=math.nan)
    share = float(known.mean())
    error = float(known.std(ddof=1)) / math.sqrt(known.size) if known.size > 1 else 0.0
    worth = share * (1 - share) / error**2 if error > 0 else known.size
    return wilson(share, min(max(worth, known.size), known.size * num_samples))


def wilson(share: float, count: float) -> Interval:
    """E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).

    >>> print(wilson(0.5, 100))
    0.500 [0.404, 0.596]
    """
    from scipy.stats import norm

    z = float(norm.ppf((1 + LEVEL) / 2))
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return Interval(value=share, low=max(0.0, centre - half), high=min(1.0, centre + half))


def pass_at_k(right_PG: np.ndarray, k: int) -> np.ndarray:
    """Chance that one of k completions is right, for each prompt [P]: 1 - C(n-c, k) / C(n, k), which has no bias.

    Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), equation 1: the chance that k
    draws without replacement hold a right one. Of n completions that are known to be right or wrong c are right; NaN
    for n < k.

    >>> pass_at_k(np.array([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, np.nan, np.nan]]), 3)
    array([0.75, 0.  , 1.  ,  nan])
    """
    from scipy.stats import hypergeom

    known_PG = ~np.isnan(right_PG)
    return np.asarray(1 - hypergeom.pmf(0, known_PG.sum(axis=1), np.nansum(right_PG, axis=1), k))


def paired_difference(
    a_P: np.ndarray, b_P: np.ndarray, *, level: float = LEVEL, resamples: int = RESAMPLES
) -> Difference:
    """Mean of B less A over prompts: a bootstrap interval over prompts, and the sign-flip test.

    >>> found = paired_difference(np.array([0.0, 0.5, 0.0, 1.0, 0.0]), np.array([1.0, 0.5, 1.0, 1.0, 1.0]))
    >>> found.change.value, found.p_value, found.shown
    (0.6, 0.25, False)
    """
    both = ~(np.isnan(a_P) | np.isnan(b_P))
    a = a_P[both]
    b = b_P[both]
    return Difference(
        a=float(a.mean()) if a.size else math.nan,
        b=float(b.mean()) if b.size else math.nan,
        change=mean_interval(b - a, level=level, resamples=resamples),
        p_value=sign_flip_p_value(b - a, resamples=resamples),
        num_prompts=int(a.size),
        num_better=int((b > a).sum()),
        num_worse=int((b < a).sum()),
    )


def sign_flip_p_value(differences_P: np.ndarray, *, resamples: int = RESAMPLES) -> float:
    """Chance of a mean at least this far from 0 when every prompt's difference may as well have been reversed.

    Fisher's randomization test for pairs ("The Design of Experiments", 1935, section 21). Where two models answer each
    prompt alike, their completions could be exchanged, so the test is exact, however few prompts there are and however
    they are distributed. With one completion a prompt that is right or wrong it is McNemar's exact test. Two-sided; the
    p-value of randomly drawn signs counts what was observed among them (Phipson and Smyth 2010), so it is never too
    small.

    >>> sign_flip_p_value(np.array([1.0, 1.0, 0.0, 1.0]))
    0.25
    """
    from scipy.stats import permutation_test

    moved = differences_P[differences_P != 0]  # whose sign makes no difference, or is what is asked about
    if moved.size == 0:
        return 1.0
    if np.ptp(np.abs(moved)) == 0:
        return _binomial((moved > 0).sum(), moved.size)
    if moved.size == 1:
        return 1.0
    result = permutation_test(
        (moved,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        batch=max(1, _BATCH // moved.size),
        random_state=np.random.default_rng(0),
    )
    return float(result.pvalue)


def mcnemar_p_value(a_right_P: np.ndarray, b_right_P: np.ndarray) -> float:
    """McNemar's exact test of right or wrong on the same prompts, one completion each: 1, 0, or NaN for not known.

    McNemar, "Note on the sampling error of the difference between correlated proportions", Psychometrika 12 (1947); the
    exact form is a binomial test of the prompts that only one of the two got right. Two-sided.

    >>> mcnemar_p_value(np.array([1, 0, 0, 0, 0, 0.0]), np.array([1, 1, 1, 1, 1, 0.0]))
    0.125
    """
    only_a = int((a_right_P > b_right_P).sum())
    only_b = int((b_right_P > a_right_P).sum())
    return _binomial(only_b, only_a + only_b) if only_a + only_b else 1.0


def _binomial(successes: int, count: int) -> float:
    from scipy.stats import binomtest

    return float(binomtest(int(successes), int(count)).pvalue)
