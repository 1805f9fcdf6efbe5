"""Rewards that weigh how long a completion is, in tokens.

Those named `get_...` are TRL's and make a reward function of their settings; one of them weighs repetitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from podium.errors import ConfigError
from podium.rewards.mathematics import accuracy_reward


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """DAPO's length penalty (arXiv:2503.14476, equation 13): 0, then falling to -1 over the last tokens.

    Up to `max_completion_len - soft_punish_cache` tokens cost nothing; `max_completion_len` tokens and more cost 1.

    >>> soft_overlong = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    >>> soft_overlong(completion_ids=[[1] * 80, [1] * 90, [1] * 101])
    [0.0, -0.5, -1.0]
    """
    from trl import rewards

    return rewards.get_soft_overlong_punishment(max_completion_len, soft_punish_cache)


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    r"""`accuracy_reward` scaled by length along a cosine (arXiv:2502.03373, appendix C.1): short and right is best.

    `max_len` is in tokens. TRL's takes chat completions only, this one plain text too.

    >>> cosine = get_cosine_scaled_reward(max_len=100)
    >>> cosine(completions=[r"\boxed{4}", r"\boxed{5}"], solution=["4", "4"], completion_ids=[[1] * 50, [1] * 50])
    [0.75, -0.75]
    """
    return _CosineScaled(max_len, (max_value_wrong, min_value_wrong), (min_value_correct, max_value_correct))


class _CosineScaled:
    """An object, so that it can be sent to another process."""

    __name__ = "cosine_scaled_reward"  # as TRL's, for metrics

    def __init__(self, max_len: int, wrong: tuple[float, float], correct: tuple[float, float]) -> None:
        self.max_len = max_len
        self.bounds = {0.0: wrong, 1.0: correct}
        """For a wrong and for a right answer: the values at `max_len` and at 0 tokens."""

    def __call__(
        self, completions: Sequence[Any], solution: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[float | None]:
        verdicts = accuracy_reward(completions, solution)
        return [
            None if verdict is None else self._scaled(self.bounds[verdict], len(ids))
            for verdict, ids in zip(verdicts, completion_ids, strict=True)
        ]

    def _scaled(self, bounds: tuple[float, float], num_tokens: int) -> float:
        longest, shortest = bounds
        progress = min(num_tokens / self.max_len, 1.0)  # a cosine would rise again behind `max_len`
        return longest + 0.5 * (shortest - longest) * (1.0 + math.cos(progress * math.pi))


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """`max_penalty` times the share of n-grams of token ids that are repetitions (arXiv:2502.03373, appendix C.2).

    >>> repetition = get_repetition_penalty_reward(ngram_size=2)
    >>> repetition(completion_ids=[[1, 2, 3, 4], [1, 2, 1, 2, 1]])
    [0.0, -0.5]
    """
    from trl import rewards

    return rewards.get_repetition_penalty_reward(ngram_size, max_penalty)


def ideal_length(completion_ids: Sequence[Sequence[int]], *, tokens: int, width: int | None = None) -> list[float]:
    """1 at `tokens` tokens, falling evenly to 0 at `width` tokens more or fewer (by default half of `tokens`).

    The end token counts as one.

    >>> ideal_length([[1] * 100, [1] * 125, [1] * 10], tokens=100)
    [1.0, 0.5, 0.0]
    """
    span = max(1, tokens // 2) if width is None else width
    if tokens < 1 or span < 1:
        raise ConfigError(f"`tokens` and `width` must be 1 or more; they are {tokens} and {width}.")
    return [max(0.0, 1.0 - abs(len(ids) - tokens) / span) for ids in completion_ids]


def token_budget(
    completion_ids: Sequence[Sequence[int]],
    budget: Sequence[Any] | None = None,
    *,
    tokens: int | None = None,
    slack: float = 0.5,
) -> list[float | None]:
    """1 up to the budget, falling evenly to 0 at `1 + slack` times of it.

    The budget is the row's `budget` column, where the dataset has one, else the setting `tokens`. None where a row has
    neither.

    >>> token_budget([[1] * 80, [1] * 125, [1] * 200], tokens=100)
    [1.0, 0.5, 0.0]
    >>> token_budget([[1] * 80, [1] * 80], budget=[100, None])
    [1.0, None]
    """
    if not slack > 0 or (tokens is not None and tokens < 1):
        raise ConfigError(f"`slack` must be above 0 and `tokens` 1 or more; they are {slack} and {tokens}.")
    if budget is None and tokens is None:
        raise ConfigError("`token_budget` needs the setting `tokens`, or a column `budget` in the dataset.")
    limits = [tokens] * len(completion_ids) if budget is None else [tokens if own is None else own for own in budget]
    return [
        None if limit is None else min(1.0, max(0.0, 1.0 - (len(ids) - limit) / (slack * limit)))
        for ids, limit in zip(completion_ids, limits, strict=True)
    ]
