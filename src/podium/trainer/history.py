"""How often each row was answered rightly, and which rows to draw next.

    history = SuccessHistory(num_completions=8)
    history = history.after([3, 17], right_PG)      # once a generation round: its rows and what was right
    history.weights(1000)                           # of each of 1,000 rows, for the next draw

A row weighs the probability that its next group differs: with the success rate p that the history estimates and G
completions, 1 - p^G - (1 - p)^G. Rows that are sometimes solved come first. Evidence fades with every round, towards
the mean of all rows, so solved and hopeless rows come again. Numbers that are the same on every rank.

Shape letters: P prompts of a generation round over all ranks, G completions per prompt, N rows of the training set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from podium.errors import ConfigError
from podium.errors.texts import named_list

HALF_LIFE = 16
"""Generation rounds in which the evidence on a row halves: the policy has moved since."""
PRIOR = 2.0
"""Completions' worth of the mean of all rows in the estimate of each."""
LEAST = 0.05
"""Least weight of a row, where the most is 1."""
FORGOTTEN = 0.05
"""Completions' worth of evidence under which a row is as one that was never drawn."""


class Evidence(NamedTuple):
    """The faded evidence on one row."""

    completions: float
    """As many as the faded evidence is worth."""
    right: float
    """How many of these were right."""
    round: int
    """The rounds that had been drawn when this was true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessHistory:
    """The share of right completions of each row that was drawn lately."""

    num_completions: int
    """G."""
    rounds: int = 0
    """Drawn so far."""
    rows: Mapping[int, Evidence] = field(default_factory=dict)

    def after(self, rows_P: Sequence[int], right_PG: np.ndarray) -> SuccessHistory:
        """The history with one more round in it. `right_PG`: 1 or 0; NaN for a completion that was not judged."""
        now = {row: self._faded(each) for row, each in self.rows.items()}
        for row, right_G in zip(rows_P, right_PG, strict=True):
            known_G = right_G[~np.isnan(right_G)]
            before = now.get(row, Evidence(0.0, 0.0, self.rounds))
            now[row] = Evidence(before.completions + known_G.size, before.right + float(known_G.sum()), self.rounds)
        kept = {row: each for row, each in now.items() if each.completions > FORGOTTEN}
        return replace(self, rounds=self.rounds + 1, rows=kept)

    def rates(self, count: int) -> np.ndarray:
        """The estimated success rate of each of `count` rows, float64 [N]."""
        faded = {row: self._faded(each) for row, each in self.rows.items()}
        total = sum(each.completions for each in faded.values())
        mean = sum(each.right for each in faded.values()) / total if total else 0.5
        rates_N = np.full(count, mean)
        for row, each in faded.items():
            rates_N[row] = (each.right + PRIOR * mean) / (each.completions + PRIOR)
        return rates_N

    def weights(self, count: int) -> np.ndarray:
        """How readily each of `count` rows is drawn, float64 [N], from `LEAST` to 1."""
        rates_N = self.rates(count)
        differs_N = 1 - rates_N**self.num_completions - (1 - rates_N) ** self.num_completions
        return np.maximum(differs_N, LEAST)

    def metrics(self, count: int) -> dict[str, float]:
        """Shares of `count` rows: those with evidence, and of them those that are nearly always or never solved."""
        rates_N = self.rates(count)[list(self.rows)]
        shares = {"solved": rates_N > 0.9, "hopeless": rates_N < 0.1}
        known = {f"rows/{name}": float(is_N.mean()) if len(is_N) else 0.0 for name, is_N in shares.items()}
        return {"rows/known": len(self.rows) / count, **known}

    def _faded(self, each: Evidence) -> Evidence:
        keeps = 0.5 ** ((self.rounds - each.round) / HALF_LIFE)
        return Evidence(each.completions * keeps, each.right * keeps, self.rounds)

    # ---- for checkpoints ----

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; JSON keeps every bit of a float."""
        return {"rounds": self.rounds, "rows": {str(row): list(each) for row, each in self.rows.items()}}

    def restored(self, saved: Mapping[str, Any]) -> SuccessHistory:
        """With what `to_json` wrote."""
        rows = {int(row): Evidence(*each) for row, each in saved["rows"].items()}
        return replace(self, rounds=saved["rounds"], rows=rows)


def balanced(rows: Iterable[Mapping[str, Any]], column: str) -> np.ndarray:
    """Weights of the rows that make every value of a column equally likely, float64 [N], the largest 1.

    >>> balanced([{"answer": "no"}, {"answer": "yes"}, {"answer": "no"}], "answer")
    array([0.5, 1. , 0.5])

    Raises:
        ConfigError: a row has no such column.
    """
    values = []
    for row in rows:
        if column not in row:
            raise ConfigError(
                f"balance_column: {column}, and the rows have no such column; they have {named_list(list(row))}.",
                code="C064",
                fix="Name one of them, such as the one with the labels.",
                settings=("balance_column",),
                column=column,
                columns=list(row),
            )
        values.append(str(row[column]))
    counts = Counter(values)
    least = min(counts.values(), default=1)
    return np.array([least / counts[value] for value in values])


def weighted_draw(rng: np.random.Generator, weights_N: np.ndarray, count: int) -> np.ndarray:
    """`count` different rows, each next one with a chance in proportion to its weight among those that are left
    (Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir").

    >>> sorted(weighted_draw(np.random.default_rng(0), np.array([1.0, 1e-9, 1.0]), 2).tolist())
    [0, 2]
    """
    return np.argsort(rng.exponential(size=len(weights_N)) / weights_N, kind="stable")[:count]
