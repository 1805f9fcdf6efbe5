"""An evaluation in numbers, each with its 95 % interval over prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from podium.algorithm.metrics import right
from podium.evaluation.measured import EvalScores
from podium.evaluation.statistics import Interval, mean_interval, mean_of_prompt, pass_at_k, share_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSummary:
    """One evaluation: P prompts, several completions each."""

    num_prompts: int
    num_completions: int
    """Over all prompts."""
    reward: Interval
    """Weighted sum of the reward functions."""
    means: Mapping[str, Interval]
    """By reward function."""
    accuracy: Interval | None
    """Share of completions that are right, which is pass@1; None: no reward function tells right from wrong."""
    pass_at: Mapping[int, Interval]
    """By k: chance that one of k completions is right."""
    format: Mapping[str, Interval]
    """Share of completions that a reward function called after a format gives its full mark, 1."""
    mean_tokens: Interval
    """Tokens of a completion."""
    truncated: Interval
    """Share of completions cut off at the limit."""


def summarize(scores: EvalScores, *, k: int | None = None) -> EvalSummary:
    """Means and shares over prompts. Shares have Wilson's intervals, other means the bootstrap's.

    Args:
        k: of a pass@k that is wanted besides those of powers of two.
    """
    count = scores.num_samples
    right_PG = scores.right_PG
    wanted = () if right_PG is None else sorted({*counts_up_to(count), k or 1})
    return EvalSummary(
        num_prompts=scores.num_prompts,
        num_completions=scores.tokens_PG.size,
        reward=_mean(scores.reward_PG),
        means={name: _mean(scores.by_name(name)) for name in scores.names_K},
        accuracy=None if right_PG is None else _share(right_PG),
        pass_at={k: share_interval(pass_at_k(right_PG, k), count) for k in wanted if right_PG is not None},
        format={name: _share(right(scores.by_name(name))) for name in scores.names_K if "format" in name},
        mean_tokens=_mean(scores.tokens_PG.astype(float)),
        truncated=_share(scores.truncated_PG.astype(float)),
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
    """A record of numbers as JSON values, NaN as null."""
    return json.loads(json.dumps(asdict(record)), parse_constant=lambda _: None)


def evidence(scores: EvalScores) -> dict[str, Any]:
    """Signs in the completions and baselines, for the file of an evaluation."""
    metric = "reward" if scores.accuracy is None else "accuracy"
    return {"signs": [sign.what for sign in scores.signs], "baselines": scores.baselines.to_json(metric)}
