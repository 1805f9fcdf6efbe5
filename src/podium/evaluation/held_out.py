"""An evaluation in numbers, each with its 95 % interval over prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from podium.evaluation.measured import Measured, right
from podium.evaluation.statistics import Interval, mean_interval, mean_of_prompt, pass_at_k, share_interval


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
    """Share of completions that are right, which is pass@1; None: no reward function says so."""
    pass_at: Mapping[int, Interval]
    """By k: chance that one of k completions is right."""
    format: Mapping[str, Interval]
    """Share of completions that a reward function called after a format gives its full mark, 1."""
    mean_tokens: Interval
    """Of a completion."""
    truncated: Interval
    """Share of completions cut off at the limit."""


def summarize(measured: Measured, *, k: int | None = None) -> HeldOut:
    """Means and shares over prompts. Shares have Wilson's intervals, other means the bootstrap's.

    Args:
        k: of a pass@k that is wanted besides those of powers of two.
    """
    right_PG, count = measured.right_PG, measured.num_samples
    return HeldOut(
        num_prompts=measured.num_prompts,
        num_completions=measured.tokens_PG.size,
        reward=_mean(measured.reward_PG),
        means={name: _mean(measured.by_name(name)) for name in measured.names_K},
        accuracy=None if right_PG is None else _share(right_PG),
        pass_at={}
        if right_PG is None
        else {k: share_interval(pass_at_k(right_PG, k), count) for k in sorted({*counts_up_to(count), k or 1})},
        format={name: _share(right(measured.by_name(name))) for name in measured.names_K if "format" in name},
        mean_tokens=_mean(measured.tokens_PG.astype(float)),
        truncated=_share(measured.truncated_PG.astype(float)),
    )


def counts_up_to(count: int) -> list[int]:
    """Powers of two, and the count itself.

    >>> counts_up_to(6), counts_up_to(1)
    ([1, 2, 4, 6], [1])
    """
    return sorted({2**i for i in range(count.bit_length()) if 2**i <= count} | {count})


def _mean(values_PG: np.ndarray) -> Interval:
    return mean_interval(mean_of_prompt(values_PG))


def _share(values_PG: np.ndarray) -> Interval:
    return share_interval(mean_of_prompt(values_PG), values_PG.shape[1])


def numbers(record: Any) -> Any:
    """A record of numbers as JSON values; what is not known is null."""
    if is_dataclass(record) and not isinstance(record, type):
        return {f.name: numbers(getattr(record, f.name)) for f in fields(record)}
    if isinstance(record, Mapping):
        return {str(name): numbers(each) for name, each in record.items()}
    if isinstance(record, (list, tuple)):
        return [numbers(each) for each in record]
    return None if isinstance(record, float) and math.isnan(record) else record
